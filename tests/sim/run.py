"""Run the simulation over many seeds: `python -m tests.sim.run --seeds 0-999 --steps 300`."""

import argparse
import logging
import sys
import time

from tests.sim.checks import Violation
from tests.sim.driver import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-99", help="a seed, or a range first-last (default %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=300, help="steps with events for each seed (%(default)s)"
    )
    parser.add_argument("--keep-going", action="store_true", help="report every failing seed")
    args = parser.parse_args()
    logging.getLogger("segue").setLevel(logging.CRITICAL)  # failures are injected
    first, _, last = args.seeds.partition("-")
    total, failed, begin = 0, 0, time.perf_counter()
    for seed in range(int(first), int(last or first) + 1):
        try:
            total += run_seed(seed, args.steps)
        except Violation as violation:
            failed += 1
            print(violation, file=sys.stderr)
            if not args.keep_going:
                break
    seconds = time.perf_counter() - begin
    print(f"{total} steps in {seconds:.1f} s ({total / max(seconds, 1e-9):.0f}/s), {failed} seeds failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
