"""Prompt lookup against a search that tries every place."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.speculate.drafter import DraftRequest
from segue.speculate.ngram import NgramDrafter

# Ids whose bytes hold each other's at odd offsets, so that an unaligned match in memory is no match.
IDS = st.sampled_from([0, 1, 256, 65536, 1 << 24, 0x01010101, 0x00010001, 7])


def naive(ids: list[int], min_ngram: int, max_ngram: int, count: int) -> list[int]:
    """The longest suffix that occurred before, its last occurrence, and what followed."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(ids) - length - 1, -1, -1):
            if length < len(ids) and ids[start : start + length] == ids[-length:]:
                return ids[start + length : start + length + count]
    return []


@given(
    ids=st.lists(IDS, min_size=1, max_size=40),
    min_ngram=st.integers(1, 4),
    extra=st.integers(0, 4),
    count=st.integers(0, 8),
)
def test_lookup_is_the_naive_search(ids: list[int], min_ngram: int, extra: int, count: int) -> None:
    drafter = NgramDrafter(min_ngram, min_ngram + extra)
    assert list(drafter.lookup(array("i", ids), count)) == naive(ids, min_ngram, min_ngram + extra, count)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest occurrence
        ([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], [3, 9, 1]),  # but the longest first
        ([7, 7, 7, 7], [7]),  # a run overlaps itself
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_examples(ids: list[int], expected: list[int]) -> None:
    assert list(NgramDrafter(2, 3).lookup(array("i", ids), 3)) == expected


def test_each_request_gets_its_own_proposal_and_no_kv_is_claimed() -> None:
    requests = [
        DraftRequest(
            token_ids=array("i", ids), first=0, count=count, blocks=[], draft_start=None, sampling=None
        )
        for ids, count in (([1, 2, 3, 1, 2], 2), ([4, 5, 6], 2), ([1, 2, 3, 1, 2], 0))
    ]
    proposals = NgramDrafter(2, 3).propose(requests, ())
    assert [list(proposal.drafts) for proposal in proposals] == [[3, 1], [], []]
    assert [proposal.draft_kv_len for proposal in proposals] == [None, None, None]
