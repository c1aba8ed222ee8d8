"""Why a sequence cannot be computed, in one line that names the field. `native/src/step_reader.cpp` says the same."""

import math
import operator
from collections.abc import Sequence

from segue.contract.step import Sampling, SeqStep


class Refusal(ValueError):
    """One sequence does not fit the model or its KV memory."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")


def check(seq: SeqStep, *, vocab_size: int, max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Raises Refusal when `seq` cannot be computed."""
    if seq.after is not None:
        raise Refusal("after", "must be resolved before it is executed")
    start = _int("start", seq.start)
    num_tokens = len(_ids("tokens", seq.tokens, vocab_size))
    num_drafts = len(_ids("drafts", seq.drafts, vocab_size))
    end = start + num_tokens + num_drafts
    if num_tokens == 0:
        raise Refusal("tokens", "none")
    if start < 0:
        raise Refusal("start", "must be 0 or more")
    if end > max_model_len:
        raise Refusal(
            "start",
            f"the sequence is longer than {max_model_len} tokens, the most that the model can be given",
        )
    if len(_ids("blocks", seq.blocks, num_blocks)) * block_size < end:
        raise Refusal("blocks", "too few for the sequence's positions")
    if len(_ids("prompt_targets", seq.prompt_targets, vocab_size)) > num_tokens + num_drafts:
        raise Refusal("prompt_targets", "more than inputs")
    if _int("num_prompt_logprobs", seq.num_prompt_logprobs) < 0:
        raise Refusal("num_prompt_logprobs", "must be 0 or more")
    if seq.sampling is not None:
        _check_sampling(seq.sampling, vocab_size)
        if seq.sampling.has_penalties:
            _check_history(seq, start + num_tokens, vocab_size)
        _check_masks(seq, 1 + num_drafts, vocab_size)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    for name in ("temperature", "top_p", "min_p"):
        _check_number(name, getattr(sampling, name))
    _int("top_k", sampling.top_k)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        _check_number(name, getattr(sampling, name))
    _int("output_start", sampling.output_start)
    for item in _items("logit_bias", sampling.logit_bias):
        if not isinstance(item, tuple) or len(item) != 2:
            raise Refusal("logit_bias", "expected pairs of an id and a number")
        _ids("logit_bias", item[:1], vocab_size)
        _check_number("logit_bias", item[1])
    _ids("banned", sampling.banned, vocab_size)
    _int("banned_until", sampling.banned_until)
    if not isinstance(sampling.seed, int) or not 0 <= sampling.seed < 2**64:
        raise Refusal("seed", "expected an unsigned integer")
    if sampling.num_logprobs is not None and _int("num_logprobs", sampling.num_logprobs) < 0:
        raise Refusal("num_logprobs", "must be 0 or more")


def _check_history(seq: SeqStep, size: int, vocab_size: int) -> None:
    try:
        view = memoryview(seq.history)  # type: ignore[arg-type]  # what is no array is refused
    except TypeError:
        raise Refusal("history", "expected an array of 32-bit integers") from None
    if view.itemsize != 4:
        raise Refusal("history", "expected an array of 32-bit integers")
    if len(view) < size:
        raise Refusal("history", "fewer ids than positions")
    if any(not 0 <= token < vocab_size for token in view[:size]):
        raise Refusal("history", "an id is not in the vocabulary")


def _check_masks(seq: SeqStep, num_rows: int, vocab_size: int) -> None:
    masks = _items("masks", seq.masks)
    for mask in masks:
        if mask is not None and not isinstance(mask, bytes):
            raise Refusal("masks", "expected bytes")
        if mask is not None and len(mask) * 8 < vocab_size:
            raise Refusal("masks", "too few bits for the vocabulary")
    if masks and len(masks) != num_rows:
        raise Refusal("masks", f"{len(masks)} for {num_rows} sampled rows")


def _items(name: str, value: object) -> Sequence[object]:
    try:
        return tuple(value)  # type: ignore[arg-type]  # what is no sequence is refused
    except TypeError:
        raise Refusal(name, "expected a sequence") from None


def _ids(name: str, value: object, limit: int) -> list[int]:
    ids = [_int(name, item) for item in _items(name, value)]
    for token in ids:
        if not 0 <= token < limit:
            raise Refusal(name, f"{token} is not in [0, {limit})")
    return ids


def _int(name: str, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is no integer is refused
    except TypeError:
        raise Refusal(name, "expected an integer") from None
    if not -(2**31) <= number < 2**31:
        raise Refusal(name, "a number does not fit 32 bits")
    return number


def _check_number(name: str, value: object) -> None:
    try:
        math.fabs(value)  # type: ignore[arg-type]  # what is no number is refused
    except (TypeError, OverflowError):
        raise Refusal(name, "expected a number") from None
