"""From what a user gives as a prompt to token ids."""

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral

import msgspec

from segue.answers.processor import answer_params
from segue.engine.submission import Intake, Keep, KvScope, Submission
from segue.errors import ParameterError
from segue.sample.params import SamplingParams, is_unicode
from segue.tokens import Tokenizer

_PROMPT = "a text, a list of token ids, or a dict with prompt or prompt_token_ids"


class EncodedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in ids, with its text for the record."""

    text: str | None
    token_ids: list[int]
    scope: KvScope = KvScope()


def submissions_of(
    intake: Intake,
    prompt: EncodedPrompt,
    params: SamplingParams,
    *,
    request_ids: Sequence[str],
    priority: int = 0,
    resumable: bool = False,
    keep: Keep = "computed",
) -> list[Submission]:
    """What the engine is to run: one for each answer, with these ids of the intake's. Raises what it raises."""
    return [
        intake.submission(
            prompt.token_ids,
            answer_params(params, index),
            request_id=request_id,
            priority=priority,
            scope=prompt.scope,
            resumable=resumable,
            keep=keep,
        )
        for index, request_id in enumerate(request_ids)
    ]


def split_prompts(prompts: object) -> list[object]:
    """One prompt, or several, as a list of them. Token ids alone are one prompt. Raises ParameterError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts is None or isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise ParameterError(
            "prompts", prompts, f"must be a prompt or a list of prompts; a prompt is {_PROMPT}"
        )
    listed = list(prompts)
    return [listed] if listed and all(isinstance(each, Integral) for each in listed) else listed


def encode_prompt(tokenizer: Tokenizer, prompt: object, *, add_special_tokens: bool = True) -> EncodedPrompt:
    """The ids of a prompt; those of a text begin with BOS where the model wants it. Raises ParameterError."""

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text, parse_special=True, add_special_tokens=add_special_tokens)
        if not ids and add_special_tokens:
            raise ParameterError("prompt", text, "is empty; give at least one token")
        return ids

    if isinstance(prompt, str):
        return EncodedPrompt(text=prompt, token_ids=encode(prompt))
    if prompt is None or isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise ParameterError("prompts", prompt, f"must be {_PROMPT}")
    if not isinstance(prompt, Mapping):
        return EncodedPrompt(text=None, token_ids=checked_ids(prompt))
    text, token_ids, scope = prompt.get("prompt"), prompt.get("prompt_token_ids"), _scope(prompt)
    if text is not None and not isinstance(text, str):
        raise ParameterError("prompt", text, "must be a string")
    if token_ids is not None:
        return EncodedPrompt(text=text, token_ids=checked_ids(token_ids), scope=scope)
    if text is None:
        raise ParameterError("prompts", dict(prompt), "a dict needs the key prompt or prompt_token_ids")
    return EncodedPrompt(text=text, token_ids=encode(text), scope=scope)


def _scope(prompt: Mapping[str, object]) -> KvScope:
    names = {name: prompt.get(name) for name in KvScope.__struct_fields__}
    for field, value in names.items():
        if value is not None and not (isinstance(value, str) and is_unicode(value)):
            raise ParameterError(field, value, "must be a string")
    return msgspec.convert(names, KvScope)


def checked_ids(token_ids: object) -> list[int]:
    """Integers, also NumPy's and those of an array. Whether the model has such ids is for the engine to say."""
    if isinstance(token_ids, str | bytes | Mapping | Set) or not isinstance(token_ids, Iterable):
        raise ParameterError("prompt_token_ids", token_ids, "must be a list of token ids")
    ids = []
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ParameterError("prompt_token_ids", token, "must be an integer")
        ids.append(int(token))
    return ids


def checked_params(params: object) -> SamplingParams:
    """The parameters of one request; None: the defaults. Raises ParameterError."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ParameterError(
            "sampling_params", params, "must be SamplingParams, or for several prompts a list of them"
        )
    return params


def checked_priority(priority: object) -> int:
    """Raises ParameterError."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
        raise ParameterError("priority", priority, "must be an integer of 32 bits")
    return priority
