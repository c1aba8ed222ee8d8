"""One realtime session: what each event does to its conversation, and the answer that is being given."""

import asyncio
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from segue.answers.outputs import CompletionOutput, RequestOutput, RequestTimes
from segue.contract.reports import FinishReason, RequestMetrics
from segue.errors import CapacityError, ParameterError, SegueError
from segue.sample.params import SamplingParams
from segue.server.realtime import client_events as events
from segue.server.realtime import server_events as told
from segue.server.realtime.conversation import Conversation, ConversationState, Item
from segue.server.realtime.event_log import EventLog
from segue.server.shared.encoding import LONG_TEXT_CHARS
from segue.server.shared.http_errors import HttpError, error_of
from segue.server.shared.metrics import RequestSeen
from segue.server.shared.serving import Serving, new_id
from segue.session.live import Answer, Session

PROGRESS_S = 0.03
"""How often it is looked how much of the input is computed."""
MAX_WAITING_CHARS = 64 << 10
"""Of input that comes while an answer is given: it is encoded all at once at the end of it."""


class Settings(msgspec.Struct, kw_only=True):
    """How a session's answers are sampled, in OpenAI's words."""

    max_output_tokens: int | str = "inf"
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    """Those of `SamplingSettings` that were set."""

    def changed(self, fields: events.SessionFields) -> "Settings":
        """With what is given there. Raises ParameterError, HttpError."""
        _refuse_what_is_not_here(fields)
        longest = self.max_output_tokens if fields.max_output_tokens is None else fields.max_output_tokens
        settings = Settings(max_output_tokens=longest, sampling={**self.sampling, **fields.sampling()})
        settings.params()
        return settings

    def params(self) -> SamplingParams:
        longest = None if isinstance(self.max_output_tokens, str) else self.max_output_tokens
        try:
            return SamplingParams(max_tokens=longest, **self.sampling)
        except ParameterError as error:
            if error.parameter != "max_tokens":
                raise
            raise ParameterError("max_output_tokens", error.value, error.why) from None


class SessionState(msgspec.Struct, kw_only=True):
    """What is kept of a session on disk."""

    conversation: ConversationState
    settings: Settings = msgspec.field(default_factory=Settings)


class Changed(Protocol):
    def __call__(self, session: "RealtimeSession", /, *, is_border: bool) -> None:
        """The session's `state` is another one. `is_border`: more than its open input."""


class _Response(msgspec.Struct, eq=False, kw_only=True):
    """An answer that is being given."""

    id: str
    item: Item
    previous_id: str | None
    answer: Answer
    settings: Settings
    metadata: dict[str, str] | None
    input_ids: list[int]
    computed: "asyncio.Future[tuple[int, int]] | None"
    """How much of the input was there before the answer was asked for."""
    seen: RequestSeen
    arrival_s: float
    apart: Session | None
    """Its own session, if it is not the conversation's."""
    records: bool
    is_cancelled: bool = False
    token_times_s: list[float] = msgspec.field(default_factory=list)
    """When the first token came, and the last."""

    def shown(
        self,
        status: told.Status = "in_progress",
        *,
        status_details: told.StatusDetails | None = None,
        output: Sequence[told.ShownItem] = (),
        usage: told.Usage | None = None,
    ) -> told.ShownResponse:
        return told.ShownResponse(
            id=self.id,
            status=status,
            status_details=status_details,
            output=[*output],
            max_output_tokens=self.settings.max_output_tokens,
            metadata=self.metadata,
            usage=usage,
        )

    def took(self, now_s: float) -> None:
        self.token_times_s = [*self.token_times_s[:1], now_s]

    @property
    def num_cached_tokens(self) -> int:
        """As far as the engine has said it."""
        computed = self.computed
        if computed is None or not computed.done() or computed.cancelled() or computed.exception():
            return 0
        return min(computed.result()[1], len(self.input_ids))

    def measured(self, output: CompletionOutput) -> RequestOutput:
        """As the metrics take it."""
        first_s = self.token_times_s[0] if self.token_times_s else None
        last_s = self.token_times_s[-1] if self.token_times_s else None
        return RequestOutput(
            request_id=self.id,
            prompt=None,
            prompt_token_ids=self.input_ids,
            outputs=[output],
            finished=True,
            metrics=RequestMetrics(),
            times=RequestTimes(arrival_s=self.arrival_s, first_token_s=first_s, last_token_s=last_s),
            num_cached_tokens=self.num_cached_tokens,
        )


