"""POST /v1/chat/completions: a conversation is answered."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from segue.answers.outputs import CompletionOutput, Delta, RequestOutput
from segue.answers.prompts import EncodedPrompt
from segue.errors import ParameterError
from segue.sample.params import SamplingParams
from segue.server.api.tokenize import CHAT_TEMPLATE
from segue.server.shared.answers import Answers
from segue.server.shared.body import Unsupported, read_body
from segue.server.shared.encoding import check_prompt_logprobs, encode_messages, truncated
from segue.server.shared.http_errors import fields_named
from segue.server.shared.logprobs import ChatLogprobs, Entry, LogprobWriter, PromptLogprob, prompt_logprobs
from segue.server.shared.options import ServerOptions
from segue.server.shared.request_id import answer_id
from segue.server.shared.sampling import IGNORED_SAMPLING, UNSUPPORTED_SAMPLING, CompletionFields, Count
from segue.server.shared.serving import SYSTEM_FINGERPRINT, Serving, serving_of
from segue.server.shared.sse import EventStream, json_when_done, until_done
from segue.server.shared.structured import check_grammar
from segue.server.shared.tools.calls import (
    CallReader,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolUse,
    calls_of,
    content_of,
)
from segue.server.shared.usage import Usage
from segue.tokens.chat import text_of


class ChatRequest(CompletionFields, kw_only=True):
    """OpenAI's fields of a chat completion, and vLLM's."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED_SAMPLING,
        "chat_template": CHAT_TEMPLATE,
        "functions": Unsupported("is OpenAI's old form; use tools", ([],)),
        "function_call": Unsupported("is OpenAI's old form; use tool_choice", ("none", "auto")),
        "modalities": Unsupported("the model writes text only", (["text"],)),
        "audio": Unsupported("the model writes text only"),
        "prediction": Unsupported("is not supported"),
        "web_search_options": Unsupported("is not supported"),
    }
    ignored: ClassVar[frozenset[str]] = IGNORED_SAMPLING | {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "include_reasoning",
        "verbosity",
    }

    messages: list[dict[str, object]]
    max_completion_tokens: Count | None = None
    """Left out: as many as fit."""
    max_tokens: Annotated[Count | None, Meta(description="the old name of max_completion_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    echo: bool | None = None
    """Begin the answer with the text of the message it continues."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, str]] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling_params(self, options: ServerOptions) -> SamplingParams:
        """Raises ParameterError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs", self.top_logprobs, "needs logprobs=true")
        self.check_stream_fields()
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        with fields_named({"max_tokens": limit, "logprobs": "top_logprobs"}):
            return self.params(
                options=options,
                max_tokens=self.answer_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                prompt_logprobs=self.prompt_logprobs,
                response_format=self.response_format,
                n=self.n,
            )


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str = SYSTEM_FINGERPRINT
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    """With `finish_reason`."""
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """What is new of the answers; the first one of each has the role."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str = SYSTEM_FINGERPRINT
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


async def create_chat_completion(request: Request) -> Response:
    body = await read_body(request, ChatRequest)
    writer = await _Writer.start(serving_of(request), body)
    if body.stream:
        return EventStream(until_done(writer.chunks()))
    return await json_when_done(request, writer.whole())


class _Writer:
    """One request's answers in the form of this endpoint."""

    def __init__(
        self, body: ChatRequest, model: str, serving: Serving, tools: ToolUse, answers: Answers
    ) -> None:
        self._body = body
        self._answers = answers
        self._tools = tools
        self._logprobs = LogprobWriter(
            serving.llm.get_tokenizer(), as_ids=bool(body.return_tokens_as_token_ids)
        )
        self._id = answer_id("chatcmpl-", body.request_id)
        self._model = model
        self._created = serving.now()

    @classmethod
    async def start(cls, serving: Serving, body: ChatRequest) -> "_Writer":
        """Raises what is wrong with the request."""
        model = serving.check_model(body.model)
        serving.check_room()
        tools = ToolUse.of(serving, body.tools, body.tool_choice, body.parallel_tool_calls)
        params = body.sampling_params(serving.options)
        await check_grammar(params, body.response_format)
        if tools.needs_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        with fields_named({"text": "messages", "prompt_token_ids": "messages"}):
            prompt = await _encode(serving, body, tools, params)
            answers = Answers(serving, [prompt], params, priority=body.priority or 0)
        return cls(body, model, serving, tools, answers)

    async def whole(self) -> ChatCompletion:
        (output,) = await self._answers.outputs()
        return await asyncio.to_thread(self._completion, output)  # there may be many logprobs

    def _completion(self, output: RequestOutput) -> ChatCompletion:
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(answer) for answer in output.outputs],
            usage=self._answers.usage,
        )
        if self._body.prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(output.prompt_logprobs) or UNSET
        if self._body.return_token_ids:
            completion.prompt_token_ids = output.prompt_token_ids
        return completion

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        content, calls = self._echo + answer.text, []
        if (reader := self._tools.reader()) is not None:
            content = content_of(reader.push(answer.text, is_last=True))
            calls = reader.calls
        message = AnswerMessage(content=content)
        if calls:
            message.content = content or None
            message.tool_calls = calls
        choice = ChatChoice(
            index=answer.index,
            message=message,
            logprobs=self._chat_logprobs(answer.token_ids, answer.logprobs),
            finish_reason=_finish_reason(str(answer.finish_reason), bool(calls)),
            stop_reason=answer.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = answer.token_ids
        return choice

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        readers = {index: self._tools.reader() for index in range(self._answers.params.n)}
        async with contextlib.aclosing(self._answers.deltas()) as deltas:
            for index in readers:
                role = MessageDelta(role="assistant", content=self._echo)
                chunk = self._chunk([ChatChunkChoice(index=index, delta=role)])
                if self._body.return_token_ids and index == 0:
                    chunk.prompt_token_ids = self._answers.prompts[0].token_ids
                yield chunk
            async for delta in deltas:
                choice = self._chunk_choice(delta, readers[delta.index])
                if choice is not None:
                    yield self._chunk([choice])
        if self._body.include_usage:
            chunk = self._chunk([])
            chunk.usage = self._answers.usage
            yield chunk

    def _chunk_choice(self, delta: Delta, reader: CallReader | None) -> ChatChunkChoice | None:
        """None when a delta has nothing to show, since its text may be part of a tool call."""
        is_last = delta.finish_reason is not None
        message = MessageDelta(content=delta.text)
        if reader is not None:
            added = reader.push(delta.text, is_last=is_last)
            message.content = content_of(added) or UNSET
            message.tool_calls = calls_of(added) or UNSET
        choice = ChatChunkChoice(
            index=delta.index, delta=message, logprobs=self._chat_logprobs(delta.token_ids, delta.logprobs)
        )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        if is_last:
            has_calls = reader is not None and bool(reader.calls)
            choice.finish_reason = _finish_reason(str(delta.finish_reason), has_calls)
            choice.stop_reason = delta.stop_reason
        has_news = message.content is not UNSET or message.tool_calls is not UNSET
        return choice if has_news or is_last or choice.logprobs or self._body.return_token_ids else None

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        usage: Usage | UnsetType | None = None if self._body.include_usage else UNSET
        if self._body.continuous_usage:
            usage = self._answers.usage
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _chat_logprobs(
        self, token_ids: Sequence[int], entries: Sequence[Entry] | None
    ) -> ChatLogprobs | None:
        if entries is None:
            return None
        return self._logprobs.chat(token_ids, entries, self._body.top_logprobs or 0)

    @property
    def _echo(self) -> str:
        """What the answer begins with, beside what the model writes."""
        if not (self._body.echo and self._body.continue_final_message):
            return ""
        return text_of(self._body.messages[-1])


async def _encode(
    serving: Serving, body: ChatRequest, tools: ToolUse, params: SamplingParams
) -> EncodedPrompt:
    variables = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        variables["documents"] = body.documents
    ids = await encode_messages(
        serving,
        body.messages,
        tools=tools.for_template,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        variables=variables,
        may_be_longer=body.truncate_prompt_tokens is not None,
    )
    prompt = EncodedPrompt(
        text=None,
        token_ids=truncated(serving, ids, body.truncate_prompt_tokens, params),
        cache_salt=body.cache_salt,
    )
    check_prompt_logprobs([prompt], params)
    return prompt


def _finish_reason(reason: str, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason == "stop" else reason
