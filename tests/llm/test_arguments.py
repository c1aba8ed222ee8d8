"""Whatever is given to the Python interface: it works, or it is an error of one line that names the parameter."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segue import LLM, AsyncLLM, EngineArgs, ParameterError, SamplingParams
from segue.errors import SegueError
from segue.sample.params import StructuredOutputsParams

SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
WEIRD: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: 1,
    lambda: -1,
    lambda: 0,
    lambda: 1.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 10**30,
    lambda: 10**400,
    lambda: "",
    lambda: "x",
    lambda: "\ud800",
    lambda: b"x",
    list,
    dict,
    lambda: [None],
    lambda: ["x"],
    lambda: [1],
    lambda: [[1]],
    lambda: [10**30],
    lambda: (1, "x"),
    lambda: np.int64(3),
    lambda: np.float32(0.5),
    lambda: np.array([1, 2]),
    lambda: np.array([[1, 2], [3, 4]]),
    lambda: np.array([1.5]),
    object,
    lambda: (number for number in (1, 2)),
    lambda: {1: 2},
    lambda: {"a": 1},
    lambda: {1},
    lambda: range(3),
    lambda: print,
]


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "own process"])
def llm(tiny_path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny_path, engine_process=request.param, max_num_seqs=8) as made:
        yield made


def attempt(call: Callable[[], object]) -> None:
    try:
        call()
    except SegueError as error:
        message = str(error)
    else:
        return
    assert message.isprintable()
    assert len(message) < 1200


@pytest.mark.parametrize("value", WEIRD)
def test_every_argument_is_taken_or_refused(llm: LLM, value: Callable[[], Any]) -> None:
    def append() -> None:
        with llm.session() as session:
            session.append(value())

    def revise() -> None:
        with llm.session() as session:
            session.revise(value())

    for call in (
        lambda: llm.generate(value(), SHORT),
        lambda: llm.generate([value()], SHORT),
        lambda: llm.generate({"prompt": value()}, SHORT),
        lambda: llm.generate({"prompt_token_ids": value()}, SHORT),
        lambda: llm.generate({"prompt": "a", "cache_salt": value()}, SHORT),
        lambda: llm.generate("a", value()),
        lambda: llm.generate(["a", "b"], [SHORT, value()]),
        lambda: llm.generate("a", SHORT, priority=value()),
        lambda: llm.stream(value(), SHORT).close(),
        lambda: llm.stream("a", value()).close(),
        lambda: llm.chat(value(), SHORT),
        lambda: llm.chat([{"role": value(), "content": value()}], SHORT),
        lambda: llm.session(value()).close(),
        append,
        revise,
    ):
        attempt(call)
    assert llm.generate([[3, 4]], SHORT)[0].finished


@pytest.mark.parametrize("value", WEIRD)
@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_every_sampling_parameter_is_taken_or_refused(llm: LLM, field: str, value: Callable[[], Any]) -> None:
    if field == "n" and type(value()) is int and value() > 100:
        return  # it may be had
    attempt(lambda: llm.generate("a", SamplingParams(**{"max_tokens": 2, field: value()})))


@pytest.mark.parametrize("value", WEIRD)
@pytest.mark.parametrize("field", [*EngineArgs.__struct_fields__, "dtype", "swap_space", "nonsense"])
def test_every_option_is_taken_or_refused(tiny_path: Path, field: str, value: Callable[[], Any]) -> None:
    options: dict[str, Any] = {"model": tiny_path, "num_kv_blocks": 64, field: value()}
    attempt(lambda: EngineArgs.of(options.pop("model"), options))  # type: ignore[arg-type]


def ids(llm: LLM, prompt: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompt, SHORT)]


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    (expected,) = ids(llm, {"prompt_token_ids": [3, 4, 5]})
    for one in ([3, 4, 5], (3, 4, 5), np.array([3, 4, 5]), [np.int32(3), 4, 5], range(3, 6), iter([3, 4, 5])):
        assert ids(llm, one) == [expected]
    assert ids(llm, {"prompt_token_ids": np.array([3, 4, 5])}) == [expected]
    assert ids(llm, [[3, 4, 5], np.array([3, 4, 5])]) == [expected] * 2
    assert ids(llm, np.array([[3, 4, 5], [3, 4, 5]])) == [expected] * 2
    with llm.stream([3, 4, 5], SHORT) as stream:
        assert [token for delta in stream for token in delta.token_ids] == expected


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    assert ids(llm, (prompt for prompt in ("a", "b"))) == ids(llm, ["a", "b"])


def test_asynchronous_prompts(tiny_path: Path) -> None:
    async def answer() -> list[int]:
        async with AsyncLLM(tiny_path) as llm:
            with pytest.raises(ParameterError, match="sampling_params='x'"):
                llm.generate([3, 4, 5], "x")  # type: ignore[arg-type]
            for prompt in (None, 1, ["a"], b"a"):
                with pytest.raises(ParameterError, match=r"^prompt"):
                    llm.generate(prompt, SHORT)  # type: ignore[arg-type]
            outputs = [output async for output in llm.generate([3, 4, 5], SHORT)]
            return list(outputs[-1].outputs[0].token_ids)

    with LLM(tiny_path) as llm:
        assert [asyncio.run(answer())] == ids(llm, [3, 4, 5])


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (None, "^prompts=None: must be a prompt or a list"),
        (3, "^prompts=3: must be a prompt or a list"),
        ([None], "^prompts=None: must be a text"),
        ("", "^prompt='': is empty"),
        ({"prompt": ""}, "^prompt='': is empty"),
        ([[]], "^prompt_token_ids=.*is empty"),
        ([[1.5]], "^prompt_token_ids=1.5: must be an integer"),
    ],
)
def test_a_wrong_prompt_says_what_it_must_be(llm: LLM, prompt: Any, why: str) -> None:
    with pytest.raises(ParameterError, match=why):
        llm.generate(prompt, SHORT)


def test_a_schema_that_is_no_json(llm: LLM) -> None:
    for schema in ({"enum": ["\ud800"]}, {"enum": [object()]}, {1j: 2}):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match=r"structured_outputs\.json=.* is no JSON"):
            llm.generate("a", params)


def test_a_message_without_content(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="message 0 must have a text as its content"):
        llm.encode_chat([{"role": "user"}])


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({}, (256, 512)),
        ({"max_num_batched_tokens": 65}, (65, 65)),
        ({"max_num_batched_tokens": 4096}, (256, 4096)),
        ({"max_num_seqs": 1000}, (1000, 1000)),
        ({"max_num_seqs": 3}, (3, 512)),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 5}, (3, 5)),
    ],
)
def test_what_is_not_given_follows_what_is(tiny_path: Path, options: Any, limits: tuple[int, int]) -> None:
    with LLM(tiny_path, **options) as llm:
        assert (llm.config.max_num_seqs, llm.config.max_num_batched_tokens) == limits


def test_limits_that_contradict_are_refused(tiny_path: Path) -> None:
    with pytest.raises(ParameterError, match="max_num_batched_tokens=5: is less than max_num_seqs=6"):
        LLM(tiny_path, max_num_seqs=6, max_num_batched_tokens=5)


def test_options_of_vllm_that_ask_for_nothing(tiny_path: Path) -> None:
    options: Any = {
        "dtype": "auto",
        "tensor_parallel_size": 1,
        "trust_remote_code": True,
        "quantization": None,
    }
    LLM(tiny_path, **options).close()
    for name, value, why in (
        ("dtype", "bfloat16", "kv_cache_dtype"),
        ("tensor_parallel_size", 2, "threads"),
        ("tensor_parallel_size", True, "threads"),
        ("gpu_memory_utilization", 0.9, "num_kv_blocks"),
        ("nonsense", 1, "no such option; known are threads"),
    ):
        wrong: Any = {name: value}
        with pytest.raises(ParameterError, match=why) as caught:
            LLM(tiny_path, **wrong)
        assert caught.value.parameter == name
