"""The native sampler with the reference's signatures."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from segue import _native
from segue.contract.step import Sampling, TokenLogprobs


def sample_row(
    logits: npt.NDArray[np.float32], sampling: Sampling, position: int, history: Sequence[int] = ()
) -> int:
    return _native.sample_row(logits, sampling, position, history)


def row_logprobs(logits: npt.NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    logprob, rank, top_ids, top_logprobs = _native.row_logprobs(logits, token, num_top)
    return TokenLogprobs(logprob=logprob, rank=rank, top_ids=tuple(top_ids), top_logprobs=tuple(top_logprobs))
