"""One realtime session: what each event does to its conversation, and the answer that is being given."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from segue.engine.outputs import FinishReason
from segue.errors import ParameterError, UsageError
from segue.outputs import CompletionOutput
from segue.sample.params import SamplingParams
from segue.server.errors import HttpError, error_of
from segue.server.realtime import client_events as events
from segue.server.realtime.conversation import Conversation, ConversationState, Item
from segue.server.realtime.event_log import EventLog
from segue.server.serving import Serving, new_id
from segue.session.live import Answer, Session

log = logging.getLogger("segue.server")

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
NEUTRAL_MODALITIES = ["text"]
PROGRESS_S = 0.03
"""How often it is looked how much of the input is computed."""


class Settings(msgspec.Struct, kw_only=True):
    """How a session's answers are sampled, in OpenAI's words."""

    max_output_tokens: int | str = "inf"
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    """Those of SAMPLING_FIELDS that were set."""

    def changed(self, fields: events.SessionFields) -> "Settings":
        """With what is given there. Raises ParameterError, HttpError."""
        if fields.output_modalities not in (msgspec.UNSET, NEUTRAL_MODALITIES):
            raise HttpError(
                'output_modalities: this server gives text; set it to ["text"]',
                param="session.output_modalities",
            )
        if fields.tools not in (msgspec.UNSET, []):
            raise HttpError("tools: not in a realtime session; use /v1/chat/completions", param="tools")
        sampling = dict(self.sampling)
        for name in SAMPLING_FIELDS:
            value = getattr(fields, name)
            if value is not msgspec.UNSET:
                sampling[name] = value
        longest: int | str = self.max_output_tokens
        if fields.max_output_tokens is not msgspec.UNSET:
            longest = "inf" if fields.max_output_tokens is None else fields.max_output_tokens
        settings = Settings(max_output_tokens=longest, sampling=sampling)
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


class _Response(msgspec.Struct, eq=False, kw_only=True):
    """An answer that is being given."""

    id: str
    item: Item
    answer: Answer
    settings: Settings
    metadata: dict[str, str] | None
    num_input_tokens: int
    apart: Session | None
    """Its own session, if it is not the conversation's."""
    records: bool
    is_cancelled: bool = False

    def shown(self, status: str, **fields: object) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": None,
            "output": [],
            "output_modalities": NEUTRAL_MODALITIES,
            "max_output_tokens": self.settings.max_output_tokens,
            "metadata": self.metadata,
            "usage": None,
            **fields,
        }


