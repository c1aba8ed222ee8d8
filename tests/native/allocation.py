"""Fails the 1st, 2nd, 3rd … allocation of what the native runtime does, until all of it succeeds.

Runs in a process into which failing_allocator.cpp was preloaded: `python -m tests.native.allocation FOLDER SCENARIO`.
After each failure the same executor (or a new one, where it was loading that failed) gives the right bits.
"""

import contextlib
import ctypes
import itertools
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from segue.contract.step import ForwardResult, Sampling, SeqStep
from segue.errors import CapacityError
from segue.runtime.native import NativeExecutor
from tests.native.models import Loaded, load

THREADS = 3
NUM_BLOCKS, BLOCK_SIZE = 4096, 16
OUT_OF_MEMORY = "out of memory while a token was drawn"

IDS = np.random.default_rng(2).integers(0, 300, 400).tolist()
SMALL = [SeqStep(start=0, tokens=IDS[:3], blocks=[1], sampling=Sampling())]


def large() -> list[SeqStep]:
    """All kinds of sequences, with parameters that nobody has read yet."""
    return [
        SeqStep(
            start=0,
            tokens=IDS[:300],
            blocks=list(range(10, 30)),
            sampling=Sampling(temperature=0.8, top_p=0.9, min_p=0.01, seed=5, num_logprobs=4),
        ),
        SeqStep(start=0, tokens=IDS[:9], blocks=[2], prompt_targets=IDS[1:9], num_prompt_logprobs=3),
        SeqStep(
            start=0,
            tokens=IDS[:5],
            drafts=IDS[5:8],
            blocks=[3],
            sampling=Sampling(presence_penalty=0.3, output_start=2, logit_bias=((3, 1.0),)),
            history=array("i", IDS),
        ),
        SeqStep(start=0, tokens=IDS[:4], blocks=[4], sampling=Sampling(), masks=[bytes([0x55]) * 42]),
    ]


_allocator = ctypes.CDLL(None)


class Failing:
    """Fails the n-th allocation (from 0) of a `with` body; `has_failed` says whether there was one."""

    has_failed = False

    def __init__(self, n: int, then_all: bool) -> None:
        self._n, self._then_all = n, then_all

    def __enter__(self) -> "Failing":
        _allocator.fail_after(ctypes.c_long(self._n), ctypes.c_bool(self._then_all))
        return self

    def __exit__(self, *error: object) -> None:
        _allocator.end_failing.restype = ctypes.c_bool
        self.has_failed = _allocator.end_failing()


def new_executor(loaded: Loaded) -> NativeExecutor:
    return NativeExecutor(*loaded, threads=THREADS)


def with_kv(loaded: Loaded) -> NativeExecutor:
    executor = new_executor(loaded)
    executor.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return executor


def check_others(result: ForwardResult, expected: ForwardResult) -> None:
    """What is not out of memory is right."""
    assert set(result.errors.values()) <= {OUT_OF_MEMORY}, result.errors
    for index, rows in result.prompt_logprobs.items():
        assert rows == expected.prompt_logprobs[index]
    if not result.errors:
        assert result == expected


def fail_in_forward(loaded: Loaded, n: int, then_all: bool) -> bool:
    executor = with_kv(loaded)
    small, steps = executor.forward(SMALL), large()
    with Failing(n, then_all) as failing:
        try:
            result = executor.forward(steps, [(1, 5)])
        except MemoryError:
            result = None
    if result is not None:
        check_others(result, EXPECTED["large"])
    assert executor.forward(SMALL) == small
    assert executor.forward(steps, [(1, 5)]) == EXPECTED["large"]
    return failing.has_failed


def fail_in_logits(loaded: Loaded, n: int, then_all: bool) -> bool:
    executor = new_executor(loaded)
    with Failing(n, then_all) as failing, contextlib.suppress(MemoryError, CapacityError):
        executor.logits(IDS[:70])
    assert executor.logits(IDS[:70]).tobytes() == EXPECTED_LOGITS
    return failing.has_failed


def fail_in_loading(loaded: Loaded, n: int, then_all: bool) -> bool:
    with Failing(n, then_all) as failing:
        error: Exception | None = None
        try:
            new_executor(loaded)
        except (MemoryError, CapacityError) as raised:
            error = raised
    if isinstance(error, CapacityError):
        assert str(error).startswith("cannot start 3 threads (")
        assert str(error).endswith("): lower threads")
    if failing.has_failed:
        assert new_executor(loaded).logits(IDS[:70]).tobytes() == EXPECTED_LOGITS
    return failing.has_failed


def fail_in_kv(loaded: Loaded, n: int, then_all: bool) -> bool:
    executor = with_kv(loaded)
    small = executor.forward(SMALL)
    with Failing(n, then_all) as failing:
        try:
            executor.allocate_kv(NUM_BLOCKS * 2, BLOCK_SIZE)
            has_kv = True
        except (MemoryError, CapacityError):
            has_kv = False
    if not has_kv:
        assert executor.forward(SMALL).errors == {0: "blocks: 1 is not in [0, 0)"}
        executor.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    assert executor.forward(SMALL) == small
    with Failing(0, then_all):
        executor.close()
    return failing.has_failed


SCENARIOS: dict[str, Callable[[Loaded, int, bool], bool]] = {
    "forward": fail_in_forward,
    "logits": fail_in_logits,
    "load": fail_in_loading,
    "kv": fail_in_kv,
}

EXPECTED: dict[str, ForwardResult] = {}
EXPECTED_LOGITS = b""


def main(path: Path, scenario: str) -> None:
    global EXPECTED_LOGITS
    loaded = load(path)
    executor = with_kv(loaded)
    executor.forward(SMALL)
    EXPECTED["large"] = executor.forward(large(), [(1, 5)])
    assert not EXPECTED["large"].errors
    EXPECTED_LOGITS = executor.logits(IDS[:70]).tobytes()
    del executor  # with its threads, which the others would share
    for then_all in (False, True):
        for n in itertools.count():
            if not SCENARIOS[scenario](loaded, n, then_all):
                break
        assert n > 0, "nothing was ever allocated"
        print(f"{scenario}: {n} allocations")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
