"""What a step costs outside the runtime: planning, settling, outputs. Nothing is computed; results are canned.

    python bench/engine_overhead.py [--steps 200]

Prints Markdown: microseconds for each step, over running requests, async depth, drafts, waiting requests and
sequence lengths. Aim: less than 100 µs + 3 µs for each running request.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial

from segue.contract.step import Sampling, SeqResult, SeqStep, StepHandle, StepPlan, StepResult
from segue.engine.config import EngineConfig, SpeculativeConfig
from segue.engine.engine import Engine
from segue.runtime.runtime import OnDemand
from segue.sample.params import SamplingParams

VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
NUM_DRAFTS = 4


class NullRuntime:
    """Answers every step at once; half of all drafts are right. Knows how long it took itself."""

    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.seconds = 0.0

    def is_ready(self, sampling: Sampling, *, wait_s: float = 0.0) -> bool:
        return True

    def submit(self, plan: StepPlan) -> StepHandle:
        return OnDemand(partial(self._execute, plan))

    def _execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        result = StepResult(step=plan.step, seqs=[self._result(seq) for seq in plan.seqs])
        self.seconds += time.perf_counter() - begin
        return result

    def _result(self, seq: SeqStep) -> SeqResult:
        if seq.sampling is None:
            return SeqResult(start=seq.start)
        num_drafts = len(seq.drafts) if seq.after is None else seq.max_drafts
        return SeqResult(
            start=seq.start,
            tokens=[7] * (1 + num_drafts // 2),
            num_drafts=num_drafts,
            drafts=[7] * seq.propose,
        )

    def close(self) -> None:
        """Nothing to release."""


def microseconds_per_step(
    num_running: int,
    num_steps: int,
    *,
    async_depth: int = 1,
    num_drafts: int = 0,
    num_waiting: int = 0,
    length: int = 100,
) -> float:
    """The median of steps in which `num_running` requests of about `length` tokens decode, runtime taken out."""
    max_model_len = length + (num_steps + 10) * (1 + num_drafts)
    blocks_each = -(-max_model_len // BLOCK_SIZE) + 1
    speculative = None
    if num_drafts:
        speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts, adaptive=False)
    runtime = NullRuntime()
    engine = Engine(
        runtime,
        EngineConfig(
            max_model_len=max_model_len,
            num_kv_blocks=num_running * blocks_each,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running * max(length, 1 + num_drafts),
            async_depth=async_depth,
            speculative=speculative,
        ),
    )
    params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
    for i in range(num_running + num_waiting):
        prompt = [(i * 31 + j) % VOCAB_SIZE for j in range(length)]
        engine.add_request(engine.intake.submission(prompt, params))
    while engine.stats.num_running < num_running:
        engine.step()
    for _ in range(5):
        engine.step()
    return statistics.median(_step_times(engine, runtime, num_steps)) * 1e6


def _step_times(engine: Engine, runtime: NullRuntime, num_steps: int) -> Iterator[float]:
    """Seconds of each step outside the runtime."""
    for _ in range(num_steps):
        before = runtime.seconds
        begin = time.perf_counter()
        engine.step()
        yield time.perf_counter() - begin - (runtime.seconds - before)


def print_by_running(num_steps: int) -> None:
    print("| running | depth 1 | depth 2 | depth 1, 4 drafts | depth 2, 4 drafts | aim |")
    print("|---:|---:|---:|---:|---:|---:|")
    for num_running in (1, 32, 256):
        cells = [
            microseconds_per_step(num_running, num_steps, async_depth=depth, num_drafts=num_drafts)
            for num_drafts in (0, NUM_DRAFTS)
            for depth in (1, 2)
        ]
        row = " | ".join(f"{cell:.0f}" for cell in cells)
        print(f"| {num_running} | {row} | {100 + 3 * num_running} |")


def print_flatness(num_steps: int) -> None:
    print("\n| 32 running | µs a step |\n|---|---:|")
    for num_waiting in (0, 1000, 10_000):
        cell = microseconds_per_step(32, num_steps, num_waiting=num_waiting)
        print(f"| {num_waiting} waiting | {cell:.0f} |")
    for length in (100, 4000):
        cell = microseconds_per_step(32, num_steps, length=length)
        print(f"| {length} tokens each | {cell:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps timed for each number (%(default)s)")
    args = parser.parse_args()
    print("Engine time of a step, microseconds, median:\n")
    print_by_running(args.steps)
    print_flatness(args.steps)


if __name__ == "__main__":
    main()
