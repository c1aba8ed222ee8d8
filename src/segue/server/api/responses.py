"""POST /v1/responses: OpenAI's newer form of a conversation. Text and function calls; items are kept a while.

The answer is built by its events: what is not streamed is the last event's response.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from segue.answers.outputs import Delta
from segue.answers.prompts import EncodedPrompt
from segue.errors import ParameterError
from segue.sample.params import SamplingParams
from segue.server.api.response_objects import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Event,
    Failed,
    FunctionCallItem,
    FunctionTool,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    JsonObjectText,
    JsonSchemaText,
    MessageItem,
    NamedFunction,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    PlainText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    Status,
    TextDelta,
    TextDone,
    TextSettings,
)
from segue.server.api.stored_items import StoredItems, stored_items_of
from segue.server.shared.body import Unsupported, read_body
from segue.server.shared.encoding import encode_messages
from segue.server.shared.generation import Generation
from segue.server.shared.http_errors import error_of, fields_named
from segue.server.shared.logprobs import LogprobWriter, Positions, TextOfTokens, TokenLogprob
from segue.server.shared.options import ServerOptions
from segue.server.shared.request_id import answer_id
from segue.server.shared.sampling import IGNORED_SAMPLING, UNSUPPORTED_SAMPLING, Count, SamplingFields
from segue.server.shared.serving import Serving, new_id, serving_of
from segue.server.shared.sse import EventStream, json_when_done, named_event
from segue.server.shared.structured import ResponseFormat, check_grammar
from segue.server.shared.tools.calls import (
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolCallDelta,
    ToolChoice,
    ToolUse,
)
from segue.server.shared.tools.reader import Content
from segue.server.shared.usage import Usage

LOGPROBS = "message.output_text.logprobs"
"""In `include`: the answer's logprobs."""


class TextOptions(msgspec.Struct, kw_only=True):
    format: ResponseFormat | None = None
    verbosity: str | None = None
    """Without a meaning here."""


