"""Answers that match a grammar."""

import contextlib
import gc
import json
import random
import re
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue.args import EngineArgs, EngineOptions
from segue.contract.reports import EngineOutput
from segue.contract.step import Sampling
from segue.engine.config import EngineConfig
from segue.engine.submission import Intake
from segue.errors import ParameterError, RequestFailed
from segue.host.build import load
from segue.llm.llm import LLM
from segue.sample import guide as guide_module
from segue.sample.guide import Grammar, GrammarGuides
from segue.sample.params import SamplingParams, StructuredOutputsParams
from segue.tokens import Tokenizer
from segue.weights.gguf import load_gguf
from tests.engine.calls import add_request

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_model(load_gguf(smollm2_path))


def allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def sampling(params: SamplingParams, *, output_start: int = 0) -> Sampling:
    return params.resolve(output_start=output_start, eos_token_ids=[2], default_seed=0)


def grammar(**structured: Any) -> Sampling:
    return sampling(SamplingParams(structured_outputs=StructuredOutputsParams(**structured)))


def plain_masks(guides: GrammarGuides, of: Sampling, answer: Sequence[int]) -> list[bytes]:
    """What follows each prefix, asked one id after the other."""
    guide = guides.of(of)
    return [guide.masks(0, answer[:0], [])[0]] + [
        guide.masks(i, answer[i : i + 1], [])[0] for i in range(len(answer))
    ]


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Iterator[GrammarGuides]:
    guides = GrammarGuides(tokenizer)
    yield guides
    guides.close()


def test_masks_depend_on_the_answer_alone(tokenizer: Tokenizer, guides: GrammarGuides) -> None:
    """Not on drafts, on what was asked before, nor on where the answer was cut and went on."""
    answer = tokenizer.encode('{"name": "Ada", "age": 36, "tags": ["red", "blue"]}')
    plain = plain_masks(guides, grammar(json=SCHEMA), answer)
    assert all(allowed(mask, token) for mask, token in zip(plain, answer, strict=False))
    guide = guides.of(grammar(json=SCHEMA))
    rng = random.Random(5)
    for _ in range(60):
        known = rng.randint(0, guide.num_ids)
        end = rng.randint(known, len(answer))
        drafts = answer[end : end + rng.randint(0, 4)]
        if rng.random() < 0.3:
            drafts = [*drafts, tokenizer.encode("zzz")[0], *drafts]
        masks = guide.masks(known, answer[known:end], drafts)
        num_right = next(
            (i for i, token in enumerate(drafts) if answer[end + i : end + i + 1] != [token]), len(drafts)
        )
        assert len(masks) >= 1 + num_right
        assert masks[: num_right + 1] == plain[end : end + num_right + 1]


@pytest.mark.parametrize("structured", [{"choice": ["alpha", "beta"]}, {"regex": "a+"}])
def test_only_the_end_follows_the_end(
    tokenizer: Tokenizer, guides: GrammarGuides, structured: dict[str, Any]
) -> None:
    """In every row: also of those that follow drafts of the end, and after going back."""
    answer = [*tokenizer.encode("alpha" if "choice" in structured else "aaa"), 2, 2, 2]
    plain = plain_masks(guides, grammar(**structured), answer)
    for mask in plain[-3:]:
        assert [token for token in range(tokenizer.vocab_size) if allowed(mask, token)] == [2]
    guide = guides.of(grammar(**structured))
    assert guide.masks(0, answer[:1], [*answer[1:], 194, 2]) == plain[1:]
    assert guide.masks(1, answer[1:-1], [194, 2]) == plain[-2:-1]
    assert guide.masks(1, answer[1:3], []) == [plain[3]]


TOO_COMPLEX: list[tuple[dict[str, Any], str]] = [
    ({"grammar": "start: " + " | ".join(f'"w{i}x"' for i in range(3000))}, "3001 items"),
    ({"regex": "a{1000000}"}, "too many expressions"),
]


