"""How the text of a session's turns becomes token ids."""

import codecs
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Protocol

from segue.answers.outputs import CompletionOutput
from segue.contract.reports import FinishReason
from segue.errors import ParameterError, SessionError
from segue.sample.params import SamplingParams
from segue.tokens import Tokenizer
from segue.tokens.chat import Message, encode_chat, encode_head, encode_turn
from segue.tokens.incremental import IncrementalEncoder


class TurnText(Protocol):
    """How the text of turns becomes token ids, after the ids that are kept. A value."""

    def open_ids(self, text: str) -> list[int]:
        """Ids of an open turn with this text so far; its continuations change at most the last few."""
        ...

    def closed_ids(self, text: str) -> list[int]:
        """Ids of the complete turn, up to where the answer begins."""
        ...

    def num_closing_ids(self, text: str) -> int:
        """How many more ids it takes to close the turn; counted once, as they hardly depend on the text."""
        ...

    def answer_ids(self, answer: CompletionOutput, params: SamplingParams) -> list[int]:
        """Ids of the delivered text of an answer that was given with `params`; see `delivered_ids`."""
        ...

    def answered(self, text: str, answer: str) -> "TurnText":
        """The turn after this one. Never raises."""
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
        self._encoder = IncrementalEncoder.of(tokenizer)

    def open_ids(self, text: str) -> list[int]:
        return self._head + self._encoder.encode(text)

    def closed_ids(self, text: str) -> list[int]:
        return self._head + self._tokenizer.encode(text)

    def num_closing_ids(self, text: str) -> int:
        return 0

    def answer_ids(self, answer: CompletionOutput, params: SamplingParams) -> list[int]:
        return delivered_ids(self._tokenizer, answer, params)

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
        self._encoder = IncrementalEncoder.of(tokenizer)
        self._num_closing_ids: int | None = None

    @classmethod
    def checked(
        cls, tokenizer: Tokenizer, messages: Sequence[Message], role: str, now: datetime, *, num_kept: int = 0
    ) -> "ChatTurn":
        """The same. Raises ParameterError for messages that the template does not take, ModelFileError."""
        turn = cls(tokenizer, messages, role, now, num_kept=num_kept)
        _ = turn._head
        return turn

    @cached_property
    def _head(self) -> tuple[list[int], str]:
        """What the template writes before the turn's text: ids, and the plain text after those."""
        return encode_head(self._tokenizer, self._with(""), after=self._after, now=self._now)

    def open_ids(self, text: str) -> list[int]:
        head_ids, head_text = self._head
        return head_ids + self._encoder.encode(head_text + text)

    def closed_ids(self, text: str) -> list[int]:
        messages = self._with(text)
        if self._after is None:
            return encode_chat(self._tokenizer, messages, now=self._now)
        return encode_turn(self._tokenizer, messages, after=self._after, now=self._now)

    def num_closing_ids(self, text: str) -> int:
        if self._num_closing_ids is None:
            self._num_closing_ids = max(0, len(self.closed_ids(text)) - len(self.open_ids(text)))
        return self._num_closing_ids

    def answer_ids(self, answer: CompletionOutput, params: SamplingParams) -> list[int]:
        return delivered_ids(self._tokenizer, answer, params)

    def answered(self, text: str, answer: str) -> "ChatTurn":
        messages = [*self._with(text), {"role": "assistant", "content": answer}]
        return ChatTurn(self._tokenizer, messages, self._role, self._now, num_kept=len(messages))

    def with_role(self, role: str) -> "ChatTurn":
        """The same turn, spoken by somebody else. Errors are those of `checked`."""
        num_kept = 0 if self._after is None else self._after + 1
        return ChatTurn.checked(self._tokenizer, self._messages, role, self._now, num_kept=num_kept)

    def _with(self, text: str) -> list[Message]:
        return [*self._messages, {"role": self._role, "content": text}]


def first_turn(
    tokenizer: Tokenizer, messages: Sequence[Message] | None, role: str, now: Callable[[], datetime]
) -> TurnText:
    """Of a conversation that goes on after `messages`; without them, of plain text. Raises what
    `ChatTurn.checked` raises."""
    if not isinstance(messages, list | tuple | None):
        raise ParameterError("messages", messages, "must be a list of messages")
    if messages is None:
        return RawTurn(tokenizer)
    return ChatTurn.checked(tokenizer, messages, role, now())


def delivered_ids(tokenizer: Tokenizer, answer: CompletionOutput, params: SamplingParams) -> list[int]:
    """The ids of the text of an answer, as far as it was delivered: what becomes history.

    They are the answer's own ids up to the last place between two characters where all that they say was
    delivered. What was delivered beyond it, because a stop string (or what was held back as the possible begin of
    one) begins within a token, is encoded anew. The token that ended the answer only counts if its text was delivered.
    """
    skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
    ids = list(answer.token_ids)
    ended_by_token = answer.finish_reason is FinishReason.STOP and not isinstance(answer.stop_reason, str)
    if ended_by_token and (not params.include_stop_str_in_output or ids[-1] in skipped):
        ids.pop()
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    num_ids, num_chars, num_decoded = 0, 0, 0
    for count, token in enumerate(ids, start=1):
        num_decoded += len(utf8.decode(b"" if token in skipped else tokenizer.token_bytes(token)))
        if num_decoded > len(answer.text):
            break
        if not utf8.getstate()[0]:
            num_ids, num_chars = count, num_decoded
    else:
        if num_decoded + len(utf8.decode(b"", final=True)) == len(answer.text):
            return ids  # with the bytes of a character that stayed incomplete, and was shown as U+FFFD
    return ids[:num_ids] + tokenizer.encode(answer.text[num_chars:], continues=True)
