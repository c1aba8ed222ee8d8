"""An answer that is being given, as its client sees it: read from the engine, told in the session's log."""

import asyncio
import time
from functools import cached_property
from typing import Any

from segue.answers.outputs import CompletionOutput, RequestOutput, RequestTimes
from segue.contract.reports import FinishReason, RequestMetrics
from segue.server.realtime import server_events as told
from segue.server.realtime.conversation import ConversationItem
from segue.server.realtime.event_log import EventLog
from segue.server.realtime.live_conversation import GivenAnswer
from segue.server.realtime.settings import Settings
from segue.server.shared.http_errors import error_of
from segue.server.shared.metrics import RequestSeen
from segue.server.shared.serving import new_id


class RunningResponse:
    """First `begin`, then `read`, then `end`; the session does what is to happen between these."""

    def __init__(
        self,
        log: EventLog,
        given: GivenAnswer,
        settings: Settings,
        metadata: dict[str, str] | None,
        *,
        previous_id: str | None,
        computed: "asyncio.Future[tuple[int, int]] | None",
        seen: RequestSeen,
        arrival_s: float,
    ) -> None:
        """`previous_id`: of the item before its own; `computed`: how much of the input was there before the answer was
        asked for."""
        self.id = new_id("resp_")
        self.is_cancelled = False
        self._log = log
        self._given = given
        self._settings = settings
        self._metadata = metadata
        self._item = ConversationItem.new("assistant", "")
        self._previous_id = previous_id
        self._num_input = len(given.input_ids)
        self._computed = computed
        self._seen = seen
        self._arrival_s = arrival_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Tell that it begins."""
        put, item = self._log.put, self._item.shown(is_begun=True)
        put(told.ResponseCreated(response=self._shown("in_progress")))
        put(told.OutputItemAdded(response_id=self.id, item=item))
        if self._given.becomes_item:
            put(told.ConversationItemAdded(previous_item_id=self._previous_id, item=item))
        part = told.ShownText("text", "")
        put(told.ContentPartAdded(response_id=self.id, item_id=item.id, part=part))

    async def read(self) -> None:
        """Tell it as it comes, to its end or its error."""
        try:
            async for delta in self._given.answer:
                now_s = time.perf_counter()
                if delta.token_ids:
                    self._first_token_s = self._first_token_s or now_s
                    self._last_token_s = now_s
                self._seen.took(delta, now_s)
                if delta.text:
                    event = told.OutputTextDelta(response_id=self.id, item_id=self._item.id, delta=delta.text)
                    await self._log.add(event)
        except Exception as caught:
            self._error = caught

    @cached_property
    def output(self) -> CompletionOutput:
        """What was read of it, once it is over."""
        return self._given.answer.delivered(FinishReason.ABORT if self.is_cancelled else None)

    @property
    def item(self) -> ConversationItem:
        """The same as a message."""
        is_complete = self._error is None and self.output.finish_reason is FinishReason.STOP
        return ConversationItem(
            id=self._item.id, role="assistant", text=self.output.text, is_complete=is_complete
        )

    def end(self) -> None:
        """Tell that it is over, and how."""
        put, item, text = self._log.put, self.item.shown(), self.output.text
        put(told.OutputTextDone(response_id=self.id, item_id=item.id, text=text))
        part = told.ShownText("text", text)
        put(told.ContentPartDone(response_id=self.id, item_id=item.id, part=part))
        put(told.OutputItemDone(response_id=self.id, item=item))
        if self._given.becomes_item:
            put(told.ConversationItemDone(previous_item_id=self._previous_id, item=item))
        details = self._status_details()
        status: told.ResponseStatus = "completed" if details is None else details.type
        shown = self._shown(status, status_details=details, output=[item], usage=self._usage())
        put(told.ResponseDone(response=shown))
        if self._error is None:
            self._seen.ended(self._measured())
        else:
            self._seen.failed()

    def close(self) -> None:
        """Nobody reads it to its end."""
        self._seen.close()

    def _shown(self, status: told.ResponseStatus, **fields: Any) -> told.ShownResponse:
        return told.ShownResponse(
            id=self.id,
            status=status,
            max_output_tokens=self._settings.max_output_tokens,
            metadata=self._metadata,
            **fields,
        )

    def _status_details(self) -> told.StatusDetails | None:
        if self._error is not None:
            return told.StatusDetails(type="failed", error=error_of(self._error)[1].error)
        if self.is_cancelled:
            return told.StatusDetails(type="cancelled", reason="client_cancelled")
        if self.output.finish_reason is FinishReason.LENGTH:
            return told.StatusDetails(type="incomplete", reason="max_output_tokens")
        return None

    def _usage(self) -> told.ShownUsage:
        num_output = len(self.output.token_ids)
        return told.ShownUsage(
            total_tokens=self._num_input + num_output,
            input_tokens=self._num_input,
            output_tokens=num_output,
            input_token_details=told.InputTokenDetails(
                text_tokens=self._num_input, cached_tokens=self._num_cached_tokens
            ),
            output_token_details=told.OutputTokenDetails(text_tokens=num_output),
        )

    def _measured(self) -> RequestOutput:
        """As the metrics take it."""
        return RequestOutput(
            request_id=self.id,
            prompt=None,
            prompt_token_ids=self._given.input_ids,
            outputs=[self.output],
            finished=True,
            metrics=RequestMetrics(),
            times=RequestTimes(
                arrival_s=self._arrival_s,
                first_token_s=self._first_token_s,
                last_token_s=self._last_token_s,
            ),
            num_cached_tokens=self._num_cached_tokens,
        )

    @property
    def _num_cached_tokens(self) -> int:
        """As far as the engine has said it."""
        computed = self._computed
        if computed is None or not computed.done() or computed.cancelled() or computed.exception():
            return 0
        return min(computed.result()[1], self._num_input)