class RealtimeSession:
    """Belongs to one event loop. Clients come and go; see `SessionRegistry`.

    An event is carried out whole, without waiting: its reader may be gone at any `await`. What there is to tell of it
    is put into the log together with the change; it is waited for room before.
    """

    def __init__(self, serving: Serving, session_id: str, state: SessionState, changed: Changed) -> None:
        self.id = session_id
        self.log = EventLog()
        self.conversation = Conversation(serving.llm, state.conversation)
        self.state = state
        """Changed in place."""
        self.last_used_s = time.monotonic()
        """When its client said something, or an answer ended."""
        self.idle = asyncio.Event()
        """Set while no answer is given."""
        self.idle.set()
        self._serving = serving
        self._changed = changed
        self._is_draining = False
        self._is_closed = False
        self._response: _Response | None = None
        self._task: asyncio.Task[None] | None = None
        """Reads the answer."""
        self._progress: asyncio.Task[None] | None = None
        """Tells how much of the input is computed."""
        self._input_changed = False
        """Since it was looked at last."""

    def shown(self) -> told.ShownSession:
        return told.ShownSession(
            id=self.id,
            model=self._serving.model_name,
            instructions=self.conversation.state.instructions or "",
            max_output_tokens=self.state.settings.max_output_tokens,
            **self.state.settings.sampling,
        )

    def touch(self) -> None:
        """Somebody is here."""
        self.last_used_s = time.monotonic()

    def drain(self) -> None:
        """No more answers; one that is being given goes on."""
        self._is_draining = True

    def close(self) -> None:
        """End it, with the answer that runs."""
        self._is_closed = True
        for task in (self._task, self._progress):
            if task is not None:
                task.cancel()
        if self._response is not None:
            self._response.seen.close()
            if self._response.apart is not None:
                self._response.apart.close()
        self.conversation.close()
        self.idle.set()

    # --- events -----------------------------------------------------------------------------------------------

    async def receive(self, data: str) -> None:
        """Carry out an event. What is wrong with it is told in an `error` event."""
        await self.log.room()
        self.touch()
        event_id: str | None = None
        try:
            try:
                event = events.read_client_event(data)
            except SegueError:
                event_id = events.event_id_of(data)
                raise
            event_id = event.event_id
            await self._check_length(events.texts_of(event))
            if not self._is_closed:
                self._carry_out(event)
        except Exception as error:
            self.tell_error(error, event_id)

    def tell_error(self, error: Exception, event_id: str | None = None) -> None:
        """An `error` event; `event_id` is that of the event that was wrong."""
        self.log.put(told.error_event(error, event_id))

    async def _check_length(self, texts: Sequence[str]) -> None:
        """Refuse what never fits before the event loop encodes it. Raises CapacityError."""
        num_chars = sum(map(len, texts))
        if num_chars < LONG_TEXT_CHARS:
            return
        limit = self._serving.max_model_len
        if num_chars <= limit * self._serving.longest_token_bytes:
            encode = self._serving.llm.get_tokenizer().encode
            num_tokens = sum([len(await asyncio.to_thread(encode, text)) for text in texts])
            if num_tokens <= limit:
                return
        raise CapacityError(
            f"the event has {num_chars} characters, more than fit into max_model_len={limit} tokens: "
            "shorten the text"
        )

    def _carry_out(self, event: events.AnyClientEvent) -> None:
        conversation = self.conversation
        match event:
            case events.SessionUpdate():
                self._update(event.session)
            case events.ItemCreate():
                self._create_item(event)
            case events.ItemDelete():
                conversation.delete(conversation.find(event.item_id))
                self.log.put(told.ConversationItemDeleted(item_id=event.item_id))
            case events.ItemRetrieve():
                item = conversation.state.items[conversation.find(event.item_id)]
                self.log.put(told.ConversationItemRetrieved(item=item.shown()))
                return
            case events.ResponseCreate():
                self._respond(event.response or events.ResponseFields())
                return
            case events.ResponseCancel():
                self._cancel(event.response_id)
                return
            case events.InputTextAppend():
                self._check_waiting(conversation.state.input_text, event.text)
                conversation.append(event.text)
                self._watch_input()
            case events.InputTextRevise():
                self._check_waiting(event.text)
                conversation.revise(event.text)
                self._watch_input()
            case events.InputTextClear():
                conversation.clear()
                self.log.put(told.InputTextCleared())
            case events.InputTextCommit():
                self._commit()
        is_input = isinstance(event, events.InputTextAppend | events.InputTextRevise | events.InputTextClear)
        self._changed(self, is_border=not is_input)

    def _update(self, fields: events.SessionFields) -> None:
        settings = self.state.settings.changed(fields)
        if fields.instructions is not None:
            self.conversation.set_instructions(fields.instructions)
        self.state.settings = settings
        self.log.put(told.SessionUpdated(session=self.shown()))

    def _create_item(self, event: events.ItemCreate) -> None:
        conversation = self.conversation
        item = _item(event.item)
        match event.previous_item_id:
            case None:
                index = len(conversation.state.items)
            case "root":
                index = 0
            case item_id:
                index = conversation.find(item_id) + 1
        conversation.insert(index, item)
        self._tell_item(item, conversation.previous_id(index))

    def _tell_item(self, item: Item, previous_id: str | None) -> None:
        for event in (told.ConversationItemAdded, told.ConversationItemDone):
            self.log.put(event(previous_item_id=previous_id, item=item.shown()))

    def _commit(self) -> None:
        item = self.conversation.commit()
        previous_id = self.conversation.previous_id(len(self.conversation.state.items) - 1)
        self.log.put(told.InputTextCommitted(item_id=item.id, previous_item_id=previous_id))
        self._tell_item(item, previous_id)

    def _check_waiting(self, *texts: str) -> None:
        if self.conversation.is_answering and sum(map(len, texts)) > MAX_WAITING_CHARS:
            raise CapacityError(
                f"while an answer is given, at most {MAX_WAITING_CHARS} characters of input may wait for its end: "
                "send the rest after response.done, or send response.cancel"
            )

    # --- answers ----------------------------------------------------------------------------------------------

    def _respond(self, fields: events.ResponseFields) -> None:
        arrival_s = time.perf_counter()
        if self._is_draining:
            raise shutting_down()
        conversation = self.conversation
        settings = self.state.settings.changed(fields)
        params = settings.params()
        is_apart = (
            fields.input is not None or fields.instructions is not None or fields.conversation == "none"
        )
        if conversation.state.input_text and not is_apart and not conversation.is_answering:
            self._commit()
            self._changed(self, is_border=True)
        apart: Session | None = None
        computed: asyncio.Future[tuple[int, int]] | None = None
        records = fields.conversation != "none"
        if is_apart:
            apart, answer = conversation.respond_apart(self._messages(fields), params, records=records)
        else:
            if conversation.live is not None:
                computed = asyncio.ensure_future(conversation.live.progress())
                computed.add_done_callback(_ignore_error)
            answer = conversation.respond(params)
        session = apart or conversation.live
        assert session is not None
        input_ids = session.token_ids
        response = self._response = _Response(
            id=new_id("resp_"),
            item=Item.new("assistant", ""),
            previous_id=conversation.previous_id(len(conversation.state.items)),
            answer=answer,
            settings=settings,
            metadata=fields.metadata,
            input_ids=input_ids,
            computed=computed,
            seen=self._serving.metrics.request_started(params, len(input_ids)),
            arrival_s=arrival_s,
            apart=apart,
            records=records,
        )
        self.idle.clear()
        self._tell_begin(response)
        self._task = asyncio.create_task(self._give(response))

    def _messages(self, fields: events.ResponseFields) -> Sequence[dict[str, object]]:
        """What the model reads for an answer that is not simply the next one."""
        messages = [dict(message) for message in self.conversation.messages()]
        if fields.input is not None:
            head = messages[:1] if self.conversation.state.instructions else []
            messages = head + [dict(_item(each).message) for each in fields.input]
        if fields.instructions is not None:
            messages = messages[1:] if self.conversation.state.instructions else messages
            if fields.instructions:
                messages = [{"role": "system", "content": fields.instructions}, *messages]
        return messages

    def _cancel(self, response_id: str | None) -> None:
        response = self._response
        if response is None or (response_id is not None and response_id != response.id):
            raise HttpError(
                "response.cancel: no such answer is being given", code="response_cancel_not_active"
            )
        response.is_cancelled = True
        self.conversation.interrupt(response.apart)

    async def _give(self, response: _Response) -> None:
        """Send an answer as it comes."""
        error: Exception | None = None
        try:
            async for delta in response.answer:
                now_s = time.perf_counter()
                if delta.token_ids:
                    response.took(now_s)
                response.seen.took(delta, now_s)
                if delta.text:
                    await self.log.add(
                        told.OutputTextDelta(
                            response_id=response.id, item_id=response.item.id, delta=delta.text
                        )
                    )
        except Exception as caught:
            error = caught
        self._end(response, error)

    def _end(self, response: _Response, error: Exception | None) -> None:
        """The answer is over; whatever happens, this is told."""
        output = response.answer.delivered(FinishReason.ABORT if response.is_cancelled else None)
        response.item.is_complete = error is None and output.finish_reason is FinishReason.STOP
        self._response = None
        try:
            self.conversation.answered(response.item, output, response.apart)
        except Exception as caught:  # what was typed meanwhile does not fit, or the engine is gone
            self.tell_error(caught)
        self._changed(self, is_border=True)
        self._tell_end(response, output, error)
        if error is None:
            response.seen.ended(response.measured(output))
        else:
            response.seen.failed()
        self.touch()
        self.idle.set()

    def _tell_begin(self, response: _Response) -> None:
        id, item_id, item = response.id, response.item.id, response.item.shown(is_begun=True)
        self.log.put(told.ResponseCreated(response=response.shown()))
        self.log.put(told.OutputItemAdded(response_id=id, item=item))
        if response.records:
            self.log.put(told.ConversationItemAdded(previous_item_id=response.previous_id, item=item))
        part = told.ShownText("text", "")
        self.log.put(told.ContentPartAdded(response_id=id, item_id=item_id, part=part))

    def _tell_end(self, response: _Response, output: CompletionOutput, error: Exception | None) -> None:
        id, item_id, item = response.id, response.item.id, response.item.shown()
        part = told.ShownText("text", output.text)
        self.log.put(told.OutputTextDone(response_id=id, item_id=item_id, text=output.text))
        self.log.put(told.ContentPartDone(response_id=id, item_id=item_id, part=part))
        self.log.put(told.OutputItemDone(response_id=id, item=item))
        if response.records:
            self.log.put(told.ConversationItemDone(previous_item_id=response.previous_id, item=item))
        status, details = _status(response, output, error)
        num_input, num_output = len(response.input_ids), len(output.token_ids)
        usage = told.Usage(
            total_tokens=num_input + num_output,
            input_tokens=num_input,
            output_tokens=num_output,
            input_token_details=told.InputTokenDetails(
                text_tokens=num_input, cached_tokens=response.num_cached_tokens
            ),
            output_token_details=told.OutputTokenDetails(text_tokens=num_output),
        )
        shown = response.shown(status, status_details=details, output=[item], usage=usage)
        self.log.put(told.ResponseDone(response=shown))

    # --- input ------------------------------------------------------------------------------------------------

    def _watch_input(self) -> None:
        self._input_changed = True
        if self._progress is None or self._progress.done():
            self._progress = asyncio.create_task(self._tell_progress())

    async def _tell_progress(self) -> None:
        """Say how much of the input is computed, until all of it is."""
        last = (-1, -1)
        while True:
            self._input_changed = False
            session = self.conversation.live
            if session is None or session.is_answering:
                return
            try:
                num_tokens, num_computed = await session.progress()
            except SegueError as error:
                self.tell_error(error)
                return
            # The last token is left for the step that samples; a few more may change with what follows.
            if (num_tokens, num_computed) != last:
                last = (num_tokens, num_computed)
                await self.log.add(told.InputTextProgress(num_tokens=num_tokens, num_computed=num_computed))
            if num_computed >= num_tokens - 1 and not self._input_changed:
                return
            await asyncio.sleep(PROGRESS_S)


