"""How a token is drawn, in NumPy: the definition. `native/src/sample.cpp` draws the same ids, faster.

An id's probability becomes an integer *weight*: 2^32 for the most likely id, less in proportion for the
others, rounded; 0 below 2^-32 of the most likely. Integers add up to the same total in any order, so nothing
about how a sum is split over lanes, blocks or threads can change which id is drawn.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from segue.contract.step import Sampling, TokenLogprobs
from segue.sample.philox import uniform_u64

F32 = np.float32
FloatRow = npt.NDArray[np.float32]

WEIGHT_ONE = 2**32
_LARGEST = np.finfo(F32).max
_SMALLEST_NORMAL = np.finfo(F32).tiny
_LOWEST_EXPONENT = F32(-87.0)


def sample_row(logits: FloatRow, sampling: Sampling, position: int, history: Sequence[int] = ()) -> int:
    """The id drawn for `position` from logits `[vocab]`.

    `history` holds the ids at all positions below (needed with penalties only). When every id is banned or
    -inf, the id is 0; with a NaN or +inf among the logits it means nothing.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        adjusted = _adjust(logits, sampling, position, history)
        best = _argmax(adjusted)
        temperature = min(F32(sampling.temperature), _LARGEST)
        if temperature == 0 or not np.isfinite(adjusted[best]):
            return best
        exponents = np.fmax((adjusted - adjusted[best]) / temperature, _LOWEST_EXPONENT)
    relative = exp(exponents)
    candidate = relative >= max(F32(sampling.min_p), F32(1 / WEIGHT_ONE))
    weights = np.where(candidate, np.rint(relative.astype(np.float64) * WEIGHT_ONE), 0).astype(np.int64)
    weights = _truncate(weights, exponents, sampling)
    cumulative = np.cumsum(weights)
    target = uniform_u64(sampling.seed, position) * int(cumulative[-1]) >> 64
    return int(np.searchsorted(cumulative, target, side="right"))


def row_logprobs(logits: FloatRow, token: int, num_top: int) -> TokenLogprobs:
    """Log-probability (nats) and rank of `token` under logits `[vocab]`; the `num_top` most likely ids."""
    wide = logits.astype(np.float64)
    highest = wide[_argmax(logits)]
    log_total = highest + np.log(np.sum(np.exp(wide - highest))) if np.isfinite(highest) else 0.0
    logprobs = (wide - log_total).astype(F32)
    top_ids = np.argsort(-logits, kind="stable")[:num_top]
    return TokenLogprobs(
        logprob=float(logprobs[token]),
        rank=1 + int(np.count_nonzero(logits > logits[token])),
        top_ids=tuple(top_ids.tolist()),
        top_logprobs=tuple(logprobs[top_ids].tolist()),
    )


def all_finite(logits: FloatRow) -> bool:
    """False when there is a NaN or an infinity."""
    return bool(np.all(np.isfinite(logits)))


def exp(x: FloatRow) -> FloatRow:
    """e^x for x in [-87, 0] within 2 units in the last place, the same bits on every machine.

    Cephes' expf: 2^n · e^r with |r| ≤ ln(2)/2. Each operation rounds to f32; none is fused.
    """
    n = np.rint(x * F32(1.44269504088896341))
    r = (x - n * F32(0.693359375)) - n * F32(-2.12194440e-4)
    p = np.full_like(x, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + F32(coefficient)
    result: FloatRow = np.ldexp(p * (r * r) + r + F32(1), n.astype(np.int32))
    return result


def masked(logits: FloatRow, mask: bytes | None) -> FloatRow:
    """The logits without the ids that a mask excludes (`SeqStep.masks`)."""
    if mask is None:
        return logits
    allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: len(logits)]
    return np.where(allowed.astype(bool), logits, F32(-np.inf))


def _argmax(logits: FloatRow) -> int:
    """The most likely id, the lowest among equals."""
    return int(np.argmax(np.where(np.isnan(logits), -np.inf, logits)))


def _adjust(logits: FloatRow, sampling: Sampling, position: int, history: Sequence[int]) -> FloatRow:
    """A copy of the logits with bias, bans and penalties applied."""
    adjusted = logits.copy()
    for token, bias in sampling.logit_bias:
        adjusted[token] += F32(bias)
    if position < sampling.banned_until:
        adjusted[[token for token in sampling.banned if token < len(logits)]] = -np.inf
    if not sampling.has_penalties:
        return adjusted
    repetition = np.clip(F32(sampling.repetition_penalty), _SMALLEST_NORMAL, _LARGEST)
    seen = np.unique(np.asarray(history, dtype=np.int64))
    output = np.asarray(history[sampling.output_start :], dtype=np.int64)
    counts = np.bincount(output, minlength=len(logits)).astype(F32)[seen]
    x = adjusted[seen]
    x = np.where(x > 0, x / repetition, x * repetition)
    x -= F32(sampling.frequency_penalty) * counts
    x -= np.where(counts > 0, F32(sampling.presence_penalty), F32(0))
    adjusted[seen] = np.minimum(x, _LARGEST)
    return adjusted


def _truncate(
    weights: npt.NDArray[np.int64], exponents: FloatRow, sampling: Sampling
) -> npt.NDArray[np.int64]:
    """top_k, then top_p: the weights with 0 where they leave an id out."""
    order = np.argsort(-exponents, kind="stable")
    ranked = order[weights[order] > 0]
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    if F32(sampling.top_p) < 1:
        cumulative = np.cumsum(weights[ranked])
        enough = max(1.0, np.ceil(float(F32(sampling.top_p)) * float(cumulative[-1])))
        ranked = ranked[: 1 + int(np.searchsorted(cumulative, enough, side="left"))]
    kept = np.zeros_like(weights)
    kept[ranked] = weights[ranked]
    return kept
