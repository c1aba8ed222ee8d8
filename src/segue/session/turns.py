"""How the text of a session's turns becomes token ids."""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from segue.errors import SessionError
from segue.tokens import Tokenizer
from segue.tokens.chat import Message, encode_chat, encode_head, encode_turn
from segue.tokens.incremental import IncrementalEncoder


class TurnText(Protocol):
    """How the text of turns becomes token ids, after the ids that are kept."""

    def open_ids(self, text: str) -> list[int]:
        """Ids of an open turn with this text so far; its continuations change at most the last few."""
        ...

    def closed_ids(self, text: str) -> list[int]:
        """Ids of the complete turn, up to where the answer begins."""
        ...

    def answered(self, text: str, answer: str) -> "TurnText":
        """The turn after this one."""
        ...

    def with_role(self, role: str) -> "TurnText":
        """The same turn, spoken by somebody else. Raises SessionError where there are no roles."""
        ...


class RawTurn:
    """Text as it is, without a template. Control tokens in it stay text."""

    def __init__(self, tokenizer: Tokenizer, *, is_first: bool = True) -> None:
        self._tokenizer = tokenizer
        # BOS, where the model wants one, stands before the first text and depends on nothing else.
        self._head = tokenizer.encode("", add_special_tokens=True)[:1] if is_first else []
        self._encoder = IncrementalEncoder(tokenizer.encode)

    def open_ids(self, text: str) -> list[int]:
        return self._head + self._encoder.encode(text)

    def closed_ids(self, text: str) -> list[int]:
        return self._head + self._tokenizer.encode(text)

    def answered(self, text: str, answer: str) -> "RawTurn":
        return RawTurn(self._tokenizer, is_first=False)

    def with_role(self, role: str) -> "RawTurn":
        raise SessionError(
            f"role={role!r}: this session is plain text and has no roles; open one with messages"
        )


class ChatTurn:
    """A turn of a conversation in the model's chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        role: str,
        now: datetime,
        *,
        num_kept: int = 0,
    ) -> None:
        """`messages` are all before this turn. The engine has the first `num_kept` of them, up to the end of the
        last one's text, an answer; 0: it has nothing. `now` is the time that the template may tell."""
        self._tokenizer = tokenizer
        self._messages = tuple(messages)
        self._role = role
        self._now = now
        self._after = num_kept - 1 if num_kept else None
        self._encoder = IncrementalEncoder(tokenizer.encode)
        self._head_ids, self._head_text = encode_head(tokenizer, self._with(""), after=self._after, now=now)

    def open_ids(self, text: str) -> list[int]:
        return self._head_ids + self._encoder.encode(self._head_text + text)

    def closed_ids(self, text: str) -> list[int]:
        messages = self._with(text)
        if self._after is None:
            return encode_chat(self._tokenizer, messages, now=self._now)
        return encode_turn(self._tokenizer, messages, after=self._after, now=self._now)

    def answered(self, text: str, answer: str) -> "ChatTurn":
        messages = [*self._with(text), {"role": "assistant", "content": answer}]
        return ChatTurn(self._tokenizer, messages, self._role, self._now, num_kept=len(messages))

    def with_role(self, role: str) -> "ChatTurn":
        """The same turn, spoken by somebody else."""
        num_kept = 0 if self._after is None else self._after + 1
        return ChatTurn(self._tokenizer, self._messages, role, self._now, num_kept=num_kept)

    def _with(self, text: str) -> list[Message]:
        return [*self._messages, {"role": self._role, "content": text}]
