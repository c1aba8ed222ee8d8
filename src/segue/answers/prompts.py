"""From what a user gives as a prompt to token ids."""

from collections.abc import Mapping, Sequence

import msgspec

from segue.answers.outputs import Prompt
from segue.errors import ParameterError
from segue.tokens import Tokenizer


class EncodedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the engine takes it, with its text for the record."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, *, add_special_tokens: bool = True) -> EncodedPrompt:
    """The ids of a prompt; those of a text begin with BOS where the model wants it. Raises ParameterError."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, parse_special=True, add_special_tokens=add_special_tokens)

    if isinstance(prompt, str):
        return EncodedPrompt(text=prompt, token_ids=encode(prompt))
    if not isinstance(prompt, Mapping):
        raise ParameterError("prompts", prompt, "must be a string or a dict with prompt or prompt_token_ids")
    text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is not None and not isinstance(text, str):
        raise ParameterError("prompt", text, "must be a string")
    if salt is not None and not isinstance(salt, str):
        raise ParameterError("cache_salt", salt, "must be a string")
    if token_ids is not None:
        return EncodedPrompt(text=text, token_ids=checked_ids(token_ids), cache_salt=salt)
    if text is None:
        raise ParameterError("prompts", prompt, "a dict needs the key prompt or prompt_token_ids")
    return EncodedPrompt(text=text, token_ids=encode(text), cache_salt=salt)


def checked_ids(token_ids: object) -> list[int]:
    """A list of integers. Whether the model has such ids is for the engine to say."""
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Sequence):
        raise ParameterError("prompt_token_ids", token_ids, "must be a list of token ids")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ParameterError("prompt_token_ids", token, "must be an integer")
    return list(token_ids)