class ResponsesRequest(SamplingFields, kw_only=True):
    """OpenAI's fields of a response, and vLLM's for sampling."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED_SAMPLING,
        "previous_response_id": Unsupported("responses are not stored here; send the conversation as input"),
        "conversation": Unsupported("conversations are not stored here; send the conversation as input"),
        "background": Unsupported("is not supported", (False,)),
        "prompt": Unsupported("prompt templates are not supported; use instructions and input"),
        "truncation": Unsupported("is not supported; shorten the input", ("disabled",)),
    }
    ignored: ClassVar[frozenset[str]] = IGNORED_SAMPLING | {
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "max_tool_calls",
        "stream_options",
    }

    input: str | list[dict[str, object]]
    """A text, or messages, function calls and their outputs."""
    instructions: str | None = None
    """What the model is told first."""
    max_output_tokens: Count | None = None
    """Left out: as many as fit."""
    include: list[str] | None = None
    top_logprobs: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    """Unless false, the items of the answer are kept for `item_reference`."""
    text: TextOptions | None = None

    def sampling_params(self, options: ServerOptions) -> SamplingParams:
        """Raises ParameterError."""
        wants_logprobs = LOGPROBS in (self.include or ())
        with fields_named({"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}):
            return self.params(
                options=options,
                max_tokens=self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
                response_format=None if self.text is None else self.text.format,
            )


# --- the endpoint ---------------------------------------------------------------------------------------------


async def create_response(request: Request) -> Response:
    body = await read_body(request, ResponsesRequest)
    writer = await _ResponseWriter.start(serving_of(request), body, stored_items_of(request))
    if body.stream:
        return EventStream(writer.stream())
    return await json_when_done(request, writer.whole())


class _ResponseWriter:
    """One request's answer in the form of this endpoint."""

    def __init__(
        self,
        body: ResponsesRequest,
        response: ResponseObject,
        serving: Serving,
        stored: StoredItems,
        tools: ToolUse,
        generation: Generation,
    ) -> None:
        self._body = body
        self._generation = generation
        self._stored = stored
        self._response = response
        self._logprobs = LogprobWriter(serving.llm.get_tokenizer(), as_ids=False)
        self._reader = tools.reader()
        self._texts: TextOfTokens | None = None
        if tools.format is not None and generation.params.logprobs is not None:
            tokenizer = serving.llm.get_tokenizer()
            hidden = tokenizer.special_ids if generation.params.skip_special_tokens else ()
            self._texts = TextOfTokens(Positions(tokenizer, 0, hidden=hidden))
        self._num_events = 0

    @classmethod
    async def start(cls, serving: Serving, body: ResponsesRequest, stored: StoredItems) -> "_ResponseWriter":
        """Raises what is wrong with the request."""
        model = serving.check_model(body.model)
        serving.check_room()
        tools = _tool_use(serving, body)
        params = body.sampling_params(serving.options)
        await check_grammar(params, None if body.text is None else body.text.format, field="text.format")
        if tools.needs_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        with fields_named({"text": "input", "messages": "input", "prompt_token_ids": "input"}):
            ids = await encode_messages(serving, _messages(body, stored), tools=tools.for_template)
            prompt = EncodedPrompt(text=None, token_ids=ids, scope=body.scope)
            generation = Generation(serving, [prompt], params, priority=body.priority or 0)
        response = ResponseObject(
            id=answer_id("resp_", body.request_id),
            created_at=serving.now(),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            store=body.store is not False,
            temperature=params.temperature,
            text=TextSettings(_text_format(body.text)),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=params.top_p,
        )
        return cls(body, response, serving, stored, tools, generation)

    async def whole(self) -> ResponseObject:
        async with contextlib.aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """An error becomes the response's."""
        async with contextlib.aclosing(self._events()) as events:
            try:
                async for event in events:
                    yield self._encode(event)
            except Exception as error:
                status, body = error_of(error)
                self._response.status = "failed"
                for item in self._response.output:
                    if item.status == "in_progress":
                        item.status = "incomplete"
                self._response.error = ResponseError(
                    code=body.error.code or ("server_error" if status >= 500 else "invalid_prompt"),
                    message=body.error.message,
                )
                yield self._encode(Failed(response=self._response))

    def _encode(self, event: Event) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        name = type(event).__struct_config__.tag
        assert isinstance(name, str)
        return named_event(name, event)

    async def _events(self) -> AsyncGenerator[Event, None]:
        yield Created(response=self._response)
        yield InProgress(response=self._response)
        items = _Items(self._response.output)
        logprobs: list[
            TokenLogprob
        ] = []  # of tokens whose text is no message's so far; a call's have no place
        async with contextlib.aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                for text, more, is_last in self._parts(delta):
                    logprobs = logprobs + more
                    for each in self._reader.push(text, is_last=is_last):
                        for event in items.add(each, logprobs):
                            yield event
                        logprobs = []
                if delta.finish_reason is not None:
                    is_complete = delta.finish_reason == "stop"
                    for event in items.finish("completed" if is_complete else "incomplete", logprobs):
                        yield event
                    yield self._end(delta)

    def _end(self, last: Delta) -> ResponseEvent:
        response = self._response
        response.usage = _usage(self._generation.usage)
        if response.store:
            for item in response.output:
                self._stored.keep(item)
        if last.finish_reason == "stop":
            response.status = "completed"
            return Completed(response=response)
        response.status = "incomplete"
        reason = "max_output_tokens" if last.finish_reason == "length" else str(last.finish_reason)
        response.incomplete_details = IncompleteDetails(reason=reason)
        return Incomplete(response=response)

    def _parts(self, delta: Delta) -> Iterator[tuple[str, list[TokenLogprob], bool]]:
        """Texts, what goes with each, and whether it is the last; token by token where calls must be told from text."""
        is_last = delta.finish_reason is not None
        logprobs: list[TokenLogprob] = []
        if delta.logprobs is not None:
            num_top = self._body.top_logprobs or 0
            logprobs = self._logprobs.chat(delta.token_ids, delta.logprobs, num_top).content
        if self._texts is None:
            yield delta.text, logprobs, is_last
            return
        for text, more in self._texts.push(delta.text, delta.token_ids, logprobs, is_last=is_last):
            yield text, more, False
        if is_last:
            yield "", [], True


