"""The executor's side of the contract: what it samples and scores, what it refuses, how its threads behave."""

import os
import re
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest

from segue.contract.step import NOT_FINITE, Sampling, SeqStep
from segue.errors import CapacityError, ModelFileError, ParameterError
from segue.models.program import Attention, Linear, Logits, Program, RMSNorm, Rope
from segue.runtime.native import NativeExecutor, available_cpus
from segue.runtime.reference import ReferenceExecutor
from segue.sample.reference import row_logprobs, sample_row
from segue.weights.model_file import ModelFile
from tests.native.models import Loaded, forced_isa, make_executor

IDS = np.random.default_rng(2).integers(0, 300, 64).tolist()
GREEDY = Sampling()


@pytest.fixture
def executor(models: dict[str, Loaded]) -> NativeExecutor:
    executor = make_executor(models["Q4_1"], threads=2)
    executor.allocate_kv(32, 16)
    return executor


def test_rows_are_drawn_as_if_the_drafts_before_were_right(executor: NativeExecutor) -> None:
    sampling = Sampling(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        output_start=8,
        logit_bias=((3, 2.5),),
        banned=(4, 7),
        banned_until=13,
        seed=2**64 - 1,
        num_logprobs=4,
    )
    tokens, drafts = IDS[:10], IDS[10:14]
    logits = executor.logits(tokens + drafts)
    step = SeqStep(
        start=0, tokens=tokens, drafts=drafts, blocks=[3], sampling=sampling, history=array("i", IDS)
    )
    result = executor.forward([SeqStep(start=0, tokens=IDS[:3], blocks=[5], sampling=GREEDY), step])
    expected = [sample_row(logits[9 + i], sampling, 10 + i, tokens + drafts[:i]) for i in range(5)]
    assert result.tokens[1:] == expected
    assert sorted(result.logprobs) == [1, 2, 3, 4, 5]
    for row, token in enumerate(expected, start=1):
        reference = row_logprobs(logits[8 + row], token, 4)
        assert result.logprobs[row].top_ids == reference.top_ids
        assert result.logprobs[row].rank == reference.rank
        assert result.logprobs[row].logprob == pytest.approx(reference.logprob, abs=1e-5)


def test_greedy_takes_the_first_of_the_largest(executor: NativeExecutor) -> None:
    logits = executor.logits(IDS)
    steps = [SeqStep(start=0, tokens=IDS[: i + 1], blocks=[i], sampling=GREEDY) for i in range(16)]
    assert executor.forward(steps).tokens == logits[:16].argmax(axis=1).tolist()


def test_prompts_are_scored(executor: NativeExecutor) -> None:
    logits = executor.logits(IDS)
    step = SeqStep(
        start=0,
        tokens=IDS,
        blocks=[0, 1, 2, 3],
        prompt_targets=IDS[1:],
        num_prompt_logprobs=2,
        sampling=GREEDY,
    )
    result = executor.forward([step])
    assert result.tokens == [int(logits[-1].argmax())]
    scored = result.prompt_logprobs[0]
    assert len(scored) == 63
    for row, target in enumerate(IDS[1:]):
        reference = row_logprobs(logits[row], target, 2)
        assert (scored[row].rank, scored[row].top_ids) == (reference.rank, reference.top_ids)
        assert scored[row].logprob == pytest.approx(reference.logprob, abs=1e-5)


def test_blocks_are_copied_before_anything_is_computed(executor: NativeExecutor) -> None:
    executor.forward([SeqStep(start=0, tokens=IDS[:20], blocks=[1, 2])])
    last = SeqStep(start=20, tokens=[IDS[20]], blocks=[1, 2], sampling=Sampling(num_logprobs=9))
    expected = executor.forward([last])
    moved = SeqStep(start=20, tokens=[IDS[20]], blocks=[1, 9], sampling=last.sampling)
    result = executor.forward([moved], copies=[(2, 8), (8, 9)])
    assert result.logprobs == expected.logprobs


def test_nothing_to_compute(executor: NativeExecutor) -> None:
    result = executor.forward([])
    assert (result.tokens, result.logprobs, result.prompt_logprobs, result.errors) == ([], {}, {}, {})


def test_a_sequence_without_finite_logits_is_named_alone(models: dict[str, Loaded]) -> None:
    """An id whose embedding is not a number spoils the sequence it is in."""
    program, model = models["F32"]
    data = model.tensors["token_embd.weight"].data.copy()
    data.view(np.float32).reshape(program.vocab_size, -1)[7] = np.nan
    spoiled = replace(model.tensors["token_embd.weight"], data=data)
    model = replace(model, tensors={**model.tensors, spoiled.name: spoiled})
    executor = make_executor((_untied(program), _with_output(model, models["F32"][1])))
    executor.allocate_kv(8, 16)
    good = SeqStep(start=0, tokens=[1, 2, 3], blocks=[0], sampling=GREEDY)
    bad = SeqStep(start=0, tokens=[1, 7, 3], blocks=[1], sampling=GREEDY)
    scored = SeqStep(start=0, tokens=[7], blocks=[2], prompt_targets=[1], num_prompt_logprobs=1)
    result = executor.forward([good, bad, good, scored])
    assert result.errors == {1: NOT_FINITE, 3: NOT_FINITE}
    assert result.tokens == executor.forward([good]).tokens * 2
    # What was stored in a block that is used again does not reach its next owner.
    again = SeqStep(start=0, tokens=[1, 2, 3], blocks=[1], sampling=GREEDY)
    assert executor.forward([again]).tokens == result.tokens[:1]
    assert executor.forward([again]).errors == {}


