"""Token ids to text while they arrive: only what no later token can change is shown."""

import codecs
from collections.abc import Sequence

from segue.tokens.stop import StopMatch, StopMatcher
from segue.tokens.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer, piece by piece.

    What the `push`es and `finish` return, joined, is `tokenizer.decode` of all the ids, or what of it comes
    before the first stop string. How the ids are split over pushes changes nothing. Held back meanwhile: the
    bytes of a character that is not complete, and text that may become a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """A stop string counts where it begins after the text of the first `min_tokens` tokens."""
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        """Text that may become a stop string."""
        self._num_released = 0
        self._num_tokens = 0
        """Tokens pushed; counted only when there are stop strings."""
        self._match: StopMatch | None = None
        self._num_tokens_at_stop: int | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text: the first to be complete; of several at once, the longest."""
        return None if self._match is None else self._match.stop

    @property
    def num_tokens_at_stop(self) -> int | None:
        """How many of the pushed tokens make up the text through the stop string."""
        return self._num_tokens_at_stop

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became safe to show; empty after a stop. Raises ParameterError for an unknown id."""
        if self._matcher is None:
            return self._utf8.decode(b"".join([self._bytes(i) for i in token_ids]))
        shown: list[str] = []
        for token_id in token_ids:
            if self._match is not None:
                break
            self._num_tokens += 1
            shown.append(self._take(self._utf8.decode(self._bytes(token_id)), self._matcher))
        return "".join(shown)

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD. Nothing may be pushed after it."""
        if self._match is not None:
            return ""
        rest = self._utf8.decode(b"", final=True)
        if self._matcher is None:
            return rest
        shown = self._take(rest, self._matcher)
        return shown + self._release(len(self._held))

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)

    def _take(self, text: str, matcher: StopMatcher) -> str:
        """Takes more text, before any match. Returns what may be shown."""
        return text if self._num_tokens <= self._min_tokens else self._advance(text, matcher)

    def _advance(self, text: str, matcher: StopMatcher) -> str:
        """The same, of text in which a stop string counts."""
        self._match = matcher.feed(text)
        self._held += text
        if self._match is None:
            return self._release(len(self._held) - matcher.num_held)
        self._num_tokens_at_stop = self._num_tokens
        end = self._match.end if self._include_stop else self._match.start
        shown = self._release(end - self._num_released)
        self._held = ""
        return shown

    def _release(self, num_chars: int) -> str:
        shown, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_released += num_chars
        return shown
