"""How fast Segue is beside llama.cpp: the same model file, the same token ids, the same thread counts, in turns.

    python bench/peers.py                       a table; make bench-peers builds the peer first
    python bench/peers.py --threads 2 --json    what was measured, as JSON

Each engine lives in a process of its own (a worker, in its own Python environment) and sleeps while another is
measured. They take turns within every round, so that a slow moment of the machine hits all of them alike. Three
workloads, all greedy and without prefix caching:

    prefill     one prompt, from the request to its first token
    decode 1    one sequence, from its first token to its last
    decode 32   32 sequences together, from when all have their first token to the end
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from segue.cli.table import format_table
from segue.tokens import Tokenizer
from segue.weights.gguf import load_gguf
from segue.weights.hub import resolve_model

HERE = Path(__file__).parent
DECODE_PROMPT_LEN = 16


@dataclass(frozen=True)
class Peer:
    """How to start a worker."""

    name: str
    python: Path
    script: Path
    model: Path
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Workload:
    name: str
    op: str
    prompt_len: int
    sequences: int
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """How many tokens the measured time is for."""
        return self.prompt_len if self.op == "prefill" else self.sequences * (self.max_tokens - 1)


@dataclass(frozen=True)
class Measurement:
    peer: str
    threads: int
    workload: str
    num_tokens: int
    seconds: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min_s(self) -> float:
        return min(self.seconds)


class Worker:
    """A peer's process: one JSON object a line, there and back."""

    def __init__(self, peer: Peer, threads: int, longest: int, sequences: int) -> None:
        self.peer = peer
        self._process = subprocess.Popen(
            [
                str(peer.python),
                str(peer.script),
                *(str(peer.model), str(threads), str(longest), str(sequences)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **dict(peer.environment)},
            text=True,
        )

    def measure(self, op: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Seconds that the workload took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, "prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"peers: the worker of {self.peer.name} ended with {self._process.wait()}")
        seconds: float = json.loads(answer)["seconds"]
        return seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def measure(
    peers: Sequence[Peer], model: Path, threads: int, workloads: Sequence[Workload], rounds: int
) -> list[Measurement]:
    """All workloads of all peers at one thread count; one round first that does not count."""
    vocab_size = Tokenizer.from_model(load_gguf(model)).vocab_size
    longest = max(workload.prompt_len + workload.max_tokens for workload in workloads)
    sequences = max(workload.sequences for workload in workloads)
    workers = [Worker(peer, threads, longest, sequences) for peer in peers]
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        generator = random.Random(turn)
        for workload in workloads:
            prompts = [
                [generator.randrange(vocab_size) for _ in range(workload.prompt_len)]
                for _ in range(workload.sequences)
            ]
            for worker in workers:
                elapsed_s = worker.measure(workload.op, prompts, workload.max_tokens)
                if turn > 0:
                    seconds.setdefault((worker.peer.name, workload.name), []).append(elapsed_s)
    for worker in workers:
        worker.close()
    return [
        Measurement(peer.name, threads, workload.name, workload.num_tokens, seconds[peer.name, workload.name])
        for workload in workloads
        for peer in peers
    ]


def as_table(measurements: Sequence[Measurement], baseline: str) -> str:
    """Rates, and how many times the baseline's they are."""
    base = {(each.threads, each.workload): each for each in measurements if each.peer == baseline}
    rows = []
    for each in measurements:
        beside = base.get((each.threads, each.workload))
        rows.append(
            (
                str(each.threads),
                each.workload,
                each.peer,
                f"{each.num_tokens / each.median_s:,.1f}",
                f"{each.num_tokens / each.min_s:,.1f}",
                "" if beside is None else f"{beside.median_s / each.median_s:.2f}",
                "" if beside is None else f"{beside.min_s / each.min_s:.2f}",
            )
        )
    header = ("threads", "workload", "engine", "tok/s (median)", "tok/s (best)", "x median", "x best")
    return format_table(header, rows, right=frozenset({0, 3, 4, 5, 6}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="alias or path of a GGUF file")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="thread counts, one after the other"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--decode-len", type=int, default=64, help="tokens that each sequence decodes")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--llama-python", type=Path, default=HERE.parent / ".envs/llama/bin/python")
    parser.add_argument(
        "--vllm",
        type=Path,
        nargs=2,
        metavar=("PYTHON", "FOLDER"),
        help="also vLLM: an interpreter that has it, and the model as scripts/gguf_to_hf.py writes it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if not args.llama_python.exists():
        parser.error(f"{args.llama_python} is missing: make bench-peers builds it, or give --llama-python")

    segue = HERE / "peers_segue.py"
    python = Path(sys.executable)
    model = resolve_model(args.model)
    peers = [
        Peer("segue", python, segue, model),
        Peer("segue avx2", python, segue, model, (("SEGUE_ISA", "avx2"),)),
        Peer("llama.cpp", args.llama_python, HERE / "peers_llama.py", model),
    ]
    if args.vllm:
        peers.append(Peer("vllm bf16", args.vllm[0], HERE / "peers_vllm.py", args.vllm[1]))
    workloads = [
        Workload(f"prefill {args.prompt_len}", "prefill", args.prompt_len, 1, 1),
        Workload("decode 1", "decode", DECODE_PROMPT_LEN, 1, args.decode_len),
        Workload(f"decode {args.sequences}", "decode", DECODE_PROMPT_LEN, args.sequences, args.decode_len),
    ]
    measurements = []
    for threads in args.threads:
        measurements += measure(peers, model, threads, workloads, args.rounds)
    if args.json:
        print(json.dumps({"model": model.name, "measurements": [asdict(each) for each in measurements]}))
    else:
        print(as_table(measurements, baseline="llama.cpp"))


if __name__ == "__main__":
    main()
