"""POST /v1/responses: OpenAI's newer form of a conversation. Text and function calls; items are kept a while.

The answer is built by its events: what is not streamed is the last event's response.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from segue.answers.outputs import Delta
from segue.answers.prompts import EncodedPrompt
from segue.server.api.response_items import GrowingItems
from segue.server.api.response_objects import (
    Completed,
    Created,
    Event,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    TextSettings,
)
from segue.server.api.response_request import ResponsesRequest
from segue.server.api.stored_items import StoredItems, stored_items_of
from segue.server.shared.body import read_body
from segue.server.shared.encoding import encode_messages
from segue.server.shared.generation import Generation
from segue.server.shared.http_errors import error_of, fields_named
from segue.server.shared.logprobs import LogprobWriter, Positions, TextOfTokens, TokenLogprob
from segue.server.shared.request_id import answer_id
from segue.server.shared.serving import Serving, serving_of
from segue.server.shared.sse import EventStream, json_when_done, named_event
from segue.server.shared.structured import check_grammar
from segue.server.shared.tools.calls import ToolUse
from segue.server.shared.usage import Usage


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
        tools = body.tool_use(serving)
        params = body.sampling_params(serving.options)
        await check_grammar(params, body.response_format, field="text.format")
        if tools.needs_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        with fields_named({"text": "input", "messages": "input", "prompt_token_ids": "input"}):
            ids = await encode_messages(serving, body.messages(stored), tools=tools.for_template)
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
            text=TextSettings(body.text_format),
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
        items = GrowingItems(self._response.output)
        logprobs: list[TokenLogprob] = []  # of tokens whose text is not told yet; a call's have no place
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


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=usage.total_tokens,
    )
