"""A child process that kills itself when it is to compute a certain id."""

import os
import signal
from collections.abc import Sequence

from segue.contract.step import ForwardResult, SeqStep
from segue.host import child
from segue.runtime.reference import ReferenceExecutor

DEADLY = 11

if __name__ == "__main__":
    forward = ReferenceExecutor.forward

    def deadly(
        self: ReferenceExecutor, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()
    ) -> ForwardResult:
        if any(DEADLY in seq.tokens for seq in seqs):
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, seqs, copies)

    ReferenceExecutor.forward = deadly  # type: ignore[method-assign]
    child.main()