def _untied(program: Program) -> Program:
    *ops, last = program.ops
    assert isinstance(last, Logits)
    return replace(program, ops=(*ops, replace(last, weight="output_copy")))


def _with_output(model: ModelFile, clean: ModelFile) -> ModelFile:
    output = replace(clean.tensors["token_embd.weight"], name="output_copy")
    return replace(model, tensors={**model.tensors, output.name: output})


def test_sizes(executor: NativeExecutor, models: dict[str, Loaded]) -> None:
    program, _ = models["Q4_1"]
    assert executor.vocab_size == program.vocab_size
    assert executor.max_model_len == program.max_model_len
    assert executor.threads == 2
    per_token = sum(2 * op.num_kv_heads * op.head_dim for op in program.attentions)
    assert executor.kv_bytes_per_token == 2 * per_token
    assert make_executor(models["Q4_1"], kv_dtype="f32").kv_bytes_per_token == 4 * per_token


def test_all_cpus_by_default(models: dict[str, Loaded]) -> None:
    assert 1 <= NativeExecutor(*models["F32"]).threads <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("num_blocks", [10**9, 2**40, 2**62])
def test_kv_that_cannot_fit(executor: NativeExecutor, num_blocks: int) -> None:
    with pytest.raises(CapacityError, match="lower num_kv_blocks"):
        executor.allocate_kv(num_blocks, 64)


@pytest.mark.parametrize("isa", ["avx1024", "AVX2", "none"])
def test_unknown_instruction_sets(models: dict[str, Loaded], isa: str) -> None:
    with forced_isa(isa), pytest.raises(ParameterError, match=r"SEGUE_ISA.*known are"):
        NativeExecutor(*models["F32"])


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_wrong_threads(models: dict[str, Loaded], threads: int) -> None:
    with pytest.raises(ParameterError, match="threads"):
        NativeExecutor(*models["F32"], threads=threads)


def test_missing_and_misshapen_tensors(models: dict[str, Loaded]) -> None:
    program, model = models["F32"]
    name = "blk.1.ffn_down.weight"
    without = {key: tensor for key, tensor in model.tensors.items() if key != name}
    with pytest.raises(ModelFileError, match=f"no tensor {name}"):
        NativeExecutor(program, replace(model, tensors=without))
    outputs, inputs = model.tensors[name].shape
    turned = {**model.tensors, name: replace(model.tensors[name], shape=(inputs, outputs))}
    with pytest.raises(ModelFileError, match=name):
        NativeExecutor(program, replace(model, tensors=turned))
    cut = {**model.tensors, name: replace(model.tensors[name], data=model.tensors[name].data[:-4])}
    with pytest.raises(ModelFileError, match=name):
        NativeExecutor(program, replace(model, tensors=cut))


@dataclass(frozen=True)
class Unheard:
    x: str
    out: str


def changed(op: type, **fields: object) -> Callable[[Program], Program]:
    """Fields of the first operation of this type."""

    def change(program: Program) -> Program:
        first = next(i for i, o in enumerate(program.ops) if isinstance(o, op))
        ops = list(program.ops)
        ops[first] = replace(ops[first], **fields)  # type: ignore[arg-type]
        return replace(program, ops=tuple(ops))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: replace(p, ops=(*p.ops, Unheard("x", "x"))), "the native runtime has no operation Unheard"),
        (lambda p: replace(p, ops=(*p.ops, None)), "the native runtime has no operation NoneType"),
        (lambda p: replace(p, ops=None), "Program: ops: expected a sequence"),
        (lambda p: replace(p, widths={**p.widths, "x": "wide"}), "Program: widths: expected an integer"),
        (lambda p: replace(p, vocab_size=2**40), "Program: vocab_size: a number does not fit 32 bits"),
        (changed(RMSNorm, eps="small"), "RMSNorm: eps: expected a number"),
        (changed(RMSNorm, x="nowhere"), "the program has no buffer nowhere"),
        (changed(Linear, weights="blk"), "the model has no tensor b"),
        (changed(Linear, weights=()), "linear: it has no weights"),
        (changed(Linear, accumulate="yes"), "Linear: accumulate: expected True or False"),
        (changed(Attention, rope=1), "Attention: 'int' object has no attribute 'theta'"),
        (changed(Attention, layer=1), "attention: its layers must be numbered from 0 in order, this one is 1"),
        (changed(Attention, num_heads=5), "attention: 5 heads cannot share 2 KV heads evenly"),
        (changed(Attention, num_heads=4), "attention: the buffers' widths do not fit"),
        (changed(Attention, num_kv_heads=0), "attention: the numbers of its heads and their size must be 1"),
        (changed(Attention, rope=Rope(1e4, 12, True)), "attention: 12 dimensions of heads of 10 cannot be rotated"),
        (changed(Attention, rope=Rope(1e4, 4, True, (1.0,))), "attention: 1 RoPE factors for 2 pairs"),
    ],
)  # fmt: skip
def test_operations_that_cannot_be_computed(
    change: Callable[[Program], Program], why: str, models: dict[str, Loaded]
) -> None:
    program, model = models["F32"]
    with pytest.raises(ModelFileError, match=re.escape(why)):
        NativeExecutor(change(program), model)


