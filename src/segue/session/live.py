"""`Session`: a live session on an `AsyncLLM`, and the manager that limits how many there are."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import Self

from segue.engine.outputs import EngineOutput, EngineSnapshot, FinishReason
from segue.engine_loop import Channel, EngineLoop
from segue.errors import CapacityError, EngineDead, ParameterError, RequestFailed, SessionError
from segue.output_processor import OutputProcessor
from segue.outputs import CompletionOutput, Delta
from segue.sample.params import SamplingParams
from segue.session.state import Command, Extend, Phase, SessionState, Truncate
from segue.session.turns import ChatTurn, RawTurn, TurnText
from segue.tokens import Tokenizer
from segue.tokens.chat import Message


class Session:
    """A conversation, or a plain text, whose input is computed while it arrives.

    All methods return at once; the engine works behind them. An error leaves the session as it was. Not to
    be shared between event loops.
    """

    def __init__(self, manager: "SessionManager", session_id: str, state: SessionState) -> None:
        self.id = session_id
        self.closed = asyncio.Event()
        """Set when the session was closed or timed out."""
        self.last_used_s = time.monotonic()
        self._manager = manager
        self._state = state
        self._channel: Channel | None = None
        """None: the engine has nothing of this session, at first or after a failure."""
        self._answer: Answer | None = None
        self._num_discarded = 0
        """Turns that were cut off and whose last output is still to come."""

    # --- input ------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """Of the turn that has not been answered yet."""
        return self._state.text

    @property
    def token_ids(self) -> list[int]:
        """The history: what the model has seen or will see before anything that is said next."""
        return [*self._state.kept, *self._state.sent]

    @property
    def kept_ids(self) -> list[int]:
        """The history up to the end of the last answer's text: with the messages, all that it takes to go on later
        from exactly here; see `SessionManager.resume`."""
        return list(self._state.kept)

    def progress(self) -> Awaitable[tuple[int, int]]:
        """How many tokens the history and the open turn are, and how many of these are computed. The last one is
        computed when the answer begins. This is how it is when `progress` is called: what is told afterwards comes
        behind it."""
        channel = self._channel
        snapshot = None
        if channel is not None:
            request_id = channel.request_id
            snapshot = asyncio.wrap_future(
                self._manager.loop.call(lambda client: client.snapshot(request_id))
            )
        return _progress(self._state.num_history_tokens, snapshot)

    @property
    def is_answering(self) -> bool:
        return self._state.phase is Phase.ANSWERING

    def append(self, text: str | bytes) -> None:
        """More text for the open turn. Bytes are UTF-8 and may end within a character.

        Raises SessionError when the turn is committed or being answered, ParameterError for what is not Unicode,
        CapacityError when it would not fit.
        """
        self._send(self._state.append(text))

    def revise(self, text: str) -> None:
        """Replace the open turn's text: only what differs is computed again. Errors as for `append`."""
        self._send(self._state.revise(text))

    def set_role(self, role: str) -> None:
        """Who speaks the open turn, before its first text: "user" at first, and after each answer."""
        self._state.set_role(role)

    def commit(self) -> None:
        """The turn is complete; it is prefilled up to where the answer begins."""
        self._send(self._state.commit())

    def reopen(self) -> None:
        """Take back a commit, to append or revise after all."""
        self._state.reopen()

    # --- answers ----------------------------------------------------------------------------------------------

    def respond(self, params: SamplingParams | None = None) -> "Answer":
        """Answer the turn, committed if it was not: `async for delta in session.respond(params)`.

        What has been read from the answer is delivered and becomes history.
        """
        params = params or SamplingParams(max_tokens=None)
        params.check_vocab(self._manager.loop.client.vocab_size)
        commands = self._state.respond(params)
        self._answer = Answer(self, self._manager.tokenizer, params)
        self._send(commands)
        return self._answer

    def interrupt(self) -> CompletionOutput | None:
        """End the answer now. What was delivered is kept, and nothing else. Returns that; None without an answer."""
        if self._answer is None:
            return None
        return self._end_answer(self._answer, FinishReason.ABORT)

    def fork(self) -> "Session":
        """A session that goes on from here by itself and shares what is computed.

        While an answer comes, the fork's history has what was delivered of it.
        """
        self.touch()
        if self._state.phase is Phase.CLOSED:
            raise SessionError("fork: the session is closed")
        state = self._state.fork()
        if self._answer is not None:
            state.answered(self._answer.delivered(FinishReason.ABORT))
        return self._manager.add(state, self._channel)

    def close(self) -> None:
        """Forget the session. May be called again."""
        self.end("the session is closed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    # --- for the manager and the answer -----------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Close, and say why to whoever uses it afterwards."""
        if self._state.phase is Phase.CLOSED:
            return
        if self._answer is not None:
            self._answer.finish_early()
            self._answer = None
        self._state.close(why)
        if self._channel is not None:
            self._channel.abort()
        self._manager.remove(self)
        self.closed.set()

    def attach(self, channel: Channel) -> None:
        self._channel = channel

    def receive(self, output: EngineOutput | EngineDead) -> None:
        """The engine's news."""
        if isinstance(output, EngineDead):
            self._lose(output)
        elif output.finish_reason is FinishReason.ERROR:
            self._lose(RequestFailed(output.error or "the request failed"))
        elif self._num_discarded:
            self._num_discarded -= output.finish_reason is not None
        elif self._answer is not None:
            self._answer.receive(output)

    def _lose(self, error: EngineDead | RequestFailed) -> None:
        """The request failed, or a part of its input did. The session has its ids; the next command starts anew with
        them."""
        if self._channel is not None:
            self._channel.abort()  # it may live on, without that part
            self._channel = None
        self._num_discarded = 0
        if self._answer is not None:
            self._answer.fail(error)

    def stop_turn(self, num_tokens: int) -> None:
        """End the engine's turn after this many tokens of the answer."""
        assert self._channel is not None
        self._num_discarded += 1
        self._channel.truncate(self._state.num_history_tokens + num_tokens)

    def delivered_all(self, answer: "Answer") -> None:
        """The reader has taken the last of an answer."""
        if self._answer is answer:
            self._end_answer(answer, None)

    def _end_answer(self, answer: "Answer", reason: FinishReason | None) -> CompletionOutput:
        output = answer.delivered(reason)
        self._answer = None
        if not answer.turn_ended and self._channel is not None:
            self._num_discarded += 1
        answer.finish_early()
        self._send(self._state.answered(output))
        return output

    def _send(self, commands: Sequence[Command]) -> None:
        self.touch()
        if self._channel is None:
            self._open(commands)
            return
        for command in commands:
            match command:
                case Truncate(num_tokens):
                    self._channel.truncate(num_tokens)
                case Extend(token_ids, params):
                    self._channel.add_chunk(token_ids, params)

    def _open(self, commands: Sequence[Command]) -> None:
        """Tell a new engine request all at once."""
        if not self._state.num_history_tokens:
            return
        params = commands[-1].params if commands and isinstance(commands[-1], Extend) else None
        self._channel = self._manager.loop.open(
            self.token_ids,
            params,
            self.receive,
            request_id=self._manager.engine_id(self),
            resumable=True,
            keep="all",
        )

    def touch(self) -> None:
        self.last_used_s = time.monotonic()


class Answer(AsyncIterator[Delta]):
    """A session's answer as it comes. Deltas that the reader is too slow for are joined."""

    def __init__(self, session: Session, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.turn_ended = False
        """The engine has said its last of this turn."""
        self._session = session
        self._processor = OutputProcessor(tokenizer)
        self._processor.add(session.id, prompt=None, prompt_token_ids=(), params=params)
        self._wants_logprobs = params.logprobs is not None
        self._waiting: list[Delta] = []
        self._read: list[Delta] = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._is_over = False

    def receive(self, output: EngineOutput) -> None:
        self.turn_ended = output.finish_reason is not None
        output.request_id = self._session.id
        processed = self._processor.process([output])
        self._waiting += processed.deltas
        if processed.aborts and not self.turn_ended:
            # A stop string: the text ends here, and the engine does not know.
            self.turn_ended = True
            self._session.stop_turn(len(self._processor.output(self._session.id).outputs[0].token_ids))
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.turn_ended = True
        self._news.set()

    def finish_early(self) -> None:
        """No more will be read."""
        self._is_over = True
        self._waiting.clear()
        self._news.set()

    def delivered(self, reason: FinishReason | None) -> CompletionOutput:
        """What the reader has of the answer. `reason`: why it ends there, if not by itself."""
        last = self._read[-1] if self._read else None
        logprobs = [entry for delta in self._read for entry in delta.logprobs or ()]
        return CompletionOutput(
            index=0,
            text="".join(delta.text for delta in self._read),
            token_ids=[token for delta in self._read for token in delta.token_ids],
            cumulative_logprob=None,
            logprobs=logprobs if self._wants_logprobs else None,
            finish_reason=reason or (last.finish_reason if last is not None else None),
            stop_reason=last.stop_reason if last is not None and reason is None else None,
        )

    async def __anext__(self) -> Delta:
        while not self._waiting and not self._is_over:
            if self._error is not None:
                self._session.delivered_all(self)
                raise self._error
            self._news.clear()
            await self._news.wait()
        if not self._waiting:
            raise StopAsyncIteration
        delta = _joined(self._waiting)
        self._waiting.clear()
        self._read.append(delta)
        if delta.finish_reason is not None:
            self._session.delivered_all(self)
            self._is_over = True
        return delta

    async def text(self) -> str:
        """Read the answer to its end; its text."""
        async for _ in self:
            pass
        return self.delivered(None).text


async def _progress(num_tokens: int, snapshot: "asyncio.Future[EngineSnapshot] | None") -> tuple[int, int]:
    requests = [] if snapshot is None else (await snapshot).requests
    return (requests[0].num_tokens, requests[0].num_computed) if requests else (num_tokens, 0)


def _joined(deltas: Sequence[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return Delta(
        request_id=last.request_id,
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs if last.logprobs is not None else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
    )


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
        turn: TurnText = (
            RawTurn(self.tokenizer) if messages is None else ChatTurn(self.tokenizer, messages, role, now())
        )
        max_model_len = self.loop.client.config.max_model_len
        return self.add(SessionState(turn, max_model_len=max_model_len), None, session_id)

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
        turn = ChatTurn(self.tokenizer, messages, role, now, num_kept=num_kept)
        state = SessionState(turn, max_model_len=self.loop.client.config.max_model_len)
        state.kept = list(kept_ids)
        return self.add(state, None)

    def add(self, state: SessionState, source: Channel | None, session_id: str | None = None) -> Session:
        """A session with this state; with `source`, forked from that request."""
        if self._max_sessions is not None and len(self._sessions) >= self._max_sessions:
            raise CapacityError(
                f"there are {len(self._sessions)} sessions and max_sessions={self._max_sessions}: close one"
            )
        if session_id is None:
            session_id = next(name for i in self._numbers if (name := f"session-{i}") not in self._sessions)
        elif session_id in self._sessions:
            raise ParameterError("session_id", session_id, "is in use")
        session = Session(self, session_id, state)
        if source is not None and state.num_history_tokens:
            session.attach(
                source.fork(
                    session.receive,
                    new_request_id=self.engine_id(session),
                    num_tokens=state.num_history_tokens,
                )
            )
        self._sessions[session_id] = session
        self._watch()
        return session

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)

    def engine_id(self, session: Session) -> str:
        """A request id for the engine that was not in use before."""
        return f"{session.id}/{next(self._numbers)}"

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
