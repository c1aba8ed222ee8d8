"""What a conversation needs of the place that answers: this process, or a server."""

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from segue.sample.params import SamplingParams


class ReplyEnd(StrEnum):
    """Why an answer ended."""

    COMPLETE = "complete"
    CUT_OFF = "cut off"
    """By `max_tokens` or `max_model_len`."""
    STOPPED = "stopped"
    """By the user."""


class ReplyStats(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer was given."""

    num_prompt_tokens: int
    """All that the model read for it."""
    num_tokens: int
    """Of the answer, with the one that ended it."""
    time_to_first_token_s: float | None
    """From the moment the turn was sent; None without a token."""
    decode_s: float
    """From the first token to the last."""
    end: ReplyEnd

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None when there are none."""
        return (self.num_tokens - 1) / self.decode_s if self.num_tokens > 1 and self.decode_s > 0 else None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What the user said and what was answered, as far as it was shown."""

    text: str
    answer: str
    stats: ReplyStats
    seed: int
    """With which the answer was drawn."""

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}, {"role": "assistant", "content": self.answer}]


class ReplyClock:
    """When an answer's tokens came, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._sent_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._sent_s

    def tick(self) -> None:
        """Something came."""
        self._last_s = time.monotonic()
        if self._first_s is None:
            self._first_s = self._last_s

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self._first_s is None else self._first_s - self._sent_s

    @property
    def decode_s(self) -> float:
        return 0.0 if self._first_s is None else self._last_s - self._first_s


class Reply(Protocol):
    """One answer, read in pieces."""

    @property
    def is_begun(self) -> bool:
        """Whether the turn was taken."""
        ...

    def begin(self) -> None:
        """Send the turn, and wait until all of it is taken. An error or Ctrl-C leaves the conversation as it was;
        else the turn is its last one, with what was read of the answer."""
        ...

    def __next__(self) -> str:
        """The next piece of text; "" when there is none yet, after a moment. Not to be cut in two by Ctrl-C. Raises
        RequestFailed when the answer cannot go on: the turn is then to be undone."""
        ...

    def stop(self) -> str:
        """End the answer, at any moment. Returns what belongs to it and was not read yet."""
        ...

    @property
    def stats(self) -> ReplyStats:
        """Once it has ended."""
        ...


class ChatBackend(Protocol):
    """A conversation's turns, as the model knows them."""

    @property
    def model(self) -> str:
        """Its name."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """How long the conversation can become, in tokens; None: the server does not tell."""
        ...

    def reply(self, text: str, params: SamplingParams) -> Reply:
        """The answer to a user's turn. Nothing happens before `begin`."""
        ...

    def undo(self) -> None:
        """Forget the last turn."""
        ...

    def restart(self, system: str | None, turns: Sequence[Turn]) -> None:
        """Only these turns, the first ones of the conversation, with this system message (None: none).
        Raises UsageError, and leaves the conversation as it was, when the model's template has no such message."""
        ...
