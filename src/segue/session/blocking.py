"""`BlockingSession`: a live session for scripts, on an `LLM`. One thread, one answer at a time."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import datetime

from segue.answers.outputs import CompletionOutput, Delta
from segue.contract.reports import EngineOutput, EngineSnapshot, FinishReason
from segue.errors import EngineDead
from segue.host.stepping import SharedSteps
from segue.sample.params import SamplingParams
from segue.session.answer import AnswerSoFar
from segue.session.core import LiveSession, SessionAnswer
from segue.session.link import Handler, Link
from segue.session.state import SessionState
from segue.session.turns import first_turn
from segue.tokens import Tokenizer
from segue.tokens.chat import Message


def open_session(
    steps: SharedSteps, tokenizer: Tokenizer, messages: Sequence[Message] | None, role: str, session_id: str
) -> "BlockingSession":
    """A new session; see `LLM.session`."""
    turn = first_turn(tokenizer, messages, role, datetime.now)
    state = SessionState(turn=turn, max_model_len=steps.engine.config.max_model_len)
    return BlockingSession(steps, tokenizer, state, session_id)


class _Line:
    """A request of an engine of this thread."""

    def __init__(self, steps: SharedSteps, request_id: str, handler: Handler) -> None:
        self.request_id = request_id
        self.is_open = True
        self._steps = steps
        self._handler = handler
        steps.open(request_id, self._receive)

    def truncate(self, num_tokens: int) -> None:
        self._steps.engine.truncate(self.request_id, num_tokens)

    def add_chunk(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        engine = self._steps.engine
        engine.add_chunk(self.request_id, engine.intake.chunk(token_ids, params), params)

    def abort(self) -> None:
        self.is_open = False
        self._steps.close(self.request_id)
        with contextlib.suppress(EngineDead):
            self._steps.engine.abort_request(self.request_id)

    def ask_snapshot(self) -> "Future[EngineSnapshot]":
        """As `EngineClient.ask_snapshot`, of this request."""
        return self._steps.engine.ask_snapshot(self.request_id)

    def _receive(self, output: EngineOutput | EngineDead) -> None:
        if isinstance(output, EngineDead) or output.finished:
            self.is_open = False
        self._handler(output)


class BlockingSession(LiveSession["BlockingAnswer", _Line]):
    """The methods of `Session`; input is computed before they return. Errors leave the session as it was."""

    def __init__(
        self, steps: SharedSteps, tokenizer: Tokenizer, state: SessionState, session_id: str
    ) -> None:
        super().__init__(session_id, state)
        self._steps = steps
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    def fork(self) -> "BlockingSession":
        """A session that goes on from here by itself and shares what is computed. An answer that is being read goes
        on; the fork's history has what was read of it. Raises SessionClosed, EngineDead."""
        state = self._forked_state()
        fork = BlockingSession(self._steps, self._tokenizer, state, f"{self.id}/fork-{next(self._numbers)}")
        fork._share(self._link, fork._fork_line)
        return fork

    # --- for the answer ---------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let the engine do something. Raises EngineDead when there is nothing to do, or no engine."""
        if not self._steps.engine.has_unfinished_requests():
            raise EngineDead("the engine lost its requests: make a new LLM")
        self._steps.step()

    def answer_was_read(self, answer: "BlockingAnswer") -> None:
        """To its end, or to its error."""
        self._answer_was_read(answer)

    # --- how it reaches its engine ----------------------------------------------------------------------------

    @property
    def _vocab_size(self) -> int:
        return self._steps.engine.intake.vocab_size

    def _new_answer(self, params: SamplingParams) -> "BlockingAnswer":
        return BlockingAnswer(self, self._tokenizer, params)

    def _open(self, token_ids: Sequence[int], answer: AnswerSoFar | None) -> Link[_Line]:
        def connect(handler: Handler) -> _Line:
            engine = self._steps.engine
            submission = engine.intake.submission(
                token_ids,
                None if answer is None else answer.params,
                request_id=engine.intake.new_id(self.id),
                resumable=True,
                keep="all",
            )
            line = _Line(self._steps, submission.request_id, handler)
            try:
                engine.add_request(submission)
            except BaseException:
                line.abort()
                raise
            return line

        return Link(connect, token_ids, answer)

    def _fork_line(self, source: _Line, handler: Handler, num_tokens: int) -> _Line:
        engine = self._steps.engine
        line = _Line(self._steps, engine.intake.new_id(self.id), handler)
        seed = engine.intake.next_seed()
        try:
            engine.fork(source.request_id, line.request_id, num_tokens, default_seed=seed)
        except BaseException:
            line.abort()
            raise
        return line

    def _become(self, state: SessionState) -> None:
        """Also computes what is new, as far as it can be before what follows."""
        self._tell(state.token_ids)
        link = self._link
        question: Future[EngineSnapshot] | None = None
        while link is not None and self._steps.engine.has_unfinished_requests():
            question = question or link.line.ask_snapshot()
            if question.done():
                if [each.state for each in question.result().requests] == ["idle"]:
                    break
                question = None
            self._steps.step()
            if link.error is not None:
                raise link.error
        self._state = state


class BlockingAnswer(SessionAnswer, Iterator[Delta]):
    """A session's answer; each `next` runs the engine until there is more of it."""

    def __init__(self, session: BlockingSession, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._session = session
        self.so_far = AnswerSoFar(session.id, tokenizer, params, lambda: None)

    def __next__(self) -> Delta:
        """Raises RequestFailed, EngineDead; what was read until then is history, and nothing more comes."""
        so_far = self.so_far
        while (delta := so_far.take()) is None:
            if so_far.is_over:
                raise StopIteration
            try:
                if so_far.error is not None:
                    raise so_far.error
                self._session.step()
            except Exception:
                self._session.answer_was_read(self)
                so_far.end()
                raise
        if so_far.is_over:
            self._session.answer_was_read(self)
        return delta

    def read(self, reason: FinishReason | None = None) -> CompletionOutput:
        """What has been read. `reason`: why it ends there, if not by itself."""
        return self.so_far.delivered(reason)

    def text(self) -> str:
        """Read the answer to its end; its text."""
        for _ in self:
            pass
        return self.read().text
