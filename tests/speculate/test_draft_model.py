"""The draft model's rounds: what it computes, in which passes, and what it claims to have computed."""

from array import array
from collections.abc import Sequence

import pytest

from segue.contract.step import NOT_FINITE, ForwardResult, Sampling, SeqStep
from segue.speculate.draft_model import DraftModelDrafter
from segue.speculate.drafter import DraftRequest


class Counting:
    """A draft model for which every id is followed by the next number. Notes every pass."""

    vocab_size = 1000
    kv_bytes_per_token = 1

    def __init__(self, *, max_model_len: int = 100, broken_after: int | None = None) -> None:
        self.max_model_len = max_model_len
        self.broken_after = broken_after
        self.passes: list[list[tuple[int, list[int], bool]]] = []
        self.copies: list[Sequence[tuple[int, int]]] = []
        self.samplings: list[Sampling | None] = []
        self.is_closed = False

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """It has no KV."""

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        self.passes.append([(seq.start, list(seq.tokens), seq.sampling is not None) for seq in seqs])
        self.copies.append(copies)
        self.samplings.extend(seq.sampling for seq in seqs)
        result = ForwardResult([], {}, {}, {})
        for i, seq in enumerate(seqs):
            if seq.sampling is None:
                continue
            if self.broken_after is not None and seq.tokens[-1] >= self.broken_after:
                result.errors[i] = NOT_FINITE
            else:
                result.tokens.append(seq.tokens[-1] + 1)
        return result

    def close(self) -> None:
        self.is_closed = True


def _request(
    ids: list[int],
    draft_start: int | None,
    count: int,
    *,
    first: int = 0,
    sampling: Sampling | None = None,
) -> DraftRequest:
    return DraftRequest(
        token_ids=array("i", ids),
        first=first,
        count=count,
        blocks=[0],
        draft_start=draft_start,
        sampling=sampling,
    )


def test_one_round_catches_up_and_goes_on_one_by_one() -> None:
    model = Counting()
    (proposal,) = DraftModelDrafter(model).propose([_request([10, 20, 30, 40, 50], 2, 3)], ())
    assert list(proposal.drafts) == [51, 52, 53]
    assert proposal.draft_kv_len == 5
    assert model.passes == [[(2, [30, 40, 50], True)], [(5, [51], True)], [(6, [52], True)]]


def test_many_sequences_share_the_passes_and_leave_when_they_have_enough() -> None:
    model = Counting()
    requests = [
        _request([10, 20], 0, 1),
        _request([100, 200, 300], 2, 3),
        _request([7, 8, 9], 1, 0),
        _request([5], None, 2),
        _request([400, 500], 7, 2, first=6),
    ]
    proposals = DraftModelDrafter(model).propose(requests, ())
    assert [list(proposal.drafts) for proposal in proposals] == [[21], [301, 302, 303], [], [], [501, 502]]
    assert [proposal.draft_kv_len for proposal in proposals] == [2, 3, 3, None, 8]
    assert model.passes == [
        [(0, [10, 20], True), (2, [300], True), (1, [8, 9], False), (7, [500], True)],
        [(3, [301], True), (8, [501], True)],
        [(4, [302], True)],
    ]


def test_what_is_known_is_computed_at_least_from_the_last_id() -> None:
    """Its KV may be complete already; drafting still needs the last id's logits."""
    model = Counting()
    (proposal,) = DraftModelDrafter(model).propose([_request([40, 50], 9, 1, first=3)], ())
    assert model.passes == [[(4, [50], True)]]
    assert (list(proposal.drafts), proposal.draft_kv_len) == ([51], 5)


@pytest.mark.parametrize(("length", "expected"), [(7, [8, 9, 10, 11]), (9, [10, 11]), (10, [11]), (11, [])])
def test_it_stops_at_its_own_longest_sequence(length: int, expected: list[int]) -> None:
    model = Counting(max_model_len=10)
    ids = list(range(1, length + 1))
    (proposal,) = DraftModelDrafter(model).propose([_request(ids, length - 1, 4)], ())
    assert list(proposal.drafts) == expected
    assert proposal.draft_kv_len == (length if length <= 10 else None)
    assert all(start + len(tokens) <= 10 for step in model.passes for start, tokens, _ in step)


def test_an_error_ends_the_drafts_of_its_sequence_alone() -> None:
    model = Counting(broken_after=52)
    proposals = DraftModelDrafter(model).propose([_request([50], 0, 4), _request([20], 0, 4)], ())
    assert [list(proposal.drafts) for proposal in proposals] == [[51, 52], [21, 22, 23, 24]]
    assert [proposal.draft_kv_len for proposal in proposals] == [1, 1]


def test_kv_of_a_sequence_in_error_does_not_count() -> None:
    model = Counting(broken_after=52)
    proposals = DraftModelDrafter(model).propose([_request([50, 60], 0, 4), _request([20], 0, 2)], ())
    assert [list(proposal.drafts) for proposal in proposals] == [[], [21, 22]]
    assert [proposal.draft_kv_len for proposal in proposals] == [None, 1]


def test_copies_are_made_once_and_also_when_nothing_is_drafted() -> None:
    model = Counting()
    drafter = DraftModelDrafter(model)
    drafter.propose([_request([10], 0, 2)], [(3, 4)])
    assert model.copies == [[(3, 4)], ()]
    drafter.propose([], [(5, 6)])
    assert model.passes[-1] == []
    assert model.copies[-1] == [(5, 6)]


@pytest.mark.parametrize(
    ("sampling", "is_kept"),
    [
        (Sampling(temperature=0.8, seed=3), True),
        (Sampling(temperature=0.8, frequency_penalty=0.5), False),
        (Sampling(temperature=0.8, num_logprobs=2), False),
        (None, False),
    ],
)
def test_it_draws_as_the_target_does_unless_that_needs_more_than_logits(
    sampling: Sampling | None, is_kept: bool
) -> None:
    model = Counting()
    DraftModelDrafter(model).propose([_request([10], 0, 2, sampling=sampling)], ())
    assert len(model.samplings) == 2
    for used in model.samplings:
        assert used is not None
        assert (used is sampling) == is_kept
        assert not used.needs_history
        assert used.num_logprobs is None


def test_close_closes_the_executor() -> None:
    model = Counting()
    DraftModelDrafter(model).close()
    assert model.is_closed
