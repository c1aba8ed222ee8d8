"""One realtime session: what each event of its client does."""

import asyncio
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Protocol, assert_never

from segue.errors import CapacityError, SegueError
from segue.server.realtime import client_events as events
from segue.server.realtime import server_events as told
from segue.server.realtime.conversation import ConversationItem, messages_of
from segue.server.realtime.event_log import EventLog
from segue.server.realtime.input_progress import InputProgress
from segue.server.realtime.live_conversation import LiveConversation
from segue.server.realtime.response import RunningResponse
from segue.server.realtime.saver import SavedSession
from segue.server.shared.encoding import LONG_TEXT_CHARS
from segue.server.shared.http_errors import HttpError
from segue.server.shared.serving import Serving
from segue.tokens.chat import Message

MAX_WAITING_CHARS = 64 << 10
"""Of input that comes while an answer is given: it is encoded all at once at the end of it."""


class Changed(Protocol):
    def __call__(self, session: "RealtimeSession", /, *, is_border: bool) -> None:
        """The session's `saved` is another one. `is_border`: more than its open input."""


class RealtimeSession:
    """Belongs to one event loop. Clients come and go; see `SessionRegistry`.

    An event is carried out whole, without waiting: its reader may be gone at any `await`. What there is to tell of it
    is put into the log together with the change; it is waited for room before.
    """

    def __init__(self, serving: Serving, session_id: str, saved: SavedSession, changed: Changed) -> None:
        self.id = session_id
        self.log = EventLog()
        self.last_used_s = time.monotonic()
        """When its client said something, or an answer ended."""
        self.idle = asyncio.Event()
        """Set while no answer is given."""
        self.idle.set()
        self._serving = serving
        self._conversation = LiveConversation(serving.llm, saved.conversation)
        self._settings = saved.settings
        self._changed = changed
        self._is_draining = False
        self._is_closed = False
        self._response: RunningResponse | None = None
        self._task: asyncio.Task[None] | None = None
        """Reads the answer."""
        self._progress = InputProgress(self._conversation, self.log, self.tell_error)

    @property
    def saved(self) -> SavedSession:
        """What is to be kept of it."""
        return SavedSession(conversation=self._conversation.state, settings=self._settings)

    def shown(self) -> told.ShownSession:
        return told.ShownSession(
            id=self.id,
            model=self._serving.model_name,
            instructions=self._conversation.state.instructions or "",
            max_output_tokens=self._settings.max_output_tokens,
            **self._settings.sampling,
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
        self._progress.close()
        if self._task is not None:
            self._task.cancel()
        if self._response is not None:
            self._response.close()
        self._conversation.close()
        self.idle.set()

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

    # --- what each event does ---------------------------------------------------------------------------------

    def _carry_out(self, event: events.AnyClientEvent) -> None:
        match event:
            case events.SessionUpdate():
                self._update(event.session)
            case events.ItemCreate():
                self._create_item(event)
            case events.ItemDelete():
                self._delete_item(event.item_id)
            case events.ItemRetrieve():
                self._retrieve_item(event.item_id)
            case events.InputTextAppend():
                self._append(event.text)
            case events.InputTextRevise():
                self._revise(event.text)
            case events.InputTextClear():
                self._clear()
            case events.InputTextCommit():
                self._commit()
            case events.ResponseCreate():
                self._respond(event.response or events.ResponseFields())
            case events.ResponseCancel():
                self._cancel(event.response_id)
            case _:
                assert_never(event)

    def _update(self, fields: events.SessionFields) -> None:
        settings = self._settings.changed(fields)
        if fields.instructions is not None:
            self._conversation.set_instructions(fields.instructions)
        self._settings = settings
        self.log.put(told.SessionUpdated(session=self.shown()))
        self._changed(self, is_border=True)

    def _create_item(self, event: events.ItemCreate) -> None:
        state, item = self._conversation.state, _item(event.item)
        match event.previous_item_id:
            case None:
                index = len(state.items)
            case "root":
                index = 0
            case item_id:
                index = state.find(item_id) + 1
        self._conversation.insert(index, item)
        self._tell_item(index)
        self._changed(self, is_border=True)

    def _delete_item(self, item_id: str) -> None:
        self._conversation.delete(self._conversation.state.find(item_id))
        self.log.put(told.ConversationItemDeleted(item_id=item_id))
        self._changed(self, is_border=True)

    def _retrieve_item(self, item_id: str) -> None:
        state = self._conversation.state
        self.log.put(told.ConversationItemRetrieved(item=state.items[state.find(item_id)].shown()))

    def _append(self, text: str) -> None:
        self._revise(self._conversation.state.input_text + text)

    def _revise(self, text: str) -> None:
        if self._conversation.is_answering and len(text) > MAX_WAITING_CHARS:
            raise CapacityError(
                f"while an answer is given, at most {MAX_WAITING_CHARS} characters of input may wait for its end: "
                "send the rest after response.done, or send response.cancel"
            )
        self._conversation.revise(text)
        self._progress.watch()
        self._changed(self, is_border=False)

    def _clear(self) -> None:
        self._conversation.clear()
        self.log.put(told.InputTextCleared())
        self._changed(self, is_border=False)

    def _commit(self) -> None:
        self._conversation.commit()
        state = self._conversation.state
        index = len(state.items) - 1
        event = told.InputTextCommitted(
            item_id=state.items[index].id, previous_item_id=state.previous_id(index)
        )
        self.log.put(event)
        self._tell_item(index)
        self._changed(self, is_border=True)

    def _tell_item(self, index: int) -> None:
        state = self._conversation.state
        for event in (told.ConversationItemAdded, told.ConversationItemDone):
            previous_id, item = state.previous_id(index), state.items[index].shown()
            self.log.put(event(previous_item_id=previous_id, item=item))

    # --- answers ----------------------------------------------------------------------------------------------

    def _respond(self, fields: events.ResponseFields) -> None:
        arrival_s = time.perf_counter()
        if self._is_draining:
            raise shutting_down()
        conversation = self._conversation
        settings = self._settings.changed(fields)
        params = settings.params()
        computed: asyncio.Future[tuple[int, int]] | None = None
        if fields.input is not None or fields.instructions is not None or fields.conversation == "none":
            becomes_item = fields.conversation != "none"
            given = conversation.respond_apart(self._messages(fields), params, becomes_item=becomes_item)
        else:
            if conversation.state.input_text and not conversation.is_answering:
                self._commit()
            if conversation.session is not None:
                computed = asyncio.ensure_future(conversation.session.progress())
                computed.add_done_callback(_ignore_error)
            given = conversation.respond(params)
        state = conversation.state
        self._response = RunningResponse(
            self.log,
            given,
            settings,
            fields.metadata,
            previous_id=state.previous_id(len(state.items)),
            computed=computed,
            seen=self._serving.metrics.request_started(params, len(given.input_ids)),
            arrival_s=arrival_s,
        )
        self.idle.clear()
        self._response.begin()
        self._task = asyncio.create_task(self._give(self._response))

    def _messages(self, fields: events.ResponseFields) -> list[Message]:
        """What the model reads for an answer that is not simply the next one."""
        state = self._conversation.state
        instructions = state.instructions if fields.instructions is None else fields.instructions or None
        items = state.items if fields.input is None else [_item(each) for each in fields.input]
        return messages_of(instructions, items)

    async def _give(self, response: RunningResponse) -> None:
        """Send an answer as it comes. Whatever happens, its end is told."""
        await response.read()
        self._response = None
        try:
            self._conversation.answered(response.item)
        except Exception as error:  # what was typed meanwhile does not fit, or the engine is gone
            self.tell_error(error)
        self._changed(self, is_border=True)
        response.end()
        self.touch()
        self.idle.set()

    def _cancel(self, response_id: str | None) -> None:
        response = self._response
        if response is None or (response_id is not None and response_id != response.id):
            raise HttpError(
                "response.cancel: no such answer is being given", code="response_cancel_not_active"
            )
        response.is_cancelled = True
        self._conversation.interrupt()


def shutting_down() -> HttpError:
    """For what is asked of a server that is about to end."""
    return HttpError(
        "the server is being shut down: try again in a moment",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        code="server_shutting_down",
        headers={"retry-after": "1", "connection": "close"},
    )


def _item(fields: events.ItemFields) -> ConversationItem:
    if fields.type != "message":
        raise HttpError(f"item.type: {fields.type!r} is not taken; only messages are", param="item.type")
    text = events.text_of(fields.content)
    if not text and fields.role != "assistant":
        raise HttpError("item.content: has no text", param="item.content")
    return ConversationItem.new(fields.role, text, fields.id)


def _ignore_error(future: "asyncio.Future[tuple[int, int]]") -> None:
    if not future.cancelled():
        future.exception()
