"""A child process whose first step takes until a file is there."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from segue.contract.step import ForwardResult, SeqStep
from segue.host import child
from segue.runtime.reference import ReferenceExecutor

if __name__ == "__main__":
    forward = ReferenceExecutor.forward

    def patient(
        self: ReferenceExecutor, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()
    ) -> ForwardResult:
        Path(os.environ["SEGUE_TEST_BEGUN"]).touch()
        while not Path(os.environ["SEGUE_TEST_GATE"]).exists():
            time.sleep(0.01)
        return forward(self, seqs, copies)

    ReferenceExecutor.forward = patient  # type: ignore[method-assign]
    child.main()
