"""What a live session says: text that arrives, is revised, committed, answered, interrupted and forked, at any moment.

    append ─┐                        ┌────────── interrupt ◀─┐
    revise ─┴─▶ open turn ─commit─▶ committed ─respond─▶ answering ─▶ open turn …

A `SessionState` is a value. Each operation returns the state after it, or raises and there is none: what was true
stays true. It knows nothing of an engine; `link.py` makes what an engine holds equal to `token_ids`.

Invariant: `token_ids` leave room for at least one token of an answer, except right after an answer that took it all.
"""

import codecs
from enum import Enum, auto

import msgspec

from segue.answers.outputs import CompletionOutput
from segue.errors import CapacityError, ParameterError, SessionClosed, SessionError
from segue.sample.params import SamplingParams
from segue.session.turns import TurnText


class Phase(Enum):
    OPEN = auto()
    """The turn's text may change."""
    COMMITTED = auto()
    ANSWERING = auto()
    CLOSED = auto()


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """A session between two operations."""

    turn: TurnText
    """How the text of the turn becomes ids."""
    max_model_len: int
    phase: Phase = Phase.OPEN
    kept: list[int] = []
    """History: complete turns and their answers, as far as they were delivered."""
    turn_ids: list[int] = []
    """What follows: the turn that is not answered yet, as far as its text is known."""
    text: str = ""
    """Of that turn."""
    cut_bytes: bytes = b""
    """The begin of a UTF-8 character that comes after the text; the rest must follow."""
    params: SamplingParams | None = None
    """Of the answer that is being given."""
    why_closed: str = ""

    @property
    def token_ids(self) -> list[int]:
        """What the model has seen or will see before anything that is said next."""
        return self.kept + self.turn_ids

    def append(self, text: str | bytes) -> "SessionState":
        """More text for the open turn. Bytes may end within a UTF-8 character."""
        self._require(Phase.OPEN, "append")
        more, cut_bytes = self._decode(text)
        return msgspec.structs.replace(self._with_text(self.text + more), cut_bytes=cut_bytes)

    def revise(self, text: str) -> "SessionState":
        """Other text in place of the open turn's. None at all can always be had."""
        self._require(Phase.OPEN, "revise")
        if not isinstance(text, str):
            raise ParameterError("text", text, "must be a text")
        return msgspec.structs.replace(self._with_text(text), cut_bytes=b"")

    def with_role(self, role: str) -> "SessionState":
        """Who speaks the open turn; before its first text. Raises SessionError, ParameterError."""
        self._require(Phase.OPEN, "role")
        if self.text or self.cut_bytes:
            raise SessionError("role: the turn has begun; revise its text to nothing first")
        return msgspec.structs.replace(self, turn=self.turn.with_role(role), turn_ids=[])

    def commit(self) -> "SessionState":
        """The turn is complete: its ids go up to where the answer begins."""
        self._require(Phase.OPEN, "commit")
        if self.cut_bytes:
            raise ParameterError("text", self.cut_bytes, "ends within a UTF-8 character")
        ids = self.turn.closed_ids(self.text)
        self._check_room(len(ids))
        return msgspec.structs.replace(self, phase=Phase.COMMITTED, turn_ids=ids)

    def reopen(self) -> "SessionState":
        """Take back a commit: the turn may change again."""
        self._require(Phase.COMMITTED, "reopen")
        return msgspec.structs.replace(self, phase=Phase.OPEN)

    def respond(self, params: SamplingParams) -> "SessionState":
        """Answer the turn, which is committed first if it is still open."""
        if params.n != 1:
            raise ParameterError("n", params.n, "a session has one answer; fork it for more")
        if params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", params.prompt_logprobs, "not in a session")
        if self.phase is Phase.OPEN:
            return self.commit().respond(params)
        self._require(Phase.COMMITTED, "respond")
        if not self.token_ids:
            raise SessionError("respond: there is nothing to answer; append some text")
        return msgspec.structs.replace(self, phase=Phase.ANSWERING, params=params)

    def answered(self, answer: CompletionOutput) -> "SessionState":
        """The answer ended or was interrupted: what was delivered of it is history now, and nothing else; see
        `TurnText.answer_ids`. Never raises."""
        assert self.phase is Phase.ANSWERING
        assert self.params is not None
        return msgspec.structs.replace(
            self,
            phase=Phase.OPEN,
            turn=self.turn.answered(self.text, answer.text),
            kept=self.token_ids + self.turn.answer_ids(answer, self.params),
            turn_ids=[],
            text="",
            params=None,
        )

    def closed(self, why: str) -> "SessionState":
        """Refuses everything from here on, and says why."""
        return msgspec.structs.replace(self, phase=Phase.CLOSED, why_closed=why)

    def check_open(self, operation: str) -> None:
        """Raises SessionClosed."""
        if self.phase is Phase.CLOSED:
            raise SessionClosed(f"{operation}: {self.why_closed}; open another session")

    def _require(self, phase: Phase, operation: str) -> None:
        self.check_open(operation)
        if self.phase is Phase.ANSWERING:
            raise SessionError(
                f"{operation}: the session is answering; read the answer to its end or interrupt it"
            )
        if self.phase is not phase:
            raise SessionError(f"{operation}: the turn is committed; respond, or reopen it")

    def _decode(self, text: str | bytes) -> tuple[str, bytes]:
        """The characters that are complete, and the bytes after them."""
        if isinstance(text, str):
            if self.cut_bytes:
                raise ParameterError("text", text, "the bytes before it end within a UTF-8 character")
            return text, b""
        if not isinstance(text, bytes):
            raise ParameterError("text", text, "must be a text, or bytes of UTF-8")
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            return decoder.decode(self.cut_bytes + text), decoder.getstate()[0]
        except UnicodeDecodeError as error:
            wrong = error.object[error.start : error.end]
            raise ParameterError("text", wrong, "is not valid UTF-8") from None

    def _with_text(self, text: str) -> "SessionState":
        if text:
            ids = self.turn.open_ids(text)
            self._check_room(len(ids) + self.turn.num_closing_ids(text))
        elif self.turn_ids:
            # What stands before the text is computed: it stays, where it fits.
            ids = self.turn.open_ids("")
            ids = ids if len(ids) <= len(self.turn_ids) else []
        else:
            ids = []
        return msgspec.structs.replace(self, text=text, turn_ids=ids)

    def _check_room(self, num_turn_ids: int) -> None:
        """Raises CapacityError where the turn leaves no room for an answer."""
        num_tokens = len(self.kept) + num_turn_ids
        if num_tokens >= self.max_model_len:
            raise CapacityError(
                f"the session would have {num_tokens} tokens, and max_model_len={self.max_model_len} must hold "
                "them and the answer: shorten the input or start a new session"
            )
