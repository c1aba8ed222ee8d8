"""How long a user waits: from starting `segue run` to the first byte of its answer, model loading included.

python bench/first_token.py
"""

import argparse
import statistics
import subprocess
import sys
import time


def first_byte_s(model: str, question: str) -> float:
    """Seconds from the start of the process to the first byte on its stdout."""
    start_s = time.perf_counter()
    command = [sys.executable, "-m", "segue", "run", model, question, "--max-tokens", "8", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"first_token: segue ended with {process.wait()}")
        elapsed_s = time.perf_counter() - start_s
        process.stdout.read()
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--question", default="Why is the sky blue?")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    first_byte_s(args.model, args.question)
    seconds = [first_byte_s(args.model, args.question) for _ in range(args.rounds)]
    print(f"first byte of the answer: median {statistics.median(seconds):.3f} s, min {min(seconds):.3f} s")


if __name__ == "__main__":
    main()
