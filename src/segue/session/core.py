"""`LiveSession`: all that a session is but how it reaches its engine, which `Session` and `BlockingSession` say.

Each operation goes the same way: the state after it, which may be refused; then the engine is made to hold that; then
it counts. Whatever raises on this way, the session is as it was, and the next operation tells the engine what it lacks.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Self, TypeVar

from segue.answers.outputs import CompletionOutput
from segue.contract.reports import FinishReason
from segue.errors import FailedError, ParameterError
from segue.sample.params import SamplingParams
from segue.session.answer import AnswerSoFar
from segue.session.link import Handler, Line, Link
from segue.session.state import Phase, SessionState


class SessionAnswer(ABC):
    """An answer as its reader sees it."""

    so_far: AnswerSoFar


A = TypeVar("A", bound=SessionAnswer)
L = TypeVar("L", bound=Line)


class LiveSession(ABC, Generic[A, L]):
    """A conversation, or a plain text, whose input is computed while it arrives. An error leaves it as it was."""

    def __init__(self, session_id: str, state: SessionState) -> None:
        self.id = session_id
        self._state = state
        self._link: Link[L] | None = None
        """None: the engine has nothing of this session."""
        self._answer: A | None = None

    # --- input ------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """Of the turn that has not been answered yet."""
        return self._state.text

    @property
    def token_ids(self) -> list[int]:
        """The history: what the model has seen or will see before anything that is said next."""
        return self._state.token_ids

    @property
    def is_answering(self) -> bool:
        return self._state.phase is Phase.ANSWERING

    def append(self, text: str | bytes) -> None:
        """More text for the open turn. Bytes are UTF-8 and may end within a character.

        Raises SessionError when the turn is committed or being answered, ParameterError for what is not Unicode,
        CapacityError when it would leave no room for an answer.
        """
        self._become(self._state.append(text))

    def revise(self, text: str) -> None:
        """Replace the open turn's text: only what differs is computed again. Errors as for `append`; no text at all
        is never too long."""
        self._become(self._state.revise(text))

    def set_role(self, role: str) -> None:
        """Who speaks the open turn, before its first text. Raises SessionError, ParameterError."""
        self._become(self._state.with_role(role))

    def commit(self) -> None:
        """The turn is complete; it is prefilled up to where the answer begins."""
        self._become(self._state.commit())

    def reopen(self) -> None:
        """Take back a commit, to append or revise after all."""
        self._become(self._state.reopen())

    # --- answers ----------------------------------------------------------------------------------------------

    def respond(self, params: SamplingParams | None = None) -> A:
        """Answer the turn, committed if it was not: `for delta in session.respond(params)`, or `async for`.

        History is what was delivered: the text of the deltas that were read, and the ids of just that text. A stop
        string is not part of it, unless `include_stop_str_in_output` delivers it; nor is the token that ended the
        answer, nor text that was held back when it was interrupted.
        """
        params = params or SamplingParams(max_tokens=None)
        params.check_vocab(self._vocab_size)
        params.check_grammar()
        state = self._state.respond(params)
        answer = self._new_answer(params)
        self._tell(state.token_ids, answer.so_far)
        self._state, self._answer = state, answer
        return answer

    def interrupt(self) -> CompletionOutput | None:
        """End the answer now. What was delivered is kept, and nothing else. Returns that; None without an answer."""
        return None if self._answer is None else self._end_answer(self._answer, FinishReason.ABORT)

    def close(self) -> None:
        """Forget the session. May be called again."""
        self.end("the session is closed")

    def end(self, why: str) -> None:
        """Close, and say why to whoever uses it afterwards."""
        if self._state.phase is Phase.CLOSED:
            return
        self._state = self._state.closed(why)
        if self._answer is not None:
            self._answer.so_far.end()
            self._answer = None
        if self._link is not None:
            self._link.drop()
            self._link = None

    # --- how it reaches its engine ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def _vocab_size(self) -> int: ...

    @abstractmethod
    def _new_answer(self, params: SamplingParams) -> A: ...

    @abstractmethod
    def _open(self, token_ids: Sequence[int], answer: AnswerSoFar | None) -> Link[L]:
        """A new engine request."""

    def _become(self, state: SessionState) -> None:
        self._tell(state.token_ids)
        self._state = state

    def _tell(self, token_ids: Sequence[int], answer: AnswerSoFar | None = None) -> None:
        """Make the engine hold these ids, and answer them. Raises EngineDead."""
        # An answer that took all the room can be longer in ids once it was cut within a token. Nothing can follow it.
        token_ids = token_ids[: self._state.max_model_len]
        link = self._link
        if link is not None and link.is_usable:
            try:
                link.tell(token_ids, answer)
                return
            except BaseException as error:
                has_ended = isinstance(error, ParameterError) and not link.is_usable
                self._drop_link()  # who knows what it holds now
                if not has_ended:
                    raise
        # There is none, or it has ended, maybe just now: another one is told all.
        self._drop_link()
        if token_ids:
            self._link = self._open(token_ids, answer)

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.drop()
        self._link = None

    def _forked_state(self) -> SessionState:
        """Of a session that goes on from here by itself, with what was delivered of an answer."""
        self._state.check_open("fork")
        if self._answer is None:
            return self._state
        return self._state.answered(self._answer.so_far.delivered(FinishReason.ABORT))

    def _share(self, link: Link[L] | None, connect: Callable[[L, Handler, int], L]) -> None:
        """At the begin: take over what the engine has computed of another session, as far as it is the same; `connect`
        forks a line at a number of tokens. Raises EngineDead."""
        if link is not None and link.is_usable:
            with contextlib.suppress(ParameterError):  # it has ended just now
                self._link = link.fork(partial(connect, link.line), self.token_ids)
        try:
            self._tell(self.token_ids)
        except BaseException:
            self._drop_link()
            raise

    def _end_answer(self, answer: A, reason: FinishReason | None) -> CompletionOutput:
        """What was delivered is history, whether the engine still lives or not."""
        output = answer.so_far.delivered(reason)
        self._state = self._state.answered(output)
        self._answer = None
        answer.so_far.end()
        with contextlib.suppress(FailedError):  # the next operation tells it again, or says so
            self._tell(self.token_ids)
        return output

    def _answer_was_read(self, answer: A) -> None:
        """To its end, or to its error."""
        if self._answer is answer:
            self._end_answer(answer, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
