"""POST /v1/chat/completions: a conversation is answered."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from segue.answers.outputs import Delta
from segue.answers.prompts import EncodedPrompt
from segue.errors import ParameterError
from segue.sample.params import SamplingParams
from segue.server.api.chunks import ChunkWriter, extended
from segue.server.api.tokenize import CHAT_TEMPLATE
from segue.server.shared.body import Unsupported, read_body
from segue.server.shared.encoding import check_prompt_logprobs, encode_messages, truncated
from segue.server.shared.generation import Generation
from segue.server.shared.http_errors import fields_named
from segue.server.shared.logprobs import ChatLogprobs, PromptLogprob, prompt_logprobs
from segue.server.shared.options import ServerOptions
from segue.server.shared.sampling import IGNORED_SAMPLING, UNSUPPORTED_SAMPLING, CompletionFields, Count
from segue.server.shared.serving import SYSTEM_FINGERPRINT, Serving, serving_of
from segue.server.shared.sse import EventStream, json_when_done, until_done
from segue.server.shared.structured import check_grammar
from segue.server.shared.tools.calls import (
    FunctionCall,
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
    choices: Sequence[ChatChunkChoice]
    system_fingerprint: str = SYSTEM_FINGERPRINT
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET

    def add(self, new: MessageDelta) -> None:
        if new.content:
            self.content = (self.content or "") + new.content
        for call in new.tool_calls or ():
            self._add_call(call)

    def _add_call(self, new: ToolCallDelta) -> None:
        """Beside calls, no content is null."""
        self.content = self.content or None
        if self.tool_calls is UNSET:
            self.tool_calls = []
        if new.id is not UNSET:
            self.tool_calls.append(ToolCall(id=new.id, function=FunctionCall(name="", arguments="")))
        function = self.tool_calls[new.index].function
        function.name += new.function.name or ""
        function.arguments += new.function.arguments or ""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET

    @classmethod
    def empty(cls, index: int) -> "ChatChoice":
        message = AnswerMessage(content="")
        return cls(index=index, message=message, logprobs=None, finish_reason="", stop_reason=None)

    def add(self, new: ChatChunkChoice) -> None:
        self.message.add(new.delta)
        if self.logprobs is None:
            self.logprobs = new.logprobs
        elif new.logprobs is not None:
            self.logprobs.content.extend(new.logprobs.content)
        if new.finish_reason is not None:
            self.finish_reason = new.finish_reason
            self.stop_reason = None if new.stop_reason is UNSET else new.stop_reason
        self.token_ids = extended(self.token_ids, new.token_ids)


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

    def add(self, chunk: ChatChunk) -> None:
        for choice in chunk.choices:
            self.choices[choice.index].add(choice)
        self.usage = chunk.usage or self.usage
        self.prompt_token_ids = chunk.prompt_token_ids or self.prompt_token_ids


async def create_chat_completion(request: Request) -> Response:
    body = await read_body(request, ChatRequest)
    writer = await _ChatWriter.start(serving_of(request), body)
    if body.stream:
        return EventStream(until_done(writer.chunks()))
    return await json_when_done(request, writer.whole())


class _ChatWriter(ChunkWriter[ChatChunkChoice, ChatChunk]):
    def __init__(
        self, serving: Serving, body: ChatRequest, model: str, tools: ToolUse, generation: Generation
    ) -> None:
        super().__init__(serving, body, model, generation, id_prefix="chatcmpl-")
        self._body = body
        self._readers = [tools.reader() for _ in range(generation.params.n)]

    @classmethod
    async def start(cls, serving: Serving, body: ChatRequest) -> "_ChatWriter":
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
            generation = Generation(serving, [prompt], params, priority=body.priority or 0)
        return cls(serving, body, model, tools, generation)

    async def whole(self) -> ChatCompletion:
        indices = range(self._generation.params.n)
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[ChatChoice.empty(index) for index in indices],
            usage=self._usage,
        )
        await self.add_to(completion.add)
        if self._body.prompt_logprobs is not None:  # which are not streamed, and may be many
            entries = self._generation.prompt_logprobs(0)
            completion.prompt_logprobs = await asyncio.to_thread(prompt_logprobs, entries)
        return completion

    def _first_chunks(self) -> Iterator[ChatChunk]:
        for index in range(self._generation.params.n):
            role = MessageDelta(role="assistant", content=self._echo)
            chunk = self._chunk([ChatChunkChoice(index=index, delta=role)], self._usage_so_far)
            if self._body.return_token_ids and index == 0:
                chunk.prompt_token_ids = self._generation.prompts[0].token_ids
            yield chunk

    async def _choice(self, delta: Delta) -> ChatChunkChoice | None:
        """None when a delta has nothing to show, since its text may be part of a tool call."""
        reader = self._readers[delta.index]
        is_last = delta.finish_reason is not None
        added = reader.push(delta.text, is_last=is_last)
        message = MessageDelta(content=content_of(added), tool_calls=calls_of(added))
        choice = ChatChunkChoice(index=delta.index, delta=message)
        if delta.logprobs is not None:
            choice.logprobs = self._logprobs.chat(
                delta.token_ids, delta.logprobs, self._body.top_logprobs or 0
            )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        if is_last:
            stopped_to_call = bool(reader.names) and delta.finish_reason == "stop"
            choice.finish_reason = "tool_calls" if stopped_to_call else str(delta.finish_reason)
            choice.stop_reason = delta.stop_reason
        has_news = message.content is not UNSET or message.tool_calls is not UNSET
        return choice if has_news or is_last or choice.logprobs or self._body.return_token_ids else None

    def _chunk(self, choices: Sequence[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

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
        scope=body.scope,
    )
    check_prompt_logprobs([prompt], params)
    return prompt