def shutting_down() -> HttpError:
    """For what is asked of a server that is about to end."""
    return HttpError(
        "the server is being shut down: try again in a moment",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        code="server_shutting_down",
        headers={"retry-after": "1", "connection": "close"},
    )


def _refuse_what_is_not_here(fields: events.SessionFields) -> None:
    """Raises HttpError for settings that ask for more than text."""
    where = "response" if isinstance(fields, events.ResponseFields) else "session"
    for name, new in (
        ("modalities", "output_modalities"),
        ("max_response_output_tokens", "max_output_tokens"),
    ):
        if getattr(fields, name) is not None:
            raise HttpError(
                f"{where}.{name}: is of the beta interface, which this server does not have; use {new}",
                param=f"{where}.{name}",
                code="beta_api_shape_disabled",
            )
    if fields.type not in (None, "realtime"):
        raise HttpError('session.type: this server has "realtime" only', param="session.type")
    if fields.output_modalities not in (None, [*told.TEXT_ONLY]):
        raise HttpError(
            f'{where}.output_modalities: this server gives text; set it to ["text"]',
            param=f"{where}.output_modalities",
        )
    if fields.tools:
        raise HttpError("tools: not in a realtime session; use /v1/chat/completions", param="tools")


def _item(fields: events.ItemFields) -> Item:
    if fields.type != "message":
        raise HttpError(f"item.type: {fields.type!r} is not taken; only messages are", param="item.type")
    text = events.text_of(fields.content)
    if not text and fields.role != "assistant":
        raise HttpError("item.content: has no text", param="item.content")
    return Item.new(fields.role, text, fields.id)


def _status(
    response: _Response, output: CompletionOutput, error: Exception | None
) -> tuple[told.Status, told.StatusDetails | None]:
    if error is not None:
        return "failed", told.StatusDetails(type="failed", error=error_of(error)[1].error)
    if response.is_cancelled:
        return "cancelled", told.StatusDetails(type="cancelled", reason="client_cancelled")
    if output.finish_reason is FinishReason.LENGTH:
        return "incomplete", told.StatusDetails(type="incomplete", reason="max_output_tokens")
    return "completed", None


def _ignore_error(future: "asyncio.Future[tuple[int, int]]") -> None:
    if not future.cancelled():
        future.exception()