def test_executors_share_their_threads(models: dict[str, Loaded]) -> None:
    first, second = (make_executor(models[kind], threads=7) for kind in ("Q4_1", "F32"))
    expected = [first.logits(IDS), second.logits(IDS[:30])]
    others = num_threads() - 6
    with ThreadPoolExecutor(2) as callers:  # they take turns
        for _ in range(20):
            a = callers.submit(first.logits, IDS)
            b = callers.submit(second.logits, IDS[:30])
            assert np.array_equal(a.result(), expected[0])
            assert np.array_equal(b.result(), expected[1])
        assert num_threads() == others + 6 + 2
    del first
    assert np.array_equal(second.logits(IDS[:30]), expected[1])
    del second
    assert num_threads() == others


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_child_forked_during_a_step_has_its_own_turn(models: dict[str, Loaded]) -> None:
    """The thread that computes does not come along, and nor does its turn."""
    executor, busy = (make_executor(models["Q4_1"], threads=2) for _ in range(2))
    expected = executor.logits(IDS)
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            busy.logits(IDS)

    with ThreadPoolExecutor(1) as caller:
        computing = caller.submit(compute)
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if np.array_equal(executor.logits(IDS), expected) else 1)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
        done.set()
        computing.result()


def test_idle_threads_sleep(executor: NativeExecutor) -> None:
    executor.forward([SeqStep(start=0, tokens=IDS[:5], blocks=[0])])
    while True:  # until they do
        before = time.process_time()
        time.sleep(0.4)
        if time.process_time() - before < 0.2:
            return


def test_a_forked_child_starts_its_own_threads(executor: NativeExecutor) -> None:
    expected = executor.logits(IDS)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(executor.logits(IDS), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_forward_agrees_with_the_reference_executor(models: dict[str, Loaded]) -> None:
    """Float weights: the same ids and almost the same logprobs, over a shared prefix and mixed chunks."""
    native = make_executor(models["F32"], threads=2, kv_dtype="f32")
    reference = ReferenceExecutor(*models["F32"])
    sampling = Sampling(num_logprobs=2)
    for executor in (native, reference):
        executor.allocate_kv(16, 8)
        executor.forward([SeqStep(start=0, tokens=IDS[:16], blocks=[0, 1])])
    steps = [
        SeqStep(start=16, tokens=IDS[16:30], blocks=[0, 1, 2, 3], sampling=sampling),
        SeqStep(start=16, tokens=IDS[40:41], drafts=IDS[41:44], blocks=[0, 1, 5], sampling=sampling),
    ]
    got, expected = native.forward(steps), reference.forward(steps)
    assert got.tokens == expected.tokens
    for row, logprobs in expected.logprobs.items():
        assert got.logprobs[row].logprob == pytest.approx(logprobs.logprob, abs=1e-4)


MANY_THREADS = min(1024, 16 * available_cpus())


@pytest.fixture
def crowded(models: dict[str, Loaded]) -> NativeExecutor:
    """With many more threads than CPUs."""
    executor = make_executor(models["Q4_0"], threads=MANY_THREADS)
    executor.allocate_kv(2, 16)
    return executor


def test_many_more_threads_than_cpus(models: dict[str, Loaded], crowded: NativeExecutor) -> None:
    steps = [SeqStep(start=0, tokens=IDS[:20], blocks=[0, 1], sampling=Sampling(num_logprobs=5))]
    one = make_executor(models["Q4_0"], threads=1)
    one.allocate_kv(2, 16)
    expected = one.forward(steps)
    for _ in range(20):
        assert crowded.forward(steps) == expected


@pytest.mark.resources
def test_waiting_threads_sleep(crowded: NativeExecutor) -> None:
    """Otherwise each of the barriers would cost every thread a spin, 30 times as much CPU time."""
    steps = [SeqStep(start=0, tokens=IDS[:20], blocks=[0, 1], sampling=GREEDY)]
    crowded.forward(steps)
    before = time.process_time()
    for _ in range(20):
        crowded.forward(steps)
    assert time.process_time() - before < 20 * MANY_THREADS * 0.4e-3
