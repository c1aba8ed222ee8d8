"""`Session`: a live session on an `AsyncLLM`, and the manager that limits how many there are."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import Self

from segue.answers.outputs import CompletionOutput, Delta
from segue.contract.reports import EngineSnapshot, FinishReason
from segue.errors import CapacityError, EngineDead, ParameterError, RequestFailed
from segue.host.loop import Channel, EngineLoop
from segue.sample.params import SamplingParams
from segue.session.answer import AnswerSoFar
from segue.session.core import LiveSession, SessionAnswer
from segue.session.link import Handler, Link
from segue.session.state import SessionState
from segue.session.turns import ChatTurn, TurnText, first_turn
from segue.tokens import Tokenizer
from segue.tokens.chat import Message


class Session(LiveSession["Answer", Channel]):
    """A conversation, or a plain text, whose input is computed while it arrives.

    All methods return at once; the engine works behind them. An error leaves the session as it was. Not to
    be shared between event loops.
    """

    def __init__(self, manager: "SessionManager", session_id: str, state: SessionState) -> None:
        super().__init__(session_id, state)
        self.closed = asyncio.Event()
        """Set when the session was closed or timed out."""
        self.last_used_s = time.monotonic()
        self._manager = manager

    @property
    def kept_ids(self) -> list[int]:
        """The history up to the end of the last answer's text: with the messages, all that it takes to go on later
        from exactly here; see `SessionManager.resume`."""
        return list(self._state.kept)

    def progress(self) -> Awaitable[tuple[int, int]]:
        """How many tokens the history and the open turn are, and how many of these are computed. The last one is
        computed when the answer begins. This is how it is when `progress` is called: what is told afterwards comes
        behind it. Raises RequestFailed or EngineDead where it could not be computed; the next operation tries again."""
        if self._link is not None and self._link.error is not None:
            return _raised(self._link.error)
        snapshot = None
        if self._link is not None:
            snapshot = asyncio.wrap_future(self._manager.loop.ask_snapshot(self._link.line.request_id))
        return _progress(len(self.token_ids), snapshot)

    def fork(self) -> "Session":
        """A session that goes on from here by itself and shares what is computed.

        While an answer comes, the fork's history has what was delivered of it. Raises SessionClosed, CapacityError.
        """
        state = self._forked_state()
        self.touch()
        return self._manager.add(state, source=self)

    def end(self, why: str) -> None:
        super().end(why)
        self._manager.remove(self)
        self.closed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    # --- for the manager and the answer -----------------------------------------------------------------------

    def touch(self) -> None:
        self.last_used_s = time.monotonic()

    def share(self, source: "Session") -> None:
        """Take over what the engine has computed of another session, as far as it is the same."""
        self._share(source._link, self._fork_channel)

    def answer_was_read(self, answer: "Answer") -> None:
        """To its end, or to its error."""
        self._answer_was_read(answer)

    # --- how it reaches its engine ----------------------------------------------------------------------------

    @property
    def _vocab_size(self) -> int:
        return self._manager.loop.intake.vocab_size

    def _new_answer(self, params: SamplingParams) -> "Answer":
        return Answer(self, self._manager.tokenizer, params)

    def _open(self, token_ids: Sequence[int], answer: AnswerSoFar | None) -> Link[Channel]:
        def connect(handler: Handler) -> Channel:
            loop = self._manager.loop
            submission = loop.intake.submission(
                token_ids,
                None if answer is None else answer.params,
                request_id=loop.intake.new_id(self.id),
                resumable=True,
                keep="all",
            )
            return loop.open(submission, handler)

        return Link(connect, token_ids, answer)

    def _fork_channel(self, source: Channel, handler: Handler, num_tokens: int) -> Channel:
        return source.fork(handler, name=self.id, num_tokens=num_tokens)

    def _tell(self, token_ids: Sequence[int], answer: AnswerSoFar | None = None) -> None:
        self.touch()
        super()._tell(token_ids, answer)


class Answer(SessionAnswer, AsyncIterator[Delta]):
    """A session's answer as it comes. Deltas that the reader is too slow for are joined."""

    def __init__(self, session: Session, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._session = session
        self._news = asyncio.Event()
        self.so_far = AnswerSoFar(session.id, tokenizer, params, self._news.set)

    def delivered(self, reason: FinishReason | None = None) -> CompletionOutput:
        """What the reader has of the answer. `reason`: why it ends there, if not by itself."""
        return self.so_far.delivered(reason)

    async def __anext__(self) -> Delta:
        """Raises RequestFailed, EngineDead; what was read until then is history."""
        while True:
            self._news.clear()
            delta = self.so_far.take()
            if delta is not None:
                if self.so_far.is_over:
                    self._session.answer_was_read(self)
                return delta
            if self.so_far.is_over:
                raise StopAsyncIteration
            if self.so_far.error is not None:
                self._session.answer_was_read(self)
                self.so_far.end()
                raise self.so_far.error
            await self._news.wait()

    async def text(self) -> str:
        """Read the answer to its end; its text."""
        async for _ in self:
            pass
        return self.delivered().text


async def _raised(error: EngineDead | RequestFailed) -> tuple[int, int]:
    raise error


async def _progress(num_tokens: int, snapshot: "asyncio.Future[EngineSnapshot] | None") -> tuple[int, int]:
    requests = [] if snapshot is None else (await snapshot).requests
    return (requests[0].num_tokens, requests[0].num_computed) if requests else (num_tokens, 0)


class SessionManager:
    """The sessions of one `AsyncLLM`: how many there may be, and how long one may be idle."""

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: Tokenizer,
        *,
        max_sessions: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.loop = loop
        self.tokenizer = tokenizer
        if max_sessions is not None and max_sessions < 1:
            raise ParameterError("max_sessions", max_sessions, "must be at least 1")
        if timeout_s is not None and not timeout_s > 0:
            raise ParameterError("session_timeout_s", timeout_s, "must be more than 0")
        self._max_sessions = max_sessions
        self._timeout_s = timeout_s
        self._sessions: dict[str, Session] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def open(
        self,
        messages: Sequence[Message] | None = None,
        *,
        role: str = "user",
        session_id: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> Session:
        """A new session; see `AsyncLLM.session`."""
        turn = first_turn(self.tokenizer, messages, role, now)
        return self.add(self._state(turn), session_id=session_id)

    def resume(
        self,
        messages: Sequence[Message],
        kept_ids: Sequence[int],
        num_kept: int,
        *,
        role: str = "user",
        now: datetime,
    ) -> Session:
        """A session that goes on after `messages`, whose first `num_kept` (the last of them an answer) are `kept_ids`
        as another session had them. The text of an answer can be made of more than one sequence of ids."""
        turn = ChatTurn.checked(self.tokenizer, messages, role, now, num_kept=num_kept)
        return self.add(self._state(turn, kept_ids))

    def add(
        self, state: SessionState, *, source: Session | None = None, session_id: str | None = None
    ) -> Session:
        """A session with this state, which shares what is computed of `source`."""
        if self._max_sessions is not None and len(self._sessions) >= self._max_sessions:
            raise CapacityError(
                f"there are {len(self._sessions)} sessions and max_sessions={self._max_sessions}: close one"
            )
        if session_id is None:
            session_id = next(name for i in self._numbers if (name := f"session-{i}") not in self._sessions)
        elif session_id in self._sessions:
            raise ParameterError("session_id", session_id, "is in use")
        session = Session(self, session_id, state)
        if source is not None:
            session.share(source)
        self._sessions[session_id] = session
        self._watch()
        return session

    def _state(self, turn: TurnText, kept_ids: Sequence[int] = ()) -> SessionState:
        return SessionState(
            turn=turn, max_model_len=self.loop.client.config.max_model_len, kept=list(kept_ids)
        )

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)

    def close(self) -> None:
        """End all sessions."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for session in list(self._sessions.values()):
            session.end("the engine was shut down")

    def _watch(self) -> None:
        """Look again when the next session can have timed out."""
        if self._timeout_s is None or self._timer is not None or not self._sessions:
            return
        oldest_s = min(session.last_used_s for session in self._sessions.values())
        delay_s = max(0.0, oldest_s + self._timeout_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        assert self._timeout_s is not None
        for session in list(self._sessions.values()):
            if session.is_answering:
                session.touch()
            if time.monotonic() - session.last_used_s >= self._timeout_s:
                session.end(f"the session timed out after {self._timeout_s:g} s without input")
        self._watch()
