"""Tells how much of the input is computed, until all of it is."""

import asyncio
from collections.abc import Callable

from segue.errors import SegueError
from segue.server.realtime.event_log import EventLog
from segue.server.realtime.live_conversation import LiveConversation
from segue.server.realtime.server_events import InputTextProgress

PROGRESS_S = 0.03
"""How often it is looked."""


class InputProgress:
    def __init__(
        self, conversation: LiveConversation, log: EventLog, tell_error: Callable[[Exception], None]
    ) -> None:
        self._conversation = conversation
        self._log = log
        self._tell_error = tell_error
        self._task: asyncio.Task[None] | None = None
        self._has_changed = False
        """Whether there is other input since it was looked last."""

    def watch(self) -> None:
        """There is other input."""
        self._has_changed = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._tell())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _tell(self) -> None:
        last = (-1, -1)
        while True:
            self._has_changed = False
            session = self._conversation.session
            if session is None or session.is_answering:
                return
            try:
                progress = await session.progress()
            except SegueError as error:
                self._tell_error(error)
                return
            num_tokens, num_computed = progress
            if progress != last:
                await self._log.add(InputTextProgress(num_tokens=num_tokens, num_computed=num_computed))
            last = progress
            # The last token is left for the step that samples; a few more may change with what follows.
            if num_computed >= num_tokens - 1 and not self._has_changed:
                return
            await asyncio.sleep(PROGRESS_S)
