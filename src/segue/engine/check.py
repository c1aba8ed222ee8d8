"""What input must be to fit the model: one rule, for the engine and for where requests enter."""

from segue.engine.config import EngineConfig
from segue.errors import CapacityError, ParameterError
from segue.sample.params import SamplingParams


def check_turn(config: EngineConfig, history_len: int, num_new: int, params: SamplingParams | None) -> None:
    """Whether a chunk of so many tokens can go on after a history of `history_len`. Raises CapacityError when they and,
    with `params`, one token of an answer do not fit, ParameterError when there is nothing to answer."""
    if params is not None and history_len + num_new == 0:
        raise ParameterError("token_ids", [], "there is nothing to answer; give at least one token")
    check_length(config, history_len + num_new, params)


def check_length(config: EngineConfig, length: int, params: SamplingParams | None) -> None:
    """Raises CapacityError when so many tokens and, with `params`, one of an answer do not fit."""
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
