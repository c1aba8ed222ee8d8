"""From what a request gives (text, token ids, messages) to the ids that are computed."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from segue.engine.check import too_long
from segue.errors import ParameterError
from segue.llm import Message
from segue.prompts import EncodedPrompt
from segue.server.sampling import CompletionFields
from segue.server.serving import Serving
from segue.tokens.chat import encode_chat, encode_head

LONG_TEXT_CHARS = 4096
"""Encoded on a thread of its own, beside the event loop."""
ALL_THAT_FIT = -1
RESERVED_VARIABLES = frozenset(
    {"tokenizer", "messages", "add_generation_prompt", "tools", "now", "bos_token", "eos_token"}
)
"""Of a chat template: not for `chat_template_kwargs`."""

Prompts = str | list[str | int | list[int]]


async def encode_prompts(
    serving: Serving, prompts: Prompts, body: CompletionFields, *, add_special_tokens: bool, room: int
) -> list[EncodedPrompt]:
    """A completion's prompts. `room` is how many tokens of an answer are to fit behind each.

    Raises ParameterError and CapacityError.
    """
    encoded = []
    for prompt in _listed(prompts):
        if isinstance(prompt, str):
            ids = await encode_text(
                serving,
                prompt,
                add_special_tokens=add_special_tokens,
                may_be_longer=body.truncate_prompt_tokens is not None,
            )
            text: str | None = prompt
        else:
            ids, text = prompt, None
        ids = truncated(serving, ids, body.truncate_prompt_tokens, room)
        encoded.append(EncodedPrompt(text=text, token_ids=ids, cache_salt=body.cache_salt))
    return encoded


async def encode_text(
    serving: Serving, text: str, *, add_special_tokens: bool, may_be_longer: bool = False
) -> list[int]:
    """The ids of a text. One that can never fit is refused before it is encoded, unless it `may_be_longer`."""
    if not may_be_longer and len(text) > serving.max_model_len * serving.longest_token_bytes:
        raise too_long(serving.llm.config, f"the prompt has {len(text)} characters")
    tokenizer = serving.llm.get_tokenizer()
    return await _beside(
        len(text), lambda: tokenizer.encode(text, parse_special=True, add_special_tokens=add_special_tokens)
    )


async def encode_messages(
    serving: Serving,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of a conversation. Raises ParameterError, and ModelFileError if the model has no template."""
    tokenizer = serving.llm.get_tokenizer()
    variables = variables or {}
    for name in variables:
        if name in RESERVED_VARIABLES or not name.isidentifier():
            raise ParameterError("chat_template_kwargs", name, "is not a variable to set")
    plain = for_template(messages, tokenizer.chat_template or "")

    def encode() -> list[int]:
        if continue_final_message:
            head, text = encode_head(tokenizer, plain, after=None)
            return head + tokenizer.encode(text + _last_text(plain))
        return encode_chat(
            tokenizer, plain, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )

    if continue_final_message and (add_generation_prompt or tools or variables):
        raise ParameterError(
            "continue_final_message",
            True,
            "needs add_generation_prompt=false, and goes with neither tools nor chat_template_kwargs",
        )
    ids = await _beside(sum(_num_chars(message) for message in plain), encode)
    return tokenizer.encode("", add_special_tokens=True) + ids if add_special_tokens else ids


def for_template(messages: Sequence[Message], template: str) -> list[dict[str, object]]:
    """Messages as chat templates expect them: no null fields, arguments of tool calls as objects, and no role
    "developer" where the template does not know it."""
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ParameterError("messages", type(message).__name__, f"message {i} must be an object")
        changed = _given(message)
        if changed.get("role") == "developer" and "developer" not in template:
            changed["role"] = "system"
        if changed.get("content") is None and changed.get("role") == "assistant":
            changed["content"] = ""
        if isinstance(parts := changed.get("content"), list):
            changed["content"] = [_given(part) if isinstance(part, Mapping) else part for part in parts]
        if isinstance(calls := changed.get("tool_calls"), list):
            changed["tool_calls"] = [_call_for_template(i, call) for call in calls]
        elif "tool_calls" in changed:
            raise ParameterError("messages", "tool_calls", f"message {i} must have a list of tool calls")
        plain.append(changed)
    return plain


def truncated(serving: Serving, ids: list[int], limit: int | None, room: int) -> list[int]:
    """The last `limit` ids; with -1, as many as leave room for the answer."""
    match limit:
        case None:
            return ids
        case 0:
            raise ParameterError("truncate_prompt_tokens", 0, "leaves nothing of the prompt; -1: what fits")
        case _:
            keep = max(serving.max_model_len - room, 1) if limit == ALL_THAT_FIT else limit
            return ids[-keep:]


def _listed(prompts: Prompts) -> list[str | list[int]]:
    """One prompt, or several; ids may be given as a list of lists."""
    if isinstance(prompts, str):
        return [prompts]
    if not prompts:
        raise ParameterError("prompt", [], "must not be empty")
    if all(isinstance(each, int) for each in prompts):
        return [[each for each in prompts if isinstance(each, int)]]
    texts = [each for each in prompts if isinstance(each, str)]
    ids = [each for each in prompts if isinstance(each, list)]
    if len(prompts) not in (len(texts), len(ids)):
        raise ParameterError(
            "prompt", "[…]", "must be a text, a list of texts, a list of token ids, or a list of such lists"
        )
    return [*texts, *ids]


def _call_for_template(i: int, call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise ParameterError("messages", "tool_calls", f"message {i} has a tool call without a function")
    function = _given(function)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        return {**_given(call), "function": function}
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise ParameterError(
            "messages", "tool_calls", f"message {i} has a tool call whose arguments are not JSON"
        ) from None
    return {**_given(call), "function": {**function, "arguments": parsed}}


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    """Without those that are null."""
    return {name: value for name, value in fields.items() if value is not None}


def _last_text(messages: Sequence[Message]) -> str:
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise ParameterError("messages", "content", "the last message must have a text to continue")
    return content


def _num_chars(message: Message) -> int:
    """Of its texts, about."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return sum(len(text) for text in texts if isinstance(text, str))


async def _beside(num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
    return encode() if num_chars < LONG_TEXT_CHARS else await asyncio.to_thread(encode)
