"""The native sampler with the reference's signatures."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from segue import _native
from segue.contract.step import Sampling, TokenLogprobs


def spec_of(sampling: Sampling) -> _native.SamplingSpec:
    return _native.SamplingSpec(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        output_start=sampling.output_start,
        logit_bias=list(sampling.logit_bias),
        banned=list(sampling.banned),
        banned_until=sampling.banned_until,
        seed=sampling.seed,
    )


def sample_row(
    logits: npt.NDArray[np.float32], sampling: Sampling, position: int, history: Sequence[int] = ()
) -> int:
    return _native.sample_row(logits, spec_of(sampling), position, list(history))


def row_logprobs(logits: npt.NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    logprob, rank, top_ids, top_logprobs = _native.row_logprobs(logits, token, num_top)
    return TokenLogprobs(logprob=logprob, rank=rank, top_ids=tuple(top_ids), top_logprobs=tuple(top_logprobs))