@pytest.mark.parametrize(("structured", "why"), TOO_COMPLEX, ids=["lark", "regex"])
def test_a_grammar_over_a_limit_is_an_error_of_its_request(
    smollm2_path: Path, structured: dict[str, Any], why: str
) -> None:
    too_much = SamplingParams(structured_outputs=StructuredOutputsParams(**structured), max_tokens=9)
    plain = SamplingParams(temperature=0, max_tokens=9)
    loaded = load(EngineArgs(model=str(smollm2_path), max_model_len=64))
    engine = loaded.engine
    with LLM(smollm2_path, max_model_len=64) as llm:
        (alone,) = llm.generate(["Once"], plain, use_tqdm=False)
    ends: dict[str, EngineOutput] = {}
    ids: list[int] = []
    add_request(engine, "failed", [1, 2], too_much)
    add_request(engine, "whole", alone.prompt_token_ids, plain)
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids += output.token_ids if output.request_id == "whole" else []
            ends[output.request_id] = output
    engine.close()
    error = ends["failed"].error
    assert error is not None
    assert re.search(f"over a limit.*{why}", error)
    assert "\n" not in error
    assert ids == alone.outputs[0].token_ids


def test_wrong_drafts_do_not_spend_the_limit(tokenizer: Tokenizer) -> None:
    """Where the answer alone is over the limit, and where it is not, is the same with drafts and beside others."""
    of = grammar(regex=r"[a-z]{1,200}[0-9]{3,80}(foo|bar[a-z]*)+")
    answer = tokenizer.encode("zebra123456foofoofoo")
    wrong = [
        tokenizer.encode(text) for text in ("hello" * 9, "zoo" + "9" * 30, "a1b2", "zed5555555foobarbarx")
    ]

    def end_of(guides: GrammarGuides, *, drafts: bool, others: bool) -> tuple[int, list[bytes]]:
        if others:
            for each in wrong:
                with contextlib.suppress(RequestFailed):
                    plain_masks(guides, msgspec.structs.replace(of), each)
        guide = guides.of(msgspec.structs.replace(of))
        masks: list[bytes] = []
        for i in range(len(answer) + 1):
            known, new = max(0, i - 1), answer[max(0, i - 1) : i]
            try:
                masks.append(guide.masks(known, new, wrong[i % 4] if drafts else [])[0])
            except RequestFailed:
                return i, masks
        return len(answer) + 1, masks

    ends = set()
    for limit in range(20, 200, 15):
        results = []
        for drafts, others in ((False, False), (True, False), (False, True), (True, True)):
            guides = GrammarGuides(tokenizer, max_lexer_states=limit)
            try:
                results.append(end_of(guides, drafts=drafts, others=others))
            except RequestFailed:
                results.append((0, []))
            finally:
                guides.close()
        assert all(result == results[0] for result in results), limit
        ends.add(results[0][0])
    assert len(ends) > 2, "limits that stop the answer at different places"


def test_a_guide_lives_as_long_as_its_answer(guides: GrammarGuides) -> None:
    of = grammar(regex="a+")
    guide = weakref.ref(guides.of(of))
    assert guide() is not None
    del of
    gc.collect()
    assert guide() is None


def test_requests_with_one_grammar_share_what_is_compiled(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Grammar] = []

    def make(*arguments: Any) -> Grammar:
        made.append(Grammar(*arguments))
        return made[-1]

    monkeypatch.setattr(guide_module, "Grammar", make)
    guides = GrammarGuides(tokenizer)
    samplings = [grammar(regex="[ab]+") for _ in range(4)]
    for each in samplings:
        guides.is_ready(each, 0.0)
    masks = [guides.of(each).masks(0, [], []) for each in samplings]
    assert masks == masks[:1] * 4
    assert len(made) == 1
    guides.close()


def test_a_model_without_an_end_refuses_grammars(tokenizer: Tokenizer) -> None:
    class Endless:
        eos_token_ids: frozenset[int] = frozenset()

    guides = GrammarGuides(Endless())  # type: ignore[arg-type]
    with pytest.raises(RequestFailed, match="no token that ends a text"):
        guides.of(grammar(regex="a"))
    guides.close()
    config = EngineConfig(max_model_len=64, num_kv_blocks=8)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ParameterError, match=r"structured_outputs.*no token that ends a text"):
        Intake(config, 100).chunk([1], params)


ENDINGS = [
    {"ignore_eos": True, "max_tokens": 14},
    {"min_tokens": 12, "max_tokens": 20},
    {"min_tokens": 12, "max_tokens": 20, "stop_token_ids": [28, 30]},
]


