"""A live session: text that arrives, is revised, committed, answered, interrupted and forked, at any moment.

    append ─┐                        ┌────────── interrupt ◀─┐
    revise ─┴─▶ open turn ─commit─▶ committed ─respond─▶ answering ─▶ open turn …

The engine has the token ids of the history and, while a turn is open, those of its text so far, prefilled as they
come. `SessionState` holds what the engine has been told and works out the fewest commands that make it what the
text now says; it does no I/O, so the asynchronous and the synchronous session share it.

Invariant: what the engine holds is `kept + sent`; `kept` ends with the last answer as far as it was delivered.
"""

import codecs
from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from segue.engine.outputs import FinishReason
from segue.errors import CapacityError, ParameterError, SessionClosed, SessionError, UsageError
from segue.outputs import CompletionOutput
from segue.sample.params import SamplingParams
from segue.session.turns import TurnText


class Phase(Enum):
    OPEN = auto()
    """The turn's text may change."""
    COMMITTED = auto()
    ANSWERING = auto()
    CLOSED = auto()


class Truncate(msgspec.Struct, frozen=True):
    """Cut the engine's history to its first `num_tokens` ids."""

    num_tokens: int


class Extend(msgspec.Struct, frozen=True):
    """Add ids; with `params`, answer."""

    token_ids: list[int]
    params: SamplingParams | None


Command = Truncate | Extend


class SessionState:
    """What a session's text is, and what its engine request holds of it."""

    def __init__(self, turn: TurnText, *, max_model_len: int) -> None:
        self.phase = Phase.OPEN
        self.kept: list[int] = []
        """History: complete turns and their answers, as far as they were delivered."""
        self.sent: list[int] = []
        """What the engine has after that: the open turn, as far as its text was known."""
        self.text = ""
        """Of the turn that is not answered yet."""
        self.why_closed = ""
        self._turn = turn
        self._max_model_len = max_model_len
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    @property
    def num_history_tokens(self) -> int:
        """How many ids the engine has been told, the open turn included."""
        return len(self.kept) + len(self.sent)

    def append(self, text: str | bytes) -> list[Command]:
        """More text for the open turn. Bytes may end within a UTF-8 character; the rest must follow."""
        self._require(Phase.OPEN, "append")
        state = self._decoder.getstate()
        more = self._decode(text)
        try:
            return self._change(self.text + more)
        except UsageError:
            self._decoder.setstate(state)
            raise

    def revise(self, text: str) -> list[Command]:
        """Replace the open turn's text. What it has in common with the text before stays computed."""
        self._require(Phase.OPEN, "revise")
        commands = self._change(text)
        self._decoder.reset()
        return commands

    def commit(self) -> list[Command]:
        """The turn is complete: prefill all of it, up to where the answer begins."""
        self._require(Phase.OPEN, "commit")
        if self._decoder.getstate()[0]:
            raise ParameterError("text", self._decoder.getstate()[0], "ends within a UTF-8 character")
        commands = self._sync(self._turn.closed_ids(self.text))
        self.phase = Phase.COMMITTED
        return commands

    def respond(self, params: SamplingParams) -> list[Command]:
        """Answer the turn, which is committed first if it is still open."""
        if params.n != 1:
            raise ParameterError("n", params.n, "a session has one answer; fork it for more")
        if params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", params.prompt_logprobs, "not in a session")
        if self.phase is Phase.ANSWERING:
            raise SessionError(
                "respond: the session is answering; read the answer to its end or interrupt it"
            )
        commands = self.commit() if self.phase is Phase.OPEN else []
        self._require(Phase.COMMITTED, "respond")
        if self.num_history_tokens == 0:
            self.phase = Phase.OPEN
            raise SessionError("respond: there is nothing to answer; append some text")
        if self.num_history_tokens >= self._max_model_len:
            self.phase = Phase.OPEN
            raise self._too_long(self.num_history_tokens + 1)
        self.phase = Phase.ANSWERING
        match commands:
            case [*before, Extend(rest)]:
                return [*before, Extend(rest, params)]
            case _:
                return [*commands, Extend([], params)]

    def answered(self, answer: CompletionOutput) -> list[Command]:
        """The answer ended or was interrupted: what was delivered of it is history now.

        The token that ended it is not part of it. Returns what makes the engine forget what was not delivered.
        """
        assert self.phase is Phase.ANSWERING
        ids = list(answer.token_ids)
        if answer.finish_reason is FinishReason.STOP and not isinstance(answer.stop_reason, str):
            ids.pop()
        self.kept = [*self.kept, *self.sent, *ids]
        self.sent = []
        self._turn = self._turn.answered(self.text, answer.text)
        self.text = ""
        self.phase = Phase.OPEN
        return [Truncate(len(self.kept))]

    def fork(self) -> "SessionState":
        """A session that goes on from here by itself. Only between answers."""
        other = SessionState(self._turn, max_model_len=self._max_model_len)
        other.phase, other.kept, other.sent, other.text = self.phase, self.kept, self.sent, self.text
        other._decoder.setstate(self._decoder.getstate())
        return other

    def set_role(self, role: str) -> None:
        """Who speaks the open turn; before its first text. Raises SessionError, ParameterError."""
        self._require(Phase.OPEN, "role")
        if self.text:
            raise SessionError("role: the turn has begun; revise its text to nothing first")
        self._turn = self._turn.with_role(role)

    def reopen(self) -> None:
        """Take back a commit: the turn may change again."""
        self._require(Phase.COMMITTED, "reopen")
        self.phase = Phase.OPEN

    def close(self, why: str = "the session is closed") -> None:
        """Refuse everything from here on, and say why."""
        if self.phase is not Phase.CLOSED:
            self.phase, self.why_closed = Phase.CLOSED, why

    def _require(self, phase: Phase, operation: str) -> None:
        if self.phase is Phase.CLOSED:
            raise SessionClosed(f"{operation}: {self.why_closed}; open another session")
        if self.phase is Phase.ANSWERING:
            raise SessionError(
                f"{operation}: the session is answering; read the answer to its end or interrupt it"
            )
        if self.phase is not phase:
            raise SessionError(f"{operation}: the turn is committed; respond, or reopen it")

    def _decode(self, text: str | bytes) -> str:
        if isinstance(text, str):
            if self._decoder.getstate()[0]:
                raise ParameterError("text", text, "the bytes before it end within a UTF-8 character")
            return text
        try:
            return self._decoder.decode(text)
        except UnicodeDecodeError as error:
            raise ParameterError("text", text[error.start : error.end], "is not valid UTF-8") from None

    def _change(self, text: str) -> list[Command]:
        commands = self._sync(self._turn.open_ids(text))
        self.text = text
        return commands

    def _sync(self, ids: list[int]) -> list[Command]:
        """The commands after which the engine has `ids` for this turn."""
        if len(self.kept) + len(ids) > self._max_model_len:
            raise self._too_long(len(self.kept) + len(ids))
        common = common_prefix_len(self.sent, ids)
        commands: list[Command] = []
        if common < len(self.sent):
            commands.append(Truncate(len(self.kept) + common))
        if common < len(ids):
            commands.append(Extend(ids[common:], None))
        self.sent = ids
        return commands

    def _too_long(self, num_tokens: int) -> CapacityError:
        return CapacityError(
            f"the session would have {num_tokens} tokens, more than max_model_len={self._max_model_len} "
            "leaves room for: shorten the input or start a new session"
        )


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items are equal."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
