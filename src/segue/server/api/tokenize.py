"""POST /tokenize and /detokenize: a text or a conversation as token ids, and back."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from segue.errors import ParameterError
from segue.server.shared.body import RequestBody, Unsupported, read_body
from segue.server.shared.encoding import LONG_TEXT_CHARS, encode_messages, encode_texts
from segue.server.shared.http_errors import fields_named
from segue.server.shared.sampling import TokenId
from segue.server.shared.serving import serving_of
from segue.server.shared.sse import json_response
from segue.server.shared.tools.calls import Tool, ToolUse

CHAT_TEMPLATE = Unsupported("templates of a request are not run; the model has its own")


class TokenizeRequest(RequestBody, kw_only=True):
    """Either `prompt` or `messages`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {"chat_template": CHAT_TEMPLATE}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="true for a prompt, false for messages")] = (
        None
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeRequest(RequestBody, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


async def tokenize(request: Request) -> Response:
    body = await read_body(request, TokenizeRequest)
    serving = serving_of(request)
    serving.check_model(body.model)
    if body.prompt is not None and body.messages is None:
        with fields_named({"text": "prompt"}):
            (ids,) = await encode_texts(
                serving,
                [body.prompt],
                add_special_tokens=body.add_special_tokens is not False,
                may_be_longer=True,
            )
    elif body.messages is not None and body.prompt is None:
        with fields_named({"text": "messages"}):
            ids = await encode_messages(
                serving,
                body.messages,
                tools=ToolUse.of(serving, body.tools, None, None).for_template,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                add_special_tokens=bool(body.add_special_tokens),
                variables=body.chat_template_kwargs,
                may_be_longer=True,
            )
    else:
        raise ParameterError("prompt", None, "give either prompt or messages")
    tokenizer = serving.llm.get_tokenizer()
    strings: list[str] | UnsetType = UNSET
    if body.return_token_strs:
        strings = await asyncio.to_thread(
            lambda: [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        )
    return json_response(
        TokenizeResponse(
            count=len(ids),
            max_model_len=serving.max_model_len,
            tokens=ids,
            token_strs=strings,
        )
    )


async def detokenize(request: Request) -> Response:
    body = await read_body(request, DetokenizeRequest)
    serving = serving_of(request)
    serving.check_model(body.model)
    tokenizer = serving.llm.get_tokenizer()
    decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    with fields_named({"token_id": "tokens"}):
        text = decode() if len(body.tokens) < LONG_TEXT_CHARS else await asyncio.to_thread(decode)
    return json_response(DetokenizeResponse(prompt=text))
