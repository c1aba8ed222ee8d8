"""Prompt lookup: what followed the last n ids the last time they occurred (Saxena 2023, "prompt lookup decoding")."""

from array import array
from collections.abc import Sequence

from segue.speculate.drafter import DraftRequest, Proposal


class NgramDrafter:
    """Looks for the longest recent repeat of `min_ngram` to `max_ngram` ids; needs no model."""

    has_kv = False

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    def propose(
        self, requests: Sequence[DraftRequest], copies: Sequence[tuple[int, int]]
    ) -> Sequence[Proposal]:
        return [Proposal(self.lookup(request.token_ids, request.count)) for request in requests]

    def lookup(self, token_ids: "array[int]", count: int) -> "array[int]":
        """Up to `count` ids that followed the latest occurrence of the longest repeated suffix of `token_ids`."""
        data, width = token_ids.tobytes(), token_ids.itemsize
        for length in range(min(self._max_ngram, len(token_ids) - 1), self._min_ngram - 1, -1):
            at = _last_aligned(data, data[-length * width :], len(data) - width, width)
            if at is not None:
                follow = at // width + length
                return token_ids[follow : follow + count]
        return array("i")

    def close(self) -> None:
        """Nothing to release."""


def _last_aligned(data: bytes, pattern: bytes, end: int, width: int) -> int | None:
    """Start of the last occurrence of `pattern` in `data[:end]` at a multiple of `width`."""
    at = data.rfind(pattern, 0, end)
    while at >= 0 and at % width:
        at = data.rfind(pattern, 0, at + len(pattern) - 1)
    return at if at >= 0 else None
