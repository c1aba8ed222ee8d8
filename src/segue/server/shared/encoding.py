"""From what a request gives (text, token ids, messages) to the ids that are computed."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from segue.answers.prompts import EncodedPrompt
from segue.engine.check import too_long
from segue.errors import CapacityError, ParameterError
from segue.llm.llm import Message
from segue.sample.params import SamplingParams
from segue.server.shared.sampling import CompletionFields
from segue.server.shared.serving import Serving
from segue.tokens.chat import encode_chat, encode_continued

MAX_ANSWERS = 2048
"""Of one request: its prompts times `n`."""
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_TEXT_CHARS = 1 << 20
"""Of a text that need not fit the model: it is only encoded, or cut."""
MAX_PROMPT_LOGPROBS = 200_000
"""In one answer."""
LONG_TEXT_CHARS = 4096
"""Encoded on a thread of its own, beside the event loop."""
ALL_THAT_FIT = -1
RESERVED_VARIABLES = frozenset(
    {"tokenizer", "messages", "add_generation_prompt", "tools", "now", "bos_token", "eos_token"}
)
"""Of a chat template: not for `chat_template_kwargs`."""

Prompts = str | list[str | int | list[int]]


async def encode_prompts(
    serving: Serving,
    prompts: Prompts,
    body: CompletionFields,
    params: SamplingParams,
    *,
    add_special_tokens: bool,
) -> list[EncodedPrompt]:
    """A completion's prompts. Raises ParameterError and CapacityError."""
    listed = _listed(prompts)
    if len(listed) * params.n > MAX_ANSWERS:
        why = f"with n={params.n} are more than {MAX_ANSWERS} answers"
        raise ParameterError("prompt", f"{len(listed)} prompts", why)
    texts = [prompt for prompt in listed if isinstance(prompt, str)]
    encoded = await encode_texts(
        serving,
        texts,
        add_special_tokens=add_special_tokens,
        may_be_longer=body.truncate_prompt_tokens is not None,
    )
    of_texts = zip(texts, encoded, strict=True)
    both = of_texts if texts else ((None, prompt) for prompt in listed if isinstance(prompt, list))
    made = [
        EncodedPrompt(
            text=text,
            token_ids=truncated(serving, ids, body.truncate_prompt_tokens, params),
            scope=body.scope,
        )
        for text, ids in both
    ]
    check_prompt_logprobs(made, params)
    return made


async def encode_texts(
    serving: Serving, texts: Sequence[str], *, add_special_tokens: bool, may_be_longer: bool = False
) -> list[list[int]]:
    """The ids of each. A text that can never fit is refused before it is encoded, unless it `may_be_longer`."""
    for text in texts:
        _check_chars(serving, len(text), may_be_longer=may_be_longer)
    tokenizer = serving.llm.get_tokenizer()

    def encode() -> list[list[int]]:
        return [
            tokenizer.encode(text, parse_special=True, add_special_tokens=add_special_tokens)
            for text in texts
        ]

    return encode() if sum(map(len, texts)) < LONG_TEXT_CHARS else await asyncio.to_thread(encode)


async def encode_messages(
    serving: Serving,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: Mapping[str, Any] | None = None,
    may_be_longer: bool = False,
) -> list[int]:
    """The ids of a conversation. Raises ParameterError, CapacityError for one that can never fit (unless it
    `may_be_longer`), and ModelFileError if the model has no template."""
    tokenizer = serving.llm.get_tokenizer()
    variables = variables or {}
    for name, count, limit in (
        ("messages", len(messages), MAX_MESSAGES),
        ("tools", len(tools or ()), MAX_TOOLS),
    ):
        if count > limit:
            raise ParameterError(name, "…", f"has {count:,} items; the limit is {limit:,}")
    for name in variables:
        if name in RESERVED_VARIABLES or not name.isidentifier():
            raise ParameterError("chat_template_kwargs", name, "is not a variable to set")
    if continue_final_message and (add_generation_prompt or tools or variables):
        raise ParameterError(
            "continue_final_message",
            True,
            "needs add_generation_prompt=false, and goes with neither tools nor chat_template_kwargs",
        )

    def encode() -> list[int]:
        num_chars = _num_chars([messages, tools, variables])
        _check_chars(serving, num_chars, may_be_longer=may_be_longer)
        plain = for_template(messages, tokenizer.chat_template or "")
        if continue_final_message:
            return encode_continued(tokenizer, plain)
        return encode_chat(
            tokenizer, plain, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )

    ids = await asyncio.to_thread(encode)  # a template is a program, however short the messages are
    return tokenizer.encode("", add_special_tokens=True) + ids if add_special_tokens else ids


def check_prompt_logprobs(prompts: Sequence[EncodedPrompt], params: SamplingParams) -> None:
    """Raises ParameterError when there would be more than a server can tell without making others wait."""
    if params.prompt_logprobs is None:
        return
    count = sum(len(prompt.token_ids) for prompt in prompts) * (params.prompt_logprobs + 1) * params.n
    if count > MAX_PROMPT_LOGPROBS:
        why = (
            f"would be {count:,} logprobs, of all tokens of the prompt; the limit is {MAX_PROMPT_LOGPROBS:,}"
        )
        raise ParameterError("prompt_logprobs", params.prompt_logprobs, why)


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


def truncated(serving: Serving, ids: list[int], limit: int | None, params: SamplingParams) -> list[int]:
    """The last `limit` ids; with -1, as many as leave room for the answer."""
    match limit:
        case None:
            return ids
        case 0:
            raise ParameterError("truncate_prompt_tokens", 0, "leaves nothing of the prompt; -1: what fits")
        case _:
            keep = (
                max(serving.max_model_len - (params.max_tokens or 1), 1) if limit == ALL_THAT_FIT else limit
            )
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


def _num_chars(value: object) -> int:
    """Of all strings in it."""
    num_chars, left = 0, [value]
    while left:
        match left.pop():
            case str(text):
                num_chars += len(text)
            case Mapping() as fields:
                left += fields.keys()
                left += fields.values()
            case list() | tuple() as items:
                left += items
    return num_chars


def _check_chars(serving: Serving, num_chars: int, *, may_be_longer: bool) -> None:
    longest = MAX_TEXT_CHARS if may_be_longer else serving.max_model_len * serving.longest_token_bytes
    if num_chars > longest and may_be_longer:
        raise CapacityError(f"the text has {num_chars:,} characters; the limit is {longest:,}: shorten it")
    if num_chars > longest:
        raise too_long(serving.llm.config, f"the input has {num_chars:,} characters")
