"""What does not fit is refused by both executors in the same words, and concerns nobody else."""

import gc
import itertools
import sys
from array import array
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from segue.contract.step import After, Sampling, SeqStep
from segue.models import build_program
from segue.runtime.native import NativeExecutor
from segue.runtime.reference import ReferenceExecutor
from segue.weights.gguf import load_gguf
from tests.weights.make_gguf import tiny_llama

VOCAB = 320
CONTEXT = 256
NUM_BLOCKS = 32
BLOCK_SIZE = 8

Executor = NativeExecutor | ReferenceExecutor


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Executor]:
    model = load_gguf(
        tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", vocab=VOCAB, context=CONTEXT)
    )
    program = build_program(model)
    return {
        "native": NativeExecutor(program, model, threads=2),
        "reference": ReferenceExecutor(program, model),
    }


@pytest.fixture(params=["native", "reference"])
def executor(request: pytest.FixtureRequest, executors: dict[str, Executor]) -> Executor:
    executor = executors[request.param]
    executor.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return executor


def seq(**options: Any) -> SeqStep:
    values: dict[str, Any] = {"start": 0, "tokens": [1], "blocks": [0]} | options
    return SeqStep(**values)


def sampled(**options: Any) -> SeqStep:
    return seq(sampling=Sampling(**options))


WRONG: list[tuple[object, str]] = [
    (seq(tokens=[VOCAB]), "tokens: 320 is not in [0, 320)"),
    (seq(tokens=[1, -1]), "tokens: -1 is not in [0, 320)"),
    (seq(tokens=[10**30]), "tokens: a number does not fit 32 bits"),
    (seq(tokens=["1"]), "tokens: expected an integer"),
    (seq(tokens=[1.0]), "tokens: expected an integer"),
    (seq(tokens=7), "tokens: expected a sequence"),
    (seq(tokens=[]), "tokens: none"),
    (seq(drafts=[VOCAB]), "drafts: 320 is not in [0, 320)"),
    (seq(drafts=None), "drafts: expected a sequence"),
    (seq(after=After(0, 0)), "after: must be resolved before it is executed"),
    (seq(start=-1), "start: must be 0 or more"),
    (seq(start=None), "start: expected an integer"),
    (seq(start=2**31), "start: a number does not fit 32 bits"),
    (
        seq(start=CONTEXT, blocks=list(range(32))),
        "start: the sequence is longer than 256 tokens, the most that the model can be given",
    ),
    (
        seq(start=2**31 - 1),
        "start: the sequence is longer than 256 tokens, the most that the model can be given",
    ),
    (seq(blocks=[NUM_BLOCKS]), "blocks: 32 is not in [0, 32)"),
    (seq(blocks=[-1]), "blocks: -1 is not in [0, 32)"),
    (seq(blocks=[None]), "blocks: expected an integer"),
    (seq(blocks=[]), "blocks: too few for the sequence's positions"),
    (seq(tokens=[1] * 9), "blocks: too few for the sequence's positions"),
    (seq(start=8), "blocks: too few for the sequence's positions"),
    (seq(prompt_targets=[1, 2]), "prompt_targets: more than inputs"),
    (seq(prompt_targets=[VOCAB]), "prompt_targets: 320 is not in [0, 320)"),
    (seq(prompt_targets=[1], num_prompt_logprobs=-1), "num_prompt_logprobs: must be 0 or more"),
    (sampled(temperature="hot"), "temperature: expected a number"),
    (sampled(top_k=1.5), "top_k: expected an integer"),
    (sampled(min_p=None), "min_p: expected a number"),
    (sampled(frequency_penalty=[1.0]), "frequency_penalty: expected a number"),
    (sampled(logit_bias=((VOCAB, 1.0),)), "logit_bias: 320 is not in [0, 320)"),
    (sampled(logit_bias=((-1, 1.0),)), "logit_bias: -1 is not in [0, 320)"),
    (sampled(logit_bias=((1, "a"),)), "logit_bias: expected a number"),
    (sampled(logit_bias=(3,)), "logit_bias: expected pairs of an id and a number"),
    (sampled(logit_bias=((1, 2.0, 3),)), "logit_bias: expected pairs of an id and a number"),
    (sampled(banned=(VOCAB,)), "banned: 320 is not in [0, 320)"),
    (sampled(seed=-1), "seed: expected an unsigned integer"),
    (sampled(seed=2**64), "seed: expected an unsigned integer"),
    (sampled(seed=None), "seed: expected an unsigned integer"),
    (sampled(num_logprobs=-1), "num_logprobs: must be 0 or more"),
    (sampled(num_logprobs="3"), "num_logprobs: expected an integer"),
    (
        seq(sampling=Sampling(presence_penalty=1.0), history=None),
        "history: expected an array of 32-bit integers",
    ),
    (
        seq(sampling=Sampling(presence_penalty=1.0), history=array("q", [1])),
        "history: expected an array of 32-bit integers",
    ),
    (
        seq(sampling=Sampling(repetition_penalty=1.1), tokens=[1, 2], history=array("i", [1])),
        "history: fewer ids than positions",
    ),
    (
        seq(sampling=Sampling(repetition_penalty=1.1), history=array("i", [-5])),
        "history: an id is not in the vocabulary",
    ),
    (seq(sampling=Sampling(), masks=[bytes(39)]), "masks: too few bits for the vocabulary"),
    (seq(sampling=Sampling(), masks=[None, None]), "masks: 2 for 1 sampled rows"),
    (seq(sampling=Sampling(), masks=["all"]), "masks: expected bytes"),
    (seq(sampling=3), "'int' object has no attribute 'temperature'"),
    (None, "'NoneType' object has no attribute 'after'"),
]


