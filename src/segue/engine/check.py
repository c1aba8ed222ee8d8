"""What a request must be before it may be queued: one rule, for the engine and for front ends in other processes."""

from array import array
from collections.abc import Sequence
from typing import get_args

from segue.engine.config import EngineConfig
from segue.engine.request import Keep
from segue.errors import CapacityError, ParameterError
from segue.sample.guide import NO_END
from segue.sample.params import SamplingParams


def check_request(
    config: EngineConfig,
    vocab_size: int,
    token_ids: Sequence[int],
    params: SamplingParams | None,
    *,
    resumable: bool,
    keep: Keep,
    knows_grammar: bool = False,
) -> "array[int]":
    """The ids of a new request, typecode 'i'. Raises ParameterError, or CapacityError when it can never fit.

    `knows_grammar`: that the grammar is right is known already.
    """
    if params is None and not resumable:
        raise ParameterError("params", params, "only a resumable request can do without")
    if keep not in get_args(Keep):
        raise ParameterError("keep", keep, 'must be "computed" or "all"')
    ids = check_chunk(config, vocab_size, token_ids, params, resumable=resumable, knows_grammar=knows_grammar)
    if not ids and params is not None:
        raise ParameterError("prompt_token_ids", [], "is empty; give at least one token")
    return ids


def check_chunk(
    config: EngineConfig,
    vocab_size: int,
    token_ids: Sequence[int],
    params: SamplingParams | None,
    *,
    resumable: bool = True,
    knows_grammar: bool = False,
) -> "array[int]":
    """The ids of a chunk of input, typecode 'i'; `check_turn` says whether it fits after what there is."""
    try:
        ids = array("i", token_ids)
    except (TypeError, OverflowError):
        raise ParameterError("prompt_token_ids", token_ids, "must be a list of token ids") from None
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ParameterError("prompt_token_ids", wrong, f"is no token id; the model has {vocab_size}")
    if params is not None:
        params.check_vocab(vocab_size)
        _check_grammar(config, params, knows_grammar=knows_grammar)
        if resumable and params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", params.prompt_logprobs, "not for a resumable request")
    _check_length(config, len(ids), params)
    return ids


def check_turn(config: EngineConfig, history_len: int, num_new: int, params: SamplingParams | None) -> None:
    """Whether a chunk of so many tokens can go on after a history of `history_len`. Raises CapacityError when they and,
    with `params`, one token of an answer do not fit, ParameterError when there is nothing to answer."""
    if params is not None and history_len + num_new == 0:
        raise ParameterError("token_ids", [], "there is nothing to answer; give at least one token")
    _check_length(config, history_len + num_new, params)


def _check_grammar(config: EngineConfig, params: SamplingParams, *, knows_grammar: bool) -> None:
    if params.structured_outputs is not None and not config.eos_token_ids:
        raise ParameterError("structured_outputs", "…", NO_END)
    if not knows_grammar:
        params.check_grammar()


def _check_length(config: EngineConfig, length: int, params: SamplingParams | None) -> None:
    room = config.max_model_len - (params is not None)
    if length > room:
        raise too_long(config, f"the input has {length}")


def too_long(config: EngineConfig, what: str) -> CapacityError:
    """OpenAI's words for it, which clients look for."""
    is_lowered = config.model_context is not None and config.max_model_len < config.model_context
    advice = f"shorten it{' or raise max_model_len' if is_lowered else ''}"
    return CapacityError(
        f"this model's maximum context length is {config.max_model_len} tokens, with the answer; {what}: {advice}"
    )
