"""A conversation with an engine in this process.

The turns are one live session; beside it there is a fork from before each turn, so that undoing a turn gives back
exactly the history that was there. Forks share KV blocks with the session, and give them up when room is needed.
"""

from collections.abc import Sequence

from segue.cli.talk.backend import Reply, ReplyClock, ReplyEnd, ReplyStats, Turn
from segue.contract.reports import FinishReason
from segue.interrupts import DeferredInterrupt
from segue.llm.llm import LLM
from segue.sample.params import SamplingParams
from segue.session.blocking import BlockingAnswer, BlockingSession


class LocalBackend:
    """Implements `ChatBackend`."""

    def __init__(self, llm: LLM, model: str, system: str | None) -> None:
        self.model = model
        self.max_model_len: int | None = llm.config.max_model_len
        self._llm = llm
        self._session = llm.session(_opening(system))
        self._before: list[BlockingSession] = []
        """One for each turn."""

    @property
    def session(self) -> BlockingSession:
        """The turns so far."""
        return self._session

    def reply(self, text: str, params: SamplingParams) -> Reply:
        return _LocalReply(self, text, params)

    def fork(self) -> None:
        """A turn is about to begin: `undo` forgets it."""
        with DeferredInterrupt():
            self._before.append(self._session.fork())

    def undo(self) -> None:
        with DeferredInterrupt():
            self._session.close()
            self._session = self._before.pop()

    def restart(self, system: str | None, turns: Sequence[Turn]) -> None:
        messages = _opening(system)
        sessions = [self._llm.session(messages)]
        for turn in turns:
            messages = [*messages, *turn.messages]
            sessions.append(self._llm.session(messages))
        with DeferredInterrupt():
            for session in (*self._before, self._session):
                session.close()
            *self._before, self._session = sessions


class _LocalReply:
    """Implements `Reply`."""

    def __init__(self, backend: LocalBackend, text: str, params: SamplingParams) -> None:
        self._backend = backend
        self._text = text
        self._params = params
        self._clock = ReplyClock()
        self._answer: BlockingAnswer | None = None
        self._num_prompt_tokens = 0
        self._num_chars = 0
        """Of the text that was read."""

    @property
    def is_begun(self) -> bool:
        return self._answer is not None

    def begin(self) -> None:
        self._backend.fork()
        session = self._backend.session
        try:
            # Long input is computed here, and can be interrupted between two steps.
            session.append(self._text)
            with DeferredInterrupt():
                self._answer = session.respond(self._params)
                self._num_prompt_tokens = len(session.token_ids)
        except BaseException:
            self._answer = None
            self._backend.undo()
            raise

    def __next__(self) -> str:
        assert self._answer is not None, "begin comes first"
        delta = next(self._answer)
        self._clock.tick()
        self._num_chars += len(delta.text)
        return delta.text

    def stop(self) -> str:
        answer = self._backend.session.interrupt()
        # The start of a character that was held back while the rest of it had not come.
        return "" if answer is None else answer.text[self._num_chars :]

    @property
    def stats(self) -> ReplyStats:
        assert self._answer is not None, "begin comes first"
        answer = self._answer.read(None)
        match answer.finish_reason:
            case FinishReason.STOP:
                end = ReplyEnd.COMPLETE
            case FinishReason.LENGTH:
                end = ReplyEnd.CUT_OFF
            case _:
                end = ReplyEnd.STOPPED
        return ReplyStats(
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=len(answer.token_ids),
            time_to_first_token_s=self._clock.time_to_first_token_s,
            decode_s=self._clock.decode_s,
            end=end,
        )


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]
