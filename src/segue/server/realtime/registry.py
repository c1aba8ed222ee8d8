"""The realtime sessions that there are: connected, waiting for their client to come back, or on disk."""

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING

from segue.server.errors import HttpError
from segue.server.realtime.conversation import ConversationState
from segue.server.realtime.session import RealtimeSession, SessionState, error_fields
from segue.server.serving import Serving, new_id

if TYPE_CHECKING:
    from segue.server.state_store import StateStore

SUPERSEDED = 4001
"""The WebSocket's close code for a client whose session another connection has taken over."""


class Attachment:
    """A connection's hold on a session."""

    def __init__(self, session: RealtimeSession) -> None:
        self.session = session
        self.lost = asyncio.Event()
        """Set when another connection has taken the session over."""
        self.released = asyncio.Event()
        """Set when this one sends nothing more."""


class SessionRegistry:
    """Belongs to one event loop."""

    def __init__(self, *, resume_timeout_s: float, store: "StateStore | None" = None) -> None:
        """A session whose client is gone is kept for `resume_timeout_s`; with a store, on disk for ever."""
        self._resume_timeout_s = resume_timeout_s
        self._store = store
        self._sessions: dict[str, RealtimeSession] = {}
        self._attached: dict[str, Attachment] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def attach(self, serving: Serving, session_id: str | None, last_event_id: str | None) -> Attachment:
        """A new session, or the one with this id. Raises HttpError if there is none.

        Begins with `session.created`, or goes on with what came after `last_event_id`; if that is not known any
        more, an error event says so.
        """
        if session_id is None:
            state = SessionState(conversation=ConversationState(now=datetime.now()))
            return self._create(serving, new_id("sess_"), state)
        session = self._sessions.get(session_id)
        if session is not None:
            return await self._take_over(session, last_event_id)
        saved = None if self._store is None else await asyncio.to_thread(self._store.load, session_id)
        if saved is None:
            raise HttpError(
                f"there is no session {session_id!r}, or it has timed out",
                param="session_id",
                code="session_not_found",
            )
        session = self._sessions.get(session_id)  # another connection may have been faster
        if session is not None:
            return await self._take_over(session, last_event_id)
        return self._create(serving, session_id, saved)

    def _create(self, serving: Serving, session_id: str, state: SessionState) -> Attachment:
        session = self._sessions[session_id] = RealtimeSession(serving, session_id, state, self._save)
        session.log.put("session.created", session=session.shown())
        attachment = self._attached[session_id] = Attachment(session)
        return attachment

    async def _take_over(self, session: RealtimeSession, last_event_id: str | None) -> Attachment:
        """A session that has been connected before, and may still be."""
        if (timer := self._timers.pop(session.id, None)) is not None:
            timer.cancel()
        other, attachment = self._attached.get(session.id), Attachment(session)
        self._attached[session.id] = attachment
        if other is not None:
            other.lost.set()
            await other.released.wait()
        if last_event_id is not None and not session.log.go_back(last_event_id):
            error = HttpError("some of the events after last_event_id are lost", code="events_lost")
            session.log.put("error", error=error_fields(error))
        session.log.put("session.resumed", session=session.shown())
        return attachment

    async def _save(self, session: RealtimeSession) -> None:
        if self._store is not None:
            await asyncio.to_thread(self._store.save, session.id, session.state)

    def detach(self, attachment: Attachment) -> None:
        """The connection is gone. The session waits for another one."""
        session_id = attachment.session.id
        if self._attached.get(session_id) is attachment:
            del self._attached[session_id]
            loop = asyncio.get_running_loop()
            self._timers[session_id] = loop.call_later(self._resume_timeout_s, self._expire, session_id)

    def _expire(self, session_id: str) -> None:
        del self._timers[session_id]
        task = asyncio.create_task(self._sessions.pop(session_id).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
