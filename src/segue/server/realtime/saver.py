"""Writes sessions to disk behind their events: nobody waits for a disk, and a disk that is full stops nobody.

What is typed is written a moment later, a turn at once; what changes while a write runs goes with the next one. What
cannot be written is tried again, and the log says so.
"""

import asyncio
import contextlib
import logging

import msgspec

from segue.server.ops.saved_sessions import StateStoreError, Store
from segue.server.realtime.conversation import ConversationState
from segue.server.realtime.settings import Settings

log = logging.getLogger("segue.server")

SAVE_DELAY_S = 0.5
"""How long what is typed may wait to be written."""
RETRY_S = 5.0
MAX_BATCH = 16
"""Sessions in one write: they are encoded on the event loop."""
MAX_UNSAVED = 4096
"""Sessions that wait to be written; beyond, while the disk takes nothing, the oldest are not written."""


class SavedSession(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a session on disk."""

    conversation: ConversationState
    settings: Settings = msgspec.field(default_factory=Settings)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SavedSession).decode


class SessionSaver:
    """Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unsaved: dict[str, SavedSession] = {}
        """The oldest change first."""
        self._writing: dict[str, SavedSession] = {}
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    def changed(self, session_id: str, session: SavedSession, *, at_once: bool) -> None:
        """Write this in place of what was there, unless another change comes before."""
        self._unsaved[session_id] = session
        if len(self._unsaved) > MAX_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]
        if at_once:
            self._hurry.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def load(self, session_id: str) -> SavedSession | None:
        """What is kept of a session; None if nothing is. Raises StateStoreError."""
        unsaved = self._unsaved.get(session_id) or self._writing.get(session_id)
        if unsaved is not None:
            return unsaved
        data = await asyncio.to_thread(self._store.load, session_id)
        if data is None:
            return None
        # A file of another version is no reason to fail.
        with contextlib.suppress(msgspec.DecodeError):
            return _decode(data)
        return None

    async def close(self) -> None:
        """Write what is to be written, if that can be."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._unsaved and await self._write():
            pass
        if self._unsaved:
            log.error("%d sessions could not be saved", len(self._unsaved))

    async def _run(self) -> None:
        while self._unsaved:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), SAVE_DELAY_S)
            self._hurry.clear()
            if not await self._write():
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> bool:
        """One batch. False: it could not be written."""
        batch = self._writing = dict(list(self._unsaved.items())[:MAX_BATCH])
        for session_id in batch:
            del self._unsaved[session_id]
        rows = [(session_id, _encode(session)) for session_id, session in batch.items()]
        is_saved = False
        try:
            await asyncio.to_thread(self._store.save, rows)
            is_saved = True
        except StateStoreError as error:
            if not self._is_failing:
                log.error("%s; they go on without, and it is tried again every %g s", error, RETRY_S)
        finally:
            if not is_saved:  # also when this is cancelled: it may have been written, and is so once more
                self._unsaved = {**batch, **self._unsaved}
            self._writing = {}
        if is_saved and self._is_failing:
            log.warning("sessions are saved again")
        self._is_failing = not is_saved
        return is_saved
