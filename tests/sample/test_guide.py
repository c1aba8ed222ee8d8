"""Answers that match a grammar."""

import json
import random
import re
from pathlib import Path

import pytest

from segue.args import EngineOptions
from segue.errors import ParameterError
from segue.llm import LLM
from segue.sample.guide import GrammarGuides
from segue.sample.params import SamplingParams, StructuredOutputsParams
from segue.tokens import Tokenizer
from segue.weights.gguf import load_gguf

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


def allowed(mask: bytes | None, token: int) -> bool:
    return mask is None or bool(mask[token // 8] >> token % 8 & 1)


def test_a_guide_can_be_asked_in_any_order(tokenizer: Tokenizer) -> None:
    """Masks depend on the answer alone: not on what was asked before, nor on drafts."""
    guides = GrammarGuides(tokenizer)
    grammar = StructuredOutputsParams(json=SCHEMA).compiled()
    answer = tokenizer.encode('{"name": "Ada", "age": 36, "tags": ["red", "blue"]}')
    plain = [guides(grammar).masks(answer[:length], [])[0] for length in range(len(answer) + 1)]
    guide = guides(grammar)
    rng = random.Random(5)
    for _ in range(60):
        start = rng.randrange(len(answer) + 1)
        drafts = answer[start : start + rng.randint(0, 4)]
        wrong = rng.random() < 0.3
        if wrong:
            drafts = [*drafts, tokenizer.encode("zzz")[0], *drafts]
        masks = guide.masks(answer[:start], drafts)
        assert len(masks) == 1 + len(drafts)
        right = next(
            (i for i, token in enumerate(drafts) if answer[start + i : start + i + 1] != [token]), len(drafts)
        )
        assert masks[: right + 1] == plain[start : start + right + 1]
    assert all(allowed(mask, token) for mask, token in zip(plain, answer, strict=False))
    assert [token for token in range(tokenizer.vocab_size) if allowed(plain[-1], token)] == [2]


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
        StructuredOutputsParams(**wrong).compiled()  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


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
