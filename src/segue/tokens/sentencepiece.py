"""SentencePiece's BPE with byte fallback (Kudo & Richardson 2018), as in GGUF's vocabularies "llama".

A space is written ▁. Starting from single characters, the neighbours whose union is the token with the highest score
are joined, of equals the leftmost, until no union is a token; a character without a token becomes its UTF-8 bytes.
Tokens that are structure, a byte or unknown are no such unions.
"""

import heapq
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from segue.tokens.vocabulary import Vocabulary

SPACE = "▁"
_CACHED_WORDS = 1 << 16
_LONGEST_CACHED = 64
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SentencePieceBPE:
    """Text without special tokens to ids, and a token to its bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        # Text never becomes structure: neither by joining "</" and "s>", nor by spelling "<0x0A>".
        structure = vocabulary.control_ids | vocabulary.byte_ids | {vocabulary.unknown_token_id}
        self._ids = {token: i for token, i in vocabulary.ids.items() if i not in structure}
        self._scores = vocabulary.scores
        self._bytes = _bytes_of(vocabulary)
        self._ids_of_bytes = {byte: token_id for token_id, byte in self._bytes.items()}
        self._unknown = vocabulary.unknown_token_id
        joining = {char for token in self._tokens for char in re.findall(rf"([^{SPACE}]){SPACE}", token)}
        # No token reaches over such a place, so what is on either side of it is encoded alone.
        before = f"[^{SPACE}{re.escape(''.join(sorted(joining)))}]"
        self._word_ends = re.compile(rf"(?<={before})(?={SPACE})")
        self.words_stand_alone = not any(char.isalpha() for char in joining)
        """Whether a space between two letters is always such a place."""
        self._cached_ids = lru_cache(_CACHED_WORDS)(self._word_ids)

    def encode(self, text: str) -> list[int]:
        """Raises UnicodeEncodeError for a text with a lone surrogate."""
        text.encode()
        ids: list[int] = []
        for word in self._word_ends.split(text.replace(" ", SPACE)):
            ids += self._cached_ids(word) if len(word) <= _LONGEST_CACHED else self._word_ids(word)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        byte = self._bytes.get(token_id)
        return self._tokens[token_id].replace(SPACE, " ").encode() if byte is None else bytes([byte])

    def _word_ids(self, word: str) -> Sequence[int]:
        ids: list[int] = []
        for part in _merge(word, self._ids, self._scores):
            token_id = self._ids.get(part)
            if token_id is not None:
                ids.append(token_id)
            else:
                ids += self._fallback(part)
        return ids

    def _fallback(self, part: str) -> list[int]:
        found = [self._ids_of_bytes.get(byte) for byte in part.replace(SPACE, " ").encode()]
        if None in found:
            return [] if self._unknown is None else [self._unknown]
        return [token_id for token_id in found if token_id is not None]


def _merge(text: str, ids: Mapping[str, int], scores: Sequence[float]) -> list[str]:
    """The parts of a text that are left when nothing can be joined any more."""
    parts: list[str | None] = list(text)
    following = [*range(1, len(parts)), -1]
    preceding = [-1, *range(len(parts) - 1)]
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        first, second = parts[left], parts[right]
        assert first is not None
        assert second is not None
        token_id = ids.get(first + second)
        if token_id is not None:
            heapq.heappush(queue, (-scores[token_id], left, right, first + second))

    for left in range(len(parts) - 1):
        offer(left, left + 1)
    while queue:
        _, left, right, union = heapq.heappop(queue)
        first, second = parts[left], parts[right]
        if first is None or second is None or following[left] != right or first + second != union:
            continue  # one of the two has been joined to another meanwhile
        parts[left], parts[right] = union, None
        following[left] = following[right]
        if following[right] >= 0:
            preceding[following[right]] = left
            offer(left, following[right])
        if preceding[left] >= 0:
            offer(preceding[left], left)
    return [part for part in parts if part is not None]


def _bytes_of(vocabulary: Vocabulary) -> dict[int, int]:
    """The bytes that tokens stand for, by their ids."""
    values: dict[int, int] = {}
    for token_id in vocabulary.byte_ids:
        match = _BYTE.fullmatch(vocabulary.tokens[token_id])
        if match:
            values[token_id] = int(match[1], 16)
    return values
