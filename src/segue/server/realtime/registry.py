"""The realtime sessions that there are: connected, waiting for their client to come back, or on disk.

                ┌──────────── taken over ◀────────────┐
new, or saved ──┴─▶ connected ── connection lost ──▶ waiting ── too long, or room is needed ──▶ closed
                        └── closed by its client, timed out ──────────────────────────────────▶
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from http import HTTPStatus

from segue.server.realtime.conversation import ConversationState
from segue.server.realtime.saver import SavedSession, SessionSaver
from segue.server.realtime.server_events import SessionCreated, SessionResumed
from segue.server.realtime.session import RealtimeSession
from segue.server.shared.http_errors import HttpError
from segue.server.shared.options import ServerOptions
from segue.server.shared.serving import Serving, new_id


class Attachment:
    """A connection's hold on a session."""

    def __init__(self, session: RealtimeSession) -> None:
        self.session = session
        self.lost = asyncio.Event()
        """Set when another connection has taken the session over."""
        self.released = asyncio.Event()
        """Set when this one sends nothing more."""
        self.frees = False
        """Whether the session ends with this connection."""


class SessionRegistry:
    """Belongs to one event loop. A session that is closed stays on disk, if there is a saver."""

    def __init__(self, options: ServerOptions, saver: SessionSaver | None = None) -> None:
        self.options = options
        self.draining = asyncio.Event()
        """Set when the server is about to end: no more answers are begun."""
        self._saver = saver
        self._sessions: dict[str, RealtimeSession] = {}
        self._attached: dict[str, Attachment] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Of the sessions that wait for their client, in the order in which it left."""

    @asynccontextmanager
    async def attached(
        self, serving: Serving, session_id: str | None, last_event_id: str | None
    ) -> AsyncIterator[Attachment]:
        """A new session, or the one with this id, for as long as a connection lasts.

        Begins with `session.created`, or goes on with what came after `last_event_id`; if that is not known any
        more, an error event says so. Raises HttpError if there is no such session or no room for one more,
        StateStoreError if it cannot be read.
        """
        session, is_new = await self._find(serving, session_id)
        attachment, other = Attachment(session), self._attached.get(session.id)
        self._attached[session.id] = attachment
        self._stop_waiting(session.id)
        try:
            if other is not None:
                other.lost.set()
                await other.released.wait()
            if not is_new:
                _go_on(session, last_event_id)
            yield attachment
        finally:
            attachment.released.set()
            self._detach(attachment)

    @property
    def num_sessions(self) -> int:
        """Connected, or waiting for their client."""
        return len(self._sessions)

    def drain(self) -> None:
        """No more answers; those that are being given go on."""
        self.draining.set()
        for session in self._sessions.values():
            session.drain()

    async def close(self) -> None:
        """End all sessions, and have them on disk."""
        for session_id in list(self._sessions):
            self._close(session_id)
        if self._saver is not None:
            await self._saver.close()

    async def _find(self, serving: Serving, session_id: str | None) -> tuple[RealtimeSession, bool]:
        """The session, and whether it was made now."""
        if session_id is None:
            new = SavedSession(conversation=ConversationState(now=datetime.now()))
            return self._create(serving, new_id("sess_"), new), True
        if (session := self._sessions.get(session_id)) is not None:
            return session, False
        saved = None if self._saver is None else await self._saver.load(session_id)
        if (session := self._sessions.get(session_id)) is not None:  # another connection was faster
            return session, False
        if saved is None:
            raise HttpError(
                f"there is no session {session_id!r}, or it has timed out",
                param="session_id",
                code="session_not_found",
            )
        return self._create(serving, session_id, saved), True

    def _create(self, serving: Serving, session_id: str, saved: SavedSession) -> RealtimeSession:
        self._make_room()
        session = RealtimeSession(serving, session_id, saved, self._changed)
        session.log.put(SessionCreated(session=session.shown()))
        self._sessions[session_id] = session
        return session

    def _make_room(self) -> None:
        """For one more. A session whose client is gone makes place for one whose client is here."""
        if self.num_sessions < self.options.max_sessions:
            return
        if not self._timers:
            raise HttpError(
                f"there are {self.num_sessions} sessions, and --max-sessions={self.options.max_sessions}: "
                "close one, or try again later",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                code="too_many_sessions",
            )
        self._close(next(iter(self._timers)))

    def _changed(self, session: RealtimeSession, *, is_border: bool) -> None:
        if self._saver is not None:
            self._saver.changed(session.id, session.saved, at_once=is_border)

    def _detach(self, attachment: Attachment) -> None:
        """The connection is gone, unless another one has the session by now."""
        session_id = attachment.session.id
        if self._attached.get(session_id) is not attachment:
            return
        del self._attached[session_id]
        if attachment.frees or not self.options.resume_timeout_s:
            self._close(session_id)
        elif session_id in self._sessions:
            loop = asyncio.get_running_loop()
            self._timers[session_id] = loop.call_later(self.options.resume_timeout_s, self._close, session_id)

    def _stop_waiting(self, session_id: str) -> None:
        if (timer := self._timers.pop(session_id, None)) is not None:
            timer.cancel()

    def _close(self, session_id: str) -> None:
        self._stop_waiting(session_id)
        if (session := self._sessions.pop(session_id, None)) is not None:
            session.close()


def _go_on(session: RealtimeSession, last_event_id: str | None) -> None:
    """For a client that comes back."""
    if last_event_id is not None and not session.log.go_back(last_event_id):
        error = HttpError("some of the events after last_event_id are lost", code="events_lost")
        session.tell_error(error)
    session.log.put(SessionResumed(session=session.shown()))
