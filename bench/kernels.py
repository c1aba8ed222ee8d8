"""How fast the native runtime's kernels are, beside what this machine can do.

    python bench/kernels.py                     linear layers, attention and, with --model, whole steps
    SEGUE_ISA=avx2 python bench/kernels.py      the same with other instructions

Bounds are measured first: reading memory, and the f32 matrix product of NumPy's BLAS, each with as many threads as
the kernels get. A linear layer of few rows is bound by memory, one of many by arithmetic; `× BLAS` above 1 means that
4-bit weights with 8-bit inputs are multiplied faster than f32 by f32. Every time is the least of several.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the threads are ours

import numpy as np

from segue.cli.table import format_table
from segue.contract.step import Sampling, SeqStep
from segue.models import build_program
from segue.models.program import Attention, Embed, Linear, Op, Program, Rope
from segue.runtime.native import NativeExecutor
from segue.weights.dequantize import FORMATS
from segue.weights.gguf import load_gguf
from segue.weights.hub import resolve_model
from segue.weights.model_file import ModelFile, Tensor, TensorType

LAYERS = 30
"""Copies of an operation in one step: together larger than the caches, as a model's are."""
BLOCK_SIZE = 16
SHAPES = {"qkv": (960, 576), "attention output": (576, 576), "gate, up": (3072, 576), "down": (576, 1536)}
"""(outputs, inputs) of SmolLM2-135M's layers. Inputs are rounded up to whole blocks."""
QKV_WIDTH = (9 + 2 * 3) * 64
"""Of its 9 query heads and 3 KV heads."""


@dataclass(frozen=True)
class Bounds:
    read_gb_s: float
    blas_gflop_s: float


@dataclass(frozen=True)
class Timed:
    """`seconds` for reading `num_bytes` and doing `num_flop` multiplications and additions."""

    name: str
    rows: int
    seconds: float
    num_bytes: float
    num_flop: float

    def columns(self, bounds: Bounds) -> list[str]:
        gb_s = self.num_bytes / self.seconds / 1e9
        gflop_s = self.num_flop / self.seconds / 1e9
        return [
            self.name,
            str(self.rows),
            f"{self.seconds * 1e6:.0f}",
            f"{gb_s:.1f}",
            f"{100 * gb_s / bounds.read_gb_s:.0f} %",
            f"{gflop_s:.0f}",
            f"{gflop_s / bounds.blas_gflop_s:.2f}",
        ]


HEADERS = ["operation", "rows", "µs", "GB/s", "of reading", "GFLOP/s", "× BLAS"]


def least_seconds(call: Callable[[], object], *, at_least_s: float = 0.2) -> float:
    """The least time of one call, over at least three calls and `at_least_s`."""
    call()
    times: list[float] = []
    while len(times) < 3 or sum(times) < at_least_s:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def time_step(executor: NativeExecutor, step: SeqStep) -> float:
    return least_seconds(lambda: executor.forward([step]))


def measure_bounds(threads: int) -> Bounds:
    data = np.ones((threads, 1 << 24), np.uint64)  # 128 MiB for each thread
    square = np.ones((threads, 768, 768), np.float32)
    with ThreadPoolExecutor(threads) as pool:
        reading = least_seconds(lambda: list(pool.map(np.bitwise_or.reduce, data)))
        multiplying = least_seconds(lambda: list(pool.map(np.matmul, square, square)))
    return Bounds(data.nbytes / reading / 1e9, threads * 2 * 768**3 / multiplying / 1e9)


def tensor(name: str, kind: TensorType, outputs: int, inputs: int) -> Tensor:
    """Random weights. Speed does not depend on them, as long as scales are ordinary numbers."""
    rng = np.random.default_rng(0)
    if kind is TensorType.F32:
        values = rng.standard_normal((outputs, inputs)).astype(np.float32)
        return Tensor(name, values.shape, kind, values.reshape(-1).view(np.uint8))
    stored = FORMATS[kind]
    size = outputs * inputs // stored.block_elements * stored.block_bytes
    blocks = rng.integers(0x20, 0x40, size, np.uint8)  # as the high byte of an f16 scale: about 0.01 to 1
    return Tensor(name, (outputs, inputs), kind, blocks.reshape(-1))


def attention(qkv: str, out: str, layer: int) -> Attention:
    rope = Rope(theta=1e5, dim=64, interleaved=True)
    return Attention(qkv, out, layer, num_heads=9, num_kv_heads=3, head_dim=64, rope=rope, scale=0.125)