class RealtimeSession:
    """Belongs to one event loop. Clients come and go; see `SessionRegistry`."""

    def __init__(
        self,
        serving: Serving,
        session_id: str,
        state: SessionState,
        save: "Callable[[RealtimeSession], Awaitable[None]]",
    ) -> None:
        """`save` is awaited whenever `state` has changed."""
        self.id = session_id
        self.log = EventLog()
        self.conversation = Conversation(serving.llm, state.conversation)
        self.settings = state.settings
        self._serving = serving
        self._save = save
        self._response: _Response | None = None
        self._task: asyncio.Task[None] | None = None
        """Reads the answer."""
        self._progress: asyncio.Task[None] | None = None
        """Tells how much of the input is computed."""
        self._input_changed = False
        """Since it was looked at last."""

    @property
    def state(self) -> SessionState:
        return SessionState(conversation=self.conversation.state, settings=self.settings)

    def shown(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "realtime.session",
            "type": "realtime",
            "model": self._serving.model_name,
            "output_modalities": NEUTRAL_MODALITIES,
            "instructions": self.conversation.state.instructions or "",
            "max_output_tokens": self.settings.max_output_tokens,
            "tools": [],
            "tool_choice": "auto",
            **self.settings.sampling,
        }

    async def close(self) -> None:
        """End it, with the answer that runs."""
        for task in (self._task, self._progress):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self.conversation.close()

    # --- events -----------------------------------------------------------------------------------------------

    async def receive(self, data: str) -> None:
        """Carry out an event. What is wrong with it is told in an `error` event."""
        try:
            event = events.read_client_event(data)
        except UsageError as error:
            await self.tell_error(error, events.event_id_of(data))
            return
        try:
            await self._carry_out(event)
        except Exception as error:
            await self.tell_error(error, event.event_id)
        else:
            await self._save(self)

    async def tell_error(self, error: Exception, event_id: str | None = None) -> None:
        """An `error` event; `event_id` is that of the event that was wrong."""
        await self.log.add("error", error=error_fields(error, event_id))

    async def _carry_out(self, event: events.AnyClientEvent) -> None:
        conversation = self.conversation
        match event:
            case events.SessionUpdate():
                await self._update(event.session)
            case events.ItemCreate():
                await self._create_item(event)
            case events.ItemDelete():
                conversation.delete(conversation.find(event.item_id))
                await self.log.add("conversation.item.deleted", item_id=event.item_id)
            case events.ItemRetrieve():
                item = conversation.state.items[conversation.find(event.item_id)]
                await self.log.add("conversation.item.retrieved", item=item.shown())
            case events.ResponseCreate():
                await self._respond(event.response or events.ResponseFields())
            case events.ResponseCancel():
                self._cancel(event.response_id)
            case events.InputTextAppend():
                conversation.append(event.text)
                self._watch_input()
            case events.InputTextRevise():
                conversation.revise(event.text)
                self._watch_input()
            case events.InputTextClear():
                conversation.revise("")
                await self.log.add("input_text.cleared")
            case events.InputTextCommit():
                await self._commit()

    async def _update(self, fields: events.SessionFields) -> None:
        settings = self.settings.changed(fields)
        if fields.instructions is not msgspec.UNSET:
            self.conversation.set_instructions(fields.instructions)
        self.settings = settings
        await self.log.add("session.updated", session=self.shown())

    async def _create_item(self, event: events.ItemCreate) -> None:
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
        await self._tell_item(item, conversation.previous_id(index))

    async def _tell_item(self, item: Item, previous_id: str | None) -> None:
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self.log.add(kind, previous_item_id=previous_id, item=item.shown())

    async def _commit(self) -> None:
        item = self.conversation.commit()
        previous_id = self.conversation.previous_id(len(self.conversation.state.items) - 1)
        await self.log.add("input_text.committed", item_id=item.id, previous_item_id=previous_id)
        await self._tell_item(item, previous_id)

    # --- answers ----------------------------------------------------------------------------------------------

    async def _respond(self, fields: events.ResponseFields) -> None:
        conversation = self.conversation
        settings = self.settings.changed(fields)
        params = settings.params()
        is_apart = (
            fields.input is not None
            or fields.instructions is not msgspec.UNSET
            or fields.conversation == "none"
        )
        if conversation.state.input_text and not is_apart and not conversation.is_answering:
            await self._commit()
        apart: Session | None = None
        records = fields.conversation != "none"
        if is_apart:
            apart, answer = conversation.respond_apart(self._messages(fields), params, records=records)
        else:
            answer = conversation.respond(params)
        session = apart or conversation.live
        assert session is not None
        self._response = _Response(
            id=new_id("resp_"),
            item=Item.new("assistant", ""),
            answer=answer,
            settings=settings,
            metadata=fields.metadata,
            num_input_tokens=len(session.token_ids),
            apart=apart,
            records=records,
        )
        self._task = asyncio.create_task(self._give(self._response))

    def _messages(self, fields: events.ResponseFields) -> Sequence[dict[str, object]]:
        """What the model reads for an answer that is not simply the next one."""
        messages = [dict(message) for message in self.conversation.messages()]
        if fields.input is not None:
            head = messages[:1] if self.conversation.state.instructions else []
            messages = head + [dict(_item(each).message) for each in fields.input]
        if fields.instructions is not msgspec.UNSET:
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
        where: dict[str, object] = {"response_id": response.id, "output_index": 0}
        part = {**where, "item_id": response.item.id, "content_index": 0}
        previous_id = self.conversation.previous_id(len(self.conversation.state.items))
        item = {**response.item.shown(), "status": "in_progress", "content": []}
        await self.log.add("response.created", response=response.shown("in_progress"))
        await self.log.add("response.output_item.added", **where, item=item)
        if response.records:
            await self.log.add("conversation.item.added", previous_item_id=previous_id, item=item)
        await self.log.add("response.content_part.added", **part, part={"type": "text", "text": ""})
        try:
            async for delta in response.answer:
                if delta.text:
                    await self.log.add("response.output_text.delta", **part, delta=delta.text)
        except Exception as caught:
            error = caught
        output = response.answer.delivered(FinishReason.ABORT if response.is_cancelled else None)
        is_complete = error is None and output.finish_reason is FinishReason.STOP
        response.item.is_complete = is_complete
        self._response = None
        try:
            self.conversation.answered(response.item, output, response.apart)
        except UsageError as caught:  # what was typed meanwhile does not fit
            await self.tell_error(caught)
        await self._save(self)
        await self._tell_end(response, output, error, part, previous_id)

    async def _tell_end(
        self,
        response: _Response,
        output: CompletionOutput,
        error: Exception | None,
        part: dict[str, object],
        previous_id: str | None,
    ) -> None:
        item = response.item.shown()
        where = {name: part[name] for name in ("response_id", "output_index")}
        await self.log.add("response.output_text.done", **part, text=output.text)
        await self.log.add("response.content_part.done", **part, part={"type": "text", "text": output.text})
        await self.log.add("response.output_item.done", **where, item=item)
        if response.records:
            await self.log.add("conversation.item.done", previous_item_id=previous_id, item=item)
        status, details = _status(response, output, error)
        num_input, num_output = response.num_input_tokens, len(output.token_ids)
        usage = {
            "total_tokens": num_input + num_output,
            "input_tokens": num_input,
            "output_tokens": num_output,
            "input_token_details": {"text_tokens": num_input, "audio_tokens": 0},
            "output_token_details": {"text_tokens": num_output, "audio_tokens": 0},
        }
        shown = response.shown(status, status_details=details, output=[item], usage=usage)
        await self.log.add("response.done", response=shown)

    # --- input ------------------------------------------------------------------------------------------------

    def _watch_input(self) -> None:
        self._input_changed = True
        if self._progress is None or self._progress.done():
            self._progress = asyncio.create_task(self._tell_progress())

    async def _tell_progress(self) -> None:
        """Say how much of the input is computed, until all of it is."""
        told = (-1, -1)
        while True:
            self._input_changed = False
            session = self.conversation.live
            if session is None or session.is_answering:
                return
            num_tokens, num_computed = await session.progress()
            # The last token is left for the step that samples; a few more may change with what follows.
            if (num_tokens, num_computed) != told:
                told = (num_tokens, num_computed)
                await self.log.add("input_text.progress", num_tokens=num_tokens, num_computed=num_computed)
            if num_computed >= num_tokens - 1 and not self._input_changed:
                return
            await asyncio.sleep(PROGRESS_S)


def error_fields(error: Exception, event_id: str | None = None) -> dict[str, object]:
    """What an `error` event says."""
    return {**msgspec.to_builtins(error_of(error)[1].error), "event_id": event_id}


def _item(fields: events.ItemFields) -> Item:
    if fields.type != "message":
        raise HttpError(f"item.type: {fields.type!r} is not taken; only messages are", param="item.type")
    text = events.text_of(fields.content)
    if not text and fields.role != "assistant":
        raise HttpError("item.content: has no text", param="item.content")
    return Item.new(fields.role, text, fields.id)


def _status(
    response: _Response, output: CompletionOutput, error: Exception | None
) -> tuple[str, dict[str, object] | None]:
    if error is not None:
        fields = msgspec.to_builtins(error_of(error)[1].error)
        return "failed", {"type": "failed", "error": fields}
    if response.is_cancelled:
        return "cancelled", {"type": "cancelled", "reason": "client_cancelled"}
    if output.finish_reason is FinishReason.LENGTH:
        return "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}
    return "completed", None
