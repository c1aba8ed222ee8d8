"""The events of one session, in order, for whoever is connected to it.

······ dropped │ sent, kept for a client that comes back │ not sent yet │ `add` waits when there is no more room
"""

import asyncio
from collections import deque

import msgspec

from segue.server.realtime.server_events import ServerEvent

MAX_UNSENT_BYTES = 256 << 10
"""Who writes faster than the client reads waits from here on."""
MAX_KEPT_BYTES = 1 << 20
"""Of events that were sent."""

ID_PREFIX = "event_"
FIRST_ID = f"{ID_PREFIX}0"
MAX_DIGITS = 18
"""Of an event's number."""


class _Logged(msgspec.Struct, frozen=True):
    number: int
    data: bytes


class EventLog:
    """Numbered events. One reads at a time; any number of tasks of the same event loop write."""

    def __init__(self) -> None:
        self._kept: deque[_Logged] = deque()
        self._unsent: deque[_Logged] = deque()
        self._num_kept_bytes = 0
        self._num_unsent_bytes = 0
        self._num_events = 0
        self._changed = asyncio.Event()
        """Set, and replaced, when something was written or read."""

    async def room(self) -> None:
        """Waits while too much is unsent."""
        while self._num_unsent_bytes >= MAX_UNSENT_BYTES:
            await self._changed.wait()

    async def add(self, event: ServerEvent) -> None:
        """An event, when there is room for it. It gets its number."""
        await self.room()
        self.put(event)

    def put(self, event: ServerEvent) -> None:
        """The same at once: for what must be told together with the change that it tells of. Whoever puts many waits
        for room before."""
        number = self._num_events
        event.event_id = f"{ID_PREFIX}{number}"
        data = msgspec.json.encode(event)
        self._num_events += 1
        self._unsent.append(_Logged(number, data))
        self._num_unsent_bytes += len(data)
        self._tell()

    async def next(self) -> bytes:
        """The next event to send; to be followed by `sent`."""
        while not self._unsent:
            await self._changed.wait()
        return self._unsent[0].data

    def sent(self) -> None:
        """What `next` gave was sent."""
        event = self._unsent.popleft()
        self._num_unsent_bytes -= len(event.data)
        self._kept.append(event)
        self._num_kept_bytes += len(event.data)
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft().data)
        self._tell()

    async def all_sent(self) -> None:
        """Waits until there is nothing to send."""
        while self._unsent:
            await self._changed.wait()

    def go_back(self, last_event_id: str) -> bool:
        """Send again all after this event. False: some of it is not kept any more, or there was no such event."""
        last = _number(last_event_id)
        if last is None or last >= self._num_events:
            return False
        while self._kept and self._kept[-1].number > last:
            event = self._kept.pop()
            self._num_kept_bytes -= len(event.data)
            self._unsent.appendleft(event)
            self._num_unsent_bytes += len(event.data)
        first = self._unsent[0].number if self._unsent else self._num_events
        return first <= last + 1

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _number(event_id: str) -> int | None:
    digits = event_id.removeprefix(ID_PREFIX)
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS
    return int(digits) if is_number else None