def good(index: int, block: int, **options: Any) -> SeqStep:
    """One of the others: everything about it is looked at."""
    tokens = [(index * 37 + i * 11) % VOCAB for i in range(5 + index)]
    sampling = Sampling(num_logprobs=VOCAB, frequency_penalty=0.5, temperature=0.7, seed=index)
    return seq(
        tokens=tokens,
        drafts=[3, 4],
        blocks=[block, block + 1],
        sampling=sampling,
        history=array("i", tokens),
        prompt_targets=tokens[1:],
        num_prompt_logprobs=4,
        **options,
    )


@pytest.mark.parametrize(("wrong", "error"), WRONG, ids=[error for _, error in WRONG])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_sequence_is_refused_alone(executor: Executor, wrong: SeqStep, error: str, at: int) -> None:
    others = [good(0, 4), good(1, 8)]
    alone = executor.forward(others)
    executor.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    seqs = others.copy()
    seqs.insert(at, wrong)
    result = executor.forward(seqs)
    assert result.errors == {at: error}
    assert result.tokens == alone.tokens
    assert result.logprobs == alone.logprobs
    others_at = [i for i in range(3) if i != at]
    assert result.prompt_logprobs == {others_at[i]: rows for i, rows in alone.prompt_logprobs.items()}


def test_all_may_be_refused(executor: Executor) -> None:
    seqs = [cast(SeqStep, wrong) for wrong, _ in WRONG]
    result = executor.forward(seqs)
    assert result.errors == {i: error for i, (_, error) in enumerate(WRONG)}
    assert (result.tokens, result.logprobs, result.prompt_logprobs) == ([], {}, {})


def test_a_refused_sequence_writes_nothing(executor: Executor) -> None:
    """Its table may name blocks that others hold."""
    owner = seq(tokens=[5, 6, 7], blocks=[2])
    ahead = seq(start=3, tokens=[8], blocks=[2], sampling=Sampling(num_logprobs=VOCAB))
    executor.forward([owner])
    expected = executor.forward([ahead]).logprobs
    refused = seq(tokens=[9, 9, 9], blocks=[2], sampling=Sampling(logit_bias=((VOCAB, 1.0),)))
    assert list(executor.forward([refused]).errors) == [0]
    assert executor.forward([ahead]).logprobs == expected


@pytest.mark.parametrize("copies", [[(0, NUM_BLOCKS)], [(-1, 0)], [(1, 2, 3)]])
def test_copies_of_no_blocks_fail_the_call(executor: Executor, copies: Any) -> None:
    with pytest.raises(ValueError, match="copies"):
        executor.forward([], copies=copies)


def test_what_was_made_of_parameters_goes_with_them(executor: Executor) -> None:
    """Nothing of a request that has ended is kept, neither its parameters nor what the executor made of them."""
    biased = tuple((token, 1.0) for token in range(VOCAB))
    held = sys.getrefcount(biased)
    for block in range(4):
        step = seq(blocks=[block], sampling=Sampling(logit_bias=biased))
        assert executor.forward([step]).errors == {}
        assert executor.forward([step]).errors == {}
    del step
    gc.collect()
    assert sys.getrefcount(biased) == held


def test_parameters_are_read_for_the_model_that_they_are_used_with(
    executors: dict[str, Executor], tmp_path: Path
) -> None:
    """A target and a draft model may see the same parameters."""
    model = load_gguf(tiny_llama(tmp_path / "small.gguf", vocab=310))
    small = NativeExecutor(build_program(model), model, threads=1)
    small.allocate_kv(1, BLOCK_SIZE)
    large = executors["native"]
    large.allocate_kv(1, BLOCK_SIZE)
    step = sampled(logit_bias=((315, 1000.0),))
    for _ in range(2):
        assert large.forward([step]).tokens == [315]
        assert small.forward([step]).errors == {0: "logit_bias: 315 is not in [0, 310)"}


@pytest.mark.resources
def test_memory_of_ended_requests_is_given_back(executors: dict[str, Executor]) -> None:
    """600 requests with a bias for every id, of which one lives at a time."""
    executor = executors["native"]
    executor.allocate_kv(1, BLOCK_SIZE)
    entries = 20_000

    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    bias = tuple(itertools.islice(itertools.cycle((i, 0.5) for i in range(VOCAB)), entries))
    for _ in range(20):
        executor.forward([sampled(logit_bias=bias)])
    before = resident_bytes()
    for _ in range(600):
        executor.forward([sampled(logit_bias=bias)])
    kept = 600 * entries * 8
    assert resident_bytes() - before < kept / 4


def test_ids_may_come_in_any_sequence(executor: Executor) -> None:
    expected = executor.forward([good(0, 4)])
    for kind in (tuple, lambda ids: array("i", ids), np.asarray):
        step = good(0, 4)
        values = {name: getattr(step, name) for name in step.__struct_fields__}
        values |= {name: kind(values[name]) for name in ("tokens", "drafts", "blocks")}
        assert executor.forward([SeqStep(**values)]) == expected
