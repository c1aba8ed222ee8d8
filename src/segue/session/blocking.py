"""`BlockingSession`: a live session for scripts, on an `LLM`. One thread, one answer at a time."""

import itertools
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Self

from segue.engine.client import EngineClient
from segue.engine.outputs import EngineOutput, FinishReason
from segue.errors import RequestFailed
from segue.interrupts import DeferredInterrupt
from segue.output_processor import OutputProcessor
from segue.outputs import CompletionOutput, Delta
from segue.sample.params import SamplingParams
from segue.session.state import Command, Extend, Phase, SessionState, Truncate
from segue.session.turns import ChatTurn, RawTurn, TurnText
from segue.tokens import Tokenizer
from segue.tokens.chat import Message


def open_session(
    engine: EngineClient, tokenizer: Tokenizer, messages: Sequence[Message] | None, role: str, session_id: str
) -> "BlockingSession":
    """A new session; see `LLM.session`."""
    turn: TurnText = (
        RawTurn(tokenizer) if messages is None else ChatTurn(tokenizer, messages, role, datetime.now())
    )
    state = SessionState(turn, max_model_len=engine.config.max_model_len)
    return BlockingSession(engine, tokenizer, state, session_id)


class BlockingSession:
    """The methods of `Session`; input is computed before they return. Errors leave the session as it was."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, state: SessionState, session_id: str
    ) -> None:
        self.id = session_id
        self._engine = engine
        self._tokenizer = tokenizer
        self._state = state
        self._numbers = itertools.count()
        self._request_id: str | None = None
        """The engine's; None while it has nothing of this session."""
        self._answer: BlockingAnswer | None = None

    @property
    def text(self) -> str:
        """Of the turn that has not been answered yet."""
        return self._state.text

    @property
    def token_ids(self) -> list[int]:
        """The history: what the model has seen or will see before anything that is said next."""
        return [*self._state.kept, *self._state.sent]

    def append(self, text: str | bytes) -> None:
        """More text for the open turn; bytes are UTF-8 and may end within a character."""
        self._send(self._state.append(text))

    def revise(self, text: str) -> None:
        """Replace the open turn's text: only what differs is computed again."""
        self._send(self._state.revise(text))

    def set_role(self, role: str) -> None:
        """Who speaks the open turn, before its first text."""
        self._state.set_role(role)

    def commit(self) -> None:
        """The turn is complete."""
        self._send(self._state.commit())

    def reopen(self) -> None:
        """Take back a commit, to append or revise after all."""
        self._state.reopen()

    def respond(self, params: SamplingParams | None = None) -> "BlockingAnswer":
        """Answer the turn: `for delta in session.respond(params)`. Read it to its end, or interrupt, before
        anything else runs on this LLM."""
        params = params or SamplingParams(max_tokens=None)
        params.check_vocab(self._engine.vocab_size)
        commands = self._state.respond(params)
        self._answer = BlockingAnswer(self, self._tokenizer, params)
        self._tell(commands)
        return self._answer

    def interrupt(self) -> CompletionOutput | None:
        """End the answer: what was read of it is kept, and nothing else. Returns that; None without an answer."""
        if self._answer is None:
            return None
        return self.end_answer(self._answer.read(FinishReason.ABORT))

    def fork(self) -> "BlockingSession":
        """A session that goes on from here by itself and shares what is computed."""
        state = self._state.fork()
        if self._answer is not None:
            state.answered(self._answer.read(FinishReason.ABORT))
        fork = BlockingSession(self._engine, self._tokenizer, state, f"{self.id}/fork-{next(self._numbers)}")
        if self._request_id is not None and state.num_history_tokens:
            fork._request_id = fork._new_request_id()
            self._engine.fork(self._request_id, fork._request_id, state.num_history_tokens)
        return fork

    def close(self) -> None:
        """Forget the session. May be called again."""
        if self._state.phase is not Phase.CLOSED:
            self._answer = None
            self._state.close()
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- for the answer ---------------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """One step of the engine; the outputs of this session. Raises RequestFailed when its request failed."""
        with DeferredInterrupt():
            outputs = [each for each in self._engine.step() if each.request_id == self._request_id]
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                # The session has its ids; the next command starts anew with them.
                self._drop()
                raise RequestFailed(output.error or "the request failed")
        return outputs

    def end_answer(self, answer: CompletionOutput) -> CompletionOutput:
        """What was read is history; the engine forgets the rest."""
        self._answer = None
        self._send(self._state.answered(answer))
        return answer

    def _send(self, commands: Sequence[Command]) -> None:
        """Tell the engine, and let it compute."""
        self._tell(commands)
        while self._engine.has_unfinished_requests():
            self.step()

    def _tell(self, commands: Sequence[Command]) -> None:
        if self._request_id is None:
            if self._state.num_history_tokens:
                params = commands[-1].params if commands and isinstance(commands[-1], Extend) else None
                self._request_id = self._new_request_id()
                self._engine.add_request(self._request_id, self.token_ids, params, resumable=True, keep="all")
            return
        for command in commands:
            match command:
                case Truncate(num_tokens):
                    self._engine.truncate(self._request_id, num_tokens)
                case Extend(token_ids, params):
                    self._engine.add_chunk(self._request_id, token_ids, params)

    def _new_request_id(self) -> str:
        return f"{self.id}/{next(self._numbers)}"

    def _drop(self) -> None:
        if self._request_id is not None:
            self._engine.abort_request(self._request_id)
            self._request_id = None


class BlockingAnswer(Iterator[Delta]):
    """A session's answer; each `next` runs the engine until there is more of it."""

    def __init__(self, session: BlockingSession, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._session = session
        self._processor = OutputProcessor(tokenizer)
        self._processor.add(session.id, prompt=None, prompt_token_ids=(), params=params)
        self._is_over = False

    def __next__(self) -> Delta:
        if self._is_over:
            raise StopIteration
        while True:
            try:
                outputs = self._session.step()
            except RequestFailed:
                self._is_over = True
                self._session.end_answer(self.read(FinishReason.ABORT))
                raise
            for output in outputs:
                output.request_id = self._session.id
            deltas = self._processor.process(outputs).deltas
            if deltas:
                break
        (delta,) = deltas
        if delta.finish_reason is not None:
            self._is_over = True
            self._session.end_answer(self.read(None))
        return delta

    def read(self, reason: FinishReason | None) -> CompletionOutput:
        """What has been read. `reason`: why it ends there, if not by itself."""
        if reason is not None:
            self._is_over = True
        answer = self._processor.output(self._session.id).outputs[0]
        if reason is not None:
            answer.finish_reason, answer.stop_reason = reason, None
        return answer

    def text(self) -> str:
        """Read the answer to its end; its text."""
        for _ in self:
            pass
        return self.read(None).text
