"""How far computed next-token distributions are from exact ones: KL(reference → X) for X = Segue and llama.cpp.

The reference computes in f32 from the same file's dequantised weights, so what is measured is the error of
arithmetic (integer activations, half-precision KV), not of the file's quantisation.

    python bench/kl.py smollm2 --llama-python .envs/llama/bin/python
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from segue.models import build_program
from segue.runtime.native import NativeExecutor
from segue.runtime.reference import ReferenceExecutor
from segue.tokens import Tokenizer
from segue.weights.gguf import load_gguf
from segue.weights.hub import resolve_model

FloatArray = npt.NDArray[np.float32]

TEXT = Path(__file__).parent / "text" / "kl.txt"
WINDOW = 512
"""Each window of the text is computed from an empty KV."""


@dataclass(frozen=True)
class Row:
    """Over all positions of the text; KL in nats."""

    name: str
    positions: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    same_top_1: float
    max_logit_difference: float


def log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


class Comparison:
    """Collects one implementation's windows against the reference's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kl: list[float] = []
        self._same_top_1 = 0
        self._max_difference = 0.0

    def add(self, reference: FloatArray, other: FloatArray) -> None:
        p, q = log_softmax(reference), log_softmax(other)
        self._kl += np.sum(np.exp(p) * (p - q), axis=1).tolist()
        self._same_top_1 += int(np.sum(reference.argmax(axis=1) == other.argmax(axis=1)))
        self._max_difference = max(self._max_difference, float(np.abs(reference - other).max()))

    def row(self) -> Row:
        return Row(
            name=self.name,
            positions=len(self._kl),
            mean_kl=float(np.mean(self._kl)),
            p99_kl=float(np.percentile(self._kl, 99)),
            max_kl=float(np.max(self._kl)),
            same_top_1=self._same_top_1 / len(self._kl),
            max_logit_difference=self._max_difference,
        )


class LlamaCpp:
    """llama.cpp's logits, from a worker that runs in an environment of its own."""

    def __init__(self, python: Path, model: Path, vocab_size: int, threads: int) -> None:
        worker = Path(__file__).parent / "llama_cpp_logits.py"
        self._vocab_size = vocab_size
        self._process = subprocess.Popen(
            [python, worker, model, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def logits(self, token_ids: Sequence[int]) -> FloatArray:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, token_ids)).encode() + b"\n")
        self._process.stdin.flush()
        size = len(token_ids) * self._vocab_size * 4
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise SystemExit(f"the llama.cpp worker ended with status {self._process.wait()}")
        return np.frombuffer(data, np.float32).reshape(len(token_ids), self._vocab_size)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def windows(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), WINDOW):
        yield ids[start : start + WINDOW]


def measure(path: Path, *, threads: int, llama_python: Path | None) -> list[Row]:
    model = load_gguf(path)
    program = build_program(model)
    text = TEXT.read_text(encoding="utf-8")
    ids = Tokenizer.from_model(model).encode(text, parse_special=True, add_special_tokens=False)
    reference = ReferenceExecutor(program, model)
    implementations: dict[str, NativeExecutor | LlamaCpp] = {
        "segue, f16 KV": NativeExecutor(program, model, threads=threads, kv_dtype="f16"),
        "segue, f32 KV": NativeExecutor(program, model, threads=threads, kv_dtype="f32"),
    }
    if llama_python is not None:
        implementations["llama.cpp"] = LlamaCpp(llama_python, path, program.vocab_size, threads)
    comparisons = {name: Comparison(name) for name in implementations}
    for window in windows(ids):
        exact = reference.logits(window)
        for name, implementation in implementations.items():
            comparisons[name].add(exact, implementation.logits(window))
    for implementation in implementations.values():
        implementation.close()
    return [comparison.row() for comparison in comparisons.values()]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| | mean KL | 99 % | maximum | same most likely id | largest logit difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.mean_kl:.2e} | {row.p99_kl:.2e} | {row.max_kl:.2e} "
            f"| {row.same_top_1:.2%} | {row.max_logit_difference:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="KL divergence from the f32 reference, over bench/text/kl.txt."
    )
    parser.add_argument("model", help="an alias that has been pulled, or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-python", type=Path, help="the Python that has llama-cpp-python")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = measure(resolve_model(args.model), threads=args.threads, llama_python=args.llama_python)
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else table(rows))


if __name__ == "__main__":
    main()