def executor_of(ops: list[Op], tensors: list[Tensor], widths: dict[str, int], threads: int) -> NativeExecutor:
    """An executor of these operations and of one more attention: nothing is sampled, so the runtime skips what
    comes after the last one."""
    kv = tensor("kv", TensorType.F32, tensors[0].shape[0], QKV_WIDTH)
    layer = sum(isinstance(op, Attention) for op in ops)
    ops = [*ops, Embed("kv", "kv"), attention("kv", "skipped", layer)]
    tensors = [*tensors, kv]
    widths = {**widths, "kv": QKV_WIDTH, "skipped": 576}
    program = Program(
        ops=tuple(ops),
        widths=widths,
        vocab_size=tensors[0].shape[0],
        max_model_len=8192,
    )
    model = ModelFile("bench", 0, "bench", {}, {tensor.name: tensor for tensor in tensors})
    executor = NativeExecutor(program, model, threads=threads)
    executor.allocate_kv(8192 // BLOCK_SIZE, BLOCK_SIZE)
    return executor


def prompt(start: int, rows: int, sampling: Sampling | None = None) -> SeqStep:
    blocks = list(range(-(-(start + rows) // BLOCK_SIZE)))
    return SeqStep(start=start, tokens=[1] * rows, blocks=blocks, sampling=sampling)


def time_linear(kinds: list[TensorType], rows: list[int], threads: int) -> Iterator[Timed]:
    for kind in kinds:
        for name, (outputs, width) in SHAPES.items():
            elements = FORMATS[kind].block_elements
            inputs = -(-width // elements) * elements
            weights = [tensor(f"w{i}", kind, outputs, inputs) for i in range(LAYERS)]
            executor = executor_of(
                [Embed("embed", "x"), *(Linear("x", (w.name,), "y") for w in weights)],
                [tensor("embed", TensorType.F32, 32, inputs), *weights],
                {"x": inputs, "y": outputs},
                threads,
            )
            for m in rows:
                seconds = time_step(executor, prompt(0, m)) / LAYERS
                yield Timed(
                    f"{name} {kind.name}", m, seconds, weights[0].data.nbytes, 2 * m * outputs * inputs
                )


def time_attention(rows: list[int], threads: int) -> Iterator[Timed]:
    ops: list[Op] = []
    for layer in range(LAYERS):
        ops += [Embed("embed", "qkv"), attention("qkv", "out", layer)]
    executor = executor_of(
        ops, [tensor("embed", TensorType.F32, 32, QKV_WIDTH)], {"qkv": QKV_WIDTH, "out": 576}, threads
    )
    per_key_bytes = executor.kv_bytes_per_token / (LAYERS + 1)
    for start in (0, 512, 4096):
        for m in rows:
            if start == 0 and m == 1:
                continue
            seconds = time_step(executor, prompt(start, m)) / LAYERS
            keys = sum(range(start + 1, start + m + 1))
            yield Timed(
                f"attention at {start}", m, seconds, per_key_bytes * (start + m), 2 * 2 * keys * 9 * 64
            )


def time_model(path: str, rows: list[int], threads: int) -> Iterator[Timed]:
    model = load_gguf(resolve_model(path))
    program = build_program(model)
    executor = NativeExecutor(program, model, threads=threads)
    executor.allocate_kv(4096 // BLOCK_SIZE, BLOCK_SIZE)
    matrices = [t for t in model.tensors.values() if len(t.shape) == 2 and t.name != "token_embd.weight"]
    head = model.tensors["token_embd.weight"]
    layers_flop = sum(2 * t.shape[0] * t.shape[1] for t in matrices)
    num_bytes = sum(t.data.nbytes for t in matrices) + head.data.nbytes
    for m in rows:
        seconds = time_step(executor, prompt(0, m, Sampling()))
        flop = layers_flop * m + 2 * head.shape[0] * head.shape[1]
        yield Timed("prompt, one id sampled", m, seconds, num_bytes, flop)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512], help="rows of a step")
    parser.add_argument("--types", nargs="+", default=["Q4_1", "Q8_0"], help="of the linear layers' weights")
    parser.add_argument("--model", help="a model file or name: also times whole steps of it")
    args = parser.parse_args()

    bounds = measure_bounds(args.threads)
    timed = [
        *time_linear([TensorType[name] for name in args.types], args.rows, args.threads),
        *time_attention(args.rows, args.threads),
    ]
    if args.model:
        timed += time_model(args.model, args.rows, args.threads)
    print(
        f"{args.threads} threads: reading {bounds.read_gb_s:.1f} GB/s, BLAS {bounds.blas_gflop_s:.0f} GFLOP/s\n"
    )
    print(format_table(HEADERS, [row.columns(bounds) for row in timed], right=frozenset(range(1, 7))))


if __name__ == "__main__":
    main()