class _Items:
    """Grows the items of a response, the last of which is open, and tells by which events."""

    def __init__(self, items: list[OutputItem]) -> None:
        self._items = items
        self._is_open = False

    def add(self, added: Content | ToolCallDelta, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        match added:
            case Content():
                if not self._is_open or not isinstance(self._items[-1], MessageItem):
                    yield from self._open(MessageItem(id=new_id("msg_")))
                if added.text or logprobs:
                    yield self._add_text(added.text, logprobs)
            case ToolCallDelta():
                function = added.function
                if isinstance(added.id, str) and isinstance(function.name, str):
                    item = FunctionCallItem(id=new_id("fc_"), call_id=added.id, name=function.name)
                    yield from self._open(item)
                if isinstance(function.arguments, str) and function.arguments:
                    yield self._add_arguments(function.arguments)

    def finish(self, status: Status, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        """Closes the last item; an answer without any becomes an empty message. `logprobs`: of tokens without text."""
        if not self._items or (logprobs and isinstance(self._items[-1], MessageItem)):
            yield from self.add(Content(""), logprobs)
        yield from self._close(status)

    def _open(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self._items.append(item)
        self._is_open = True
        yield ItemAdded(output_index=self._index, item=item)
        if isinstance(item, MessageItem):
            part = OutputText()
            item.content.append(part)
            yield PartAdded(item_id=item.id, output_index=self._index, part=part)

    def _close(self, status: Status) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item, index = self._items[-1], self._index
        item.status = status
        match item:
            case MessageItem():
                (part,) = item.content
                yield TextDone(item_id=item.id, output_index=index, text=part.text, logprobs=part.logprobs)
                yield PartDone(item_id=item.id, output_index=index, part=part)
            case FunctionCallItem():
                yield ArgumentsDone(
                    item_id=item.id, output_index=index, name=item.name, arguments=item.arguments
                )
        yield ItemDone(output_index=index, item=item)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _add_text(self, text: str, logprobs: list[TokenLogprob]) -> Event:
        item = self._items[-1]
        assert isinstance(item, MessageItem)
        (part,) = item.content
        part.text += text
        part.logprobs += logprobs
        return TextDelta(item_id=item.id, output_index=self._index, delta=text, logprobs=logprobs)

    def _add_arguments(self, text: str) -> Event:
        item = self._items[-1]
        assert isinstance(item, FunctionCallItem)
        item.arguments += text
        return ArgumentsDelta(item_id=item.id, output_index=self._index, delta=text)


# --- the request ----------------------------------------------------------------------------------------------


def _tool_use(serving: Serving, body: ResponsesRequest) -> ToolUse:
    tools = [
        Tool(
            type="function",
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in body.tools or ()
    ]
    choice: ToolChoice | None
    if isinstance(body.tool_choice, NamedFunction):
        choice = NamedToolChoice(type="function", function=FunctionName(name=body.tool_choice.name))
    else:
        choice = body.tool_choice
    return ToolUse.of(serving, tools, choice, body.parallel_tool_calls)


def _text_format(options: TextOptions | None) -> PlainText | JsonObjectText | JsonSchemaText:
    """What was asked for, as a response says it."""
    asked = None if options is None else options.format
    if asked is None or asked.type == "text":
        return PlainText()
    given = asked if asked.json_schema is None else asked.json_schema
    if asked.type == "json_schema" and given.schema is not None:
        return JsonSchemaText(
            name=given.name, schema=given.schema, description=given.description, strict=given.strict
        )
    return JsonObjectText(schema=msgspec.UNSET if given.schema is None else given.schema)


def _messages(body: ResponsesRequest, stored: StoredItems) -> list[dict[str, Any]]:
    """The input as chat messages. Raises ParameterError."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for i, given in enumerate(body.input):
        match item := _resolved(i, given, stored):
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(i, output)})
            case {"type": "reasoning"}:
                pass
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                messages.append({"role": role, "content": _text(i, content)})
            case _:
                raise ParameterError(
                    "input", _kind(item), f"item {i} is no message, function call or output of one"
                )
    return messages


def _resolved(i: int, item: dict[str, object], stored: StoredItems) -> dict[str, object]:
    """An item, or the one that it refers to."""
    match item:
        case {"type": "item_reference", "id": str(item_id)}:
            found = stored.find(item_id)
            if found is None:
                raise ParameterError(
                    "input",
                    item_id[:60],
                    f"item {i} refers to an item that is not kept here (any more): send the item itself, as "
                    "clients do that are told store=false",
                )
            return found
        case _:
            return item


def _text(i: int, content: object) -> str:
    """The text of a message's content, or of a function's output."""
    if isinstance(content, str):
        return content
    parts: Sequence[object] = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise ParameterError("input", _kind(part), f"item {i} has a part that is not text")
    return "\n".join(texts)


def _kind(item: object) -> str:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return kind[:60] if isinstance(kind, str) else type(item).__name__


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=usage.total_tokens,
    )
