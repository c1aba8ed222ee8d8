"""Token ids of a text that grows: encoded anew only from a place that what follows cannot change.

All byte-level pre-tokenizers of this field split before a space that follows a visible character and precedes a letter
(their patterns put at most one leading space into a word), and so do SentencePiece's vocabularies, whose tokens hold
such a space at their beginning only. So what is before such a space never changes its tokens, and what is from it on
has the same tokens alone. `tests/tokens` checks this over random texts for every pre-tokenizer; where it should ever
not hold, a session's `commit` encodes the whole turn and corrects it.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from segue.tokens.tokenizer import Tokenizer

_BOUNDARY = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_KEPT_CHARS = 256
"""How much text at the end is encoded again each time, at the least."""


class IncrementalEncoder:
    """Encodes a text that changes at its end."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        encode_rest: Callable[[str], list[int]] | None = None,
        *,
        may_cut: bool = True,
    ) -> None:
        """`encode_rest`: of what follows other text; None: it is the same. Without `may_cut` all is always encoded
        anew."""
        self._encode_first = encode
        self._encode_rest = encode_rest or encode
        self._may_cut = may_cut
        self._fixed_text = ""
        self._fixed_ids: list[int] = []

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> Self:
        rest = partial(tokenizer.encode, continues=True)
        return cls(tokenizer.encode, rest, may_cut=tokenizer.words_stand_alone)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`: those of `encode(text)`, in time that depends on what is new."""
        if not text.startswith(self._fixed_text):
            self._fixed_text, self._fixed_ids = "", []
        if self._may_cut and len(text) - len(self._fixed_text) > 2 * _KEPT_CHARS:
            self._advance(text)
        return self._fixed_ids + self._encode(text[len(self._fixed_text) :])

    def _encode(self, text: str) -> list[int]:
        """What follows the fixed text."""
        return self._encode_rest(text) if self._fixed_text else self._encode_first(text)

    def _advance(self, text: str) -> None:
        """Fix all but the last few words."""
        begin = len(self._fixed_text)
        boundaries = list(_BOUNDARY.finditer(text, begin + 1, len(text) - _KEPT_CHARS))
        if boundaries:
            end = boundaries[-1].start()
            self._fixed_ids = self._fixed_ids + self._encode(text[begin:end])
            self._fixed_text = text[:end]