@pytest.mark.parametrize("ending", ENDINGS, ids=["ignore_eos", "min_tokens", "stop_token_ids"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_finished_grammar_goes_on_with_the_end(
    smollm2_path: Path, ending: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["alpha", "beta"]),
        temperature=temperature,
        seed=1,
        **ending,
    )
    answers = []
    for options in (EngineOptions(max_model_len=160), EVERYTHING):
        with LLM(smollm2_path, **options) as llm:
            outputs = llm.generate(["alpha, beta, 2, 2, 2, 2, alpha"] * 2, params, use_tqdm=False)
        answers += [output.outputs[0] for output in outputs]
    for answer in answers:
        assert answer.token_ids == answers[0].token_ids
        assert answer.text in ("alpha", "beta")
    token_ids = answers[0].token_ids
    end = token_ids.index(2)
    assert set(token_ids[end:]) == {2}
    assert len(token_ids) == ending.get("min_tokens", 14)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"regex": "((("}, "unclosed group"),
        ({"json": "{x"}, "key must be a string"),
        ({"json": {"type": "foo"}}, "Invalid type"),
        ({"choice": []}, "non-empty"),
        ({"choice": ["a", ""]}, "non-empty"),
        ({"grammar": "start: %%"}, "lexer error"),
        ({"regex": "a", "choice": ["a"]}, "exactly one"),
        ({}, "exactly one"),
    ],
)
def test_a_wrong_grammar_is_named(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ParameterError, match=f"structured_outputs.*{why}") as caught:
        StructuredOutputsParams(**wrong).check()  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_what_a_message_repeats_is_shortened() -> None:
    schema = {"type": "object", "properties": {f"property{i}": {"type": "wrong"} for i in range(9000)}}
    with pytest.raises(ParameterError) as caught:
        StructuredOutputsParams(json=schema).check()
    assert len(str(caught.value)) < 700
    with pytest.raises(ParameterError) as caught:
        StructuredOutputsParams(grammar='start: "' + "x" * 100_000).check()
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"properties": {"b": {"pattern": "((("}}}}}, "at properties.a.properties.b: "),
        (
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "strin"}]}}},
            "at properties.a.anyOf.1: ",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/Q"}}, "$defs": {"Q": {"items": {"pattern": "((("}}}},
            "at $defs.Q.items: ",
        ),
    ],
)
def test_a_wrong_schema_says_where(schema: dict[str, object], path: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(path)):
        StructuredOutputsParams(json=schema).check()


def test_one_of_takes_references(tokenizer: Tokenizer, guides: GrammarGuides) -> None:
    """As pydantic writes unions with a discriminator."""
    kinds = {
        name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
        for name in ("cat", "dog")
    }
    schema = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": kinds}
    StructuredOutputsParams(json=schema).check()
    for name in kinds:
        answer = tokenizer.encode(json.dumps({"kind": name}))
        masks = plain_masks(guides, grammar(json=schema), answer)
        assert all(allowed(mask, token) for mask, token in zip(masks, answer, strict=False))


CASES: list[tuple[StructuredOutputsParams, str]] = [
    (StructuredOutputsParams(json=SCHEMA), ""),
    (
        StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8} [0-9]{2}:[0-9]{2}"),
        r"[A-Z][a-z]{2,8} [0-9]{2}:[0-9]{2}",
    ),
    (StructuredOutputsParams(choice=["yes", 'no "never"', "perhaps"]), r'yes|no "never"|perhaps'),
    (StructuredOutputsParams(grammar='start: "(" start ")" | /[a-c]+/'), r"\(*[a-c]+\)*"),
]


EVERYTHING: EngineOptions = {
    "max_model_len": 160,
    "async_scheduling": True,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "num_kv_blocks": 34,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
}


def test_answers_match_and_are_the_same_under_any_schedule(smollm2_path: Path) -> None:
    prompts = [f"Question {i}: describe a person as JSON, then the time.\nAnswer:" for i in range(2)] * len(
        CASES
    )
    params = [
        SamplingParams(
            structured_outputs=structured,
            temperature=temperature,
            seed=3,
            max_tokens=80,
            logprobs=1,
            frequency_penalty=0.2,
        )
        for structured, _ in CASES
        for temperature in (0.0, 1.2)
    ]
    with LLM(smollm2_path, max_model_len=160) as llm:
        plain = [
            llm.generate([prompt], each, use_tqdm=False)[0].outputs[0]
            for prompt, each in zip(prompts, params, strict=True)
        ]
    for i, answer in enumerate(plain):
        structured, pattern = CASES[i // 2]
        if answer.finish_reason != "stop":
            assert structured.grammar is not None, answer.text  # which may go on for ever
        elif structured.json is not None:
            person = json.loads(answer.text)
            assert set(person) == {"name", "age", "tags"}
            assert 0 <= person["age"] <= 99
        else:
            assert re.fullmatch(pattern, answer.text), answer.text
    with LLM(smollm2_path, **EVERYTHING) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
    for output, expected in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].logprobs == expected.logprobs
