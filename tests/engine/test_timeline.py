"""The ledger's four moves, each with what it keeps and what it gives up."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.engine.blocks import BlockPool
from segue.engine.tables import Tables
from segue.engine.timeline import Flight, Timeline


def _timeline(tokens: list[int], kv_len: int, *, block_size: int = 4, draft: bool = False) -> Timeline:
    num_blocks = -(-len(tokens) // block_size) + 2
    timeline = Timeline(Tables(BlockPool(num_blocks), block_size), has_draft_model=draft)
    timeline.extend(tokens)
    timeline.tables.reach(num_blocks * block_size)
    timeline.kv_len = timeline.draft_kv_len = kv_len
    return timeline


def _flight(
    timeline: Timeline,
    num_tokens: int,
    *,
    max_drafts: int = 0,
    samples: bool = True,
    draft_kv: tuple[int, int] = (0, 0),
) -> Flight:
    flight = Flight(
        step=len(timeline.flights),
        index=0,
        epoch=timeline.epoch,
        start=timeline.next_start,
        num_tokens=num_tokens,
        max_drafts=max_drafts,
        samples=samples,
        propose=0,
        draft_kv_end=draft_kv[1],
        draft_kv_start=draft_kv[0],
    )
    timeline.fly(flight)
    timeline.check()
    return flight


def test_the_next_part_starts_after_all_that_flies() -> None:
    timeline = _timeline([1, 2, 3, 4, 5], 0)
    assert (timeline.next_start, timeline.slack) == (0, 0)
    _flight(timeline, 3, samples=False)
    assert (timeline.next_start, timeline.slack) == (3, 0)
    _flight(timeline, 2)
    _flight(timeline, 1, max_drafts=2)
    _flight(timeline, 1, max_drafts=1)
    assert (timeline.next_start, timeline.slack) == (7, 3)
    assert timeline.kv_len == 0


def test_after_sampling_the_last_id_is_known_and_not_computed() -> None:
    timeline = _timeline([1, 2, 3], 0)
    flight = _flight(timeline, 3)
    timeline.settle(flight, [10], [11, 12], None)
    assert timeline.tokens.tolist() == [1, 2, 3, 10]
    assert (timeline.kv_len, list(timeline.drafts)) == (3, [11, 12])


def test_draft_kv_after_a_gap_does_not_count() -> None:
    """The drafter failed in the first of two chunks in flight; the second was planned as if it would not."""
    timeline = _timeline([1, 2, 3, 4, 5, 6], 0, draft=True)
    first = _flight(timeline, 2, samples=False, draft_kv=(0, 2))
    second = _flight(timeline, 2, samples=False, draft_kv=(2, 4))
    timeline.settle(first, (), (), None)
    timeline.settle(second, (), (), 4)
    assert timeline.draft_kv_len == 0
    third = _flight(timeline, 2, samples=False, draft_kv=(0, 6))
    timeline.settle(third, (), (), 6)
    assert timeline.draft_kv_len == 6


@pytest.mark.parametrize(("kept", "kv_len"), [([11], 4), ([11, 12], 5), ([11, 12, 13], 6)])
def test_drafts_count_as_far_as_they_were_kept(kept: list[int], kv_len: int) -> None:
    timeline = _timeline([1, 2, 3, 10], 3)
    flight = _flight(timeline, 1, max_drafts=2)
    timeline.settle(flight, kept, (), None)
    assert timeline.kv_len == kv_len
    assert timeline.tokens.tolist() == [1, 2, 3, 10, *kept]
    timeline.check()


def test_a_chunk_of_a_prefill_counts_what_it_computed() -> None:
    timeline = _timeline([1, 2, 3, 4, 5], 0)
    first, second = _flight(timeline, 2, samples=False), _flight(timeline, 2, samples=False)
    timeline.settle(first, (), (), None)
    assert timeline.kv_len == 2
    timeline.settle(second, (), (), None)
    assert timeline.kv_len == 4


def test_results_land_in_order() -> None:
    timeline = _timeline([1, 2, 3, 4, 5], 0)
    _flight(timeline, 2, samples=False)
    second = _flight(timeline, 2, samples=False)
    with pytest.raises(AssertionError, match="in order"):
        timeline.settle(second, (), (), None)


def test_input_is_not_added_while_an_answer_flies() -> None:
    timeline = _timeline([1, 2, 3], 0)
    _flight(timeline, 3)
    with pytest.raises(AssertionError):
        timeline.extend([4])


@pytest.mark.parametrize(
    ("num_tokens", "kv_len", "left"),
    [(9, 9, 8), (9, 5, 5), (6, 6, 6), (6, 0, 0), (0, 0, 0), (8, 100, 8)],
)
def test_a_cut_keeps_a_prefix_and_gives_up_the_blocks_beyond(num_tokens: int, kv_len: int, left: int) -> None:
    timeline = _timeline(list(range(9)), 8)
    blocks, tokens = timeline.tables.blocks, timeline.tokens
    _flight(timeline, 1, max_drafts=2)
    timeline.drafts = [5]
    epoch = timeline.epoch
    timeline.cut(num_tokens, kv_len)
    assert timeline.tokens.tolist() == list(range(num_tokens))
    assert timeline.kv_len == left
    assert timeline.epoch == epoch + 1
    assert not timeline.flights
    assert not timeline.drafts
    needed = -(-left // 4)
    assert timeline.tables.blocks == list(range(needed))
    timeline.tables.pool.check([range(needed)])
    assert timeline.tables.pool.num_free == 5 - needed
    # Steps in flight hold these.
    assert blocks == list(range(5))
    assert tokens.tolist() == list(range(9))
    timeline.check()


@given(
    before=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    kept=st.integers(0, 20),
    after=st.lists(st.integers(0, 9), max_size=20),
    size=st.integers(1, 5),
)
def test_keys_after_a_cut_are_those_of_the_new_ids(
    before: list[int], kept: int, after: list[int], size: int
) -> None:
    kept = min(kept, len(before))
    timeline = Timeline(Tables(BlockPool(1), size, salt="s"))
    timeline.extend(before)
    for index in range(len(before) // size):
        timeline.tables.key(timeline.tokens, index)
    timeline.cut(kept, 0)
    timeline.extend(after)
    fresh = Timeline(Tables(BlockPool(1), size, salt="s"))
    fresh.extend(before[:kept] + after)
    for index in range(len(fresh.tokens) // size):
        assert timeline.tables.key(timeline.tokens, index) == fresh.tables.key(fresh.tokens, index)
    with pytest.raises(AssertionError, match="only full blocks"):
        timeline.tables.key(timeline.tokens, len(fresh.tokens) // size)


def test_the_draft_model_limits_what_is_published() -> None:
    timeline = _timeline(list(range(9)), 8, draft=True)
    assert timeline.publishable_len == 8
    timeline.settle(_flight(timeline, 1), [9], (), 4)
    assert (timeline.kv_len, timeline.draft_kv_len, timeline.publishable_len) == (9, 4, 4)
    timeline.settle(_flight(timeline, 1), [9], (), 11)
    assert timeline.publishable_len == 10
    timeline.cut(11, 6)
    assert (timeline.kv_len, timeline.draft_kv_len) == (6, 6)


def test_draft_kv_of_ids_that_were_trimmed_does_not_count() -> None:
    timeline = _timeline([1, 2, 3], 2, draft=True)
    timeline.settle(_flight(timeline, 1, max_drafts=2), [4], (), 6)
    assert timeline.draft_kv_len == len(timeline.tokens) == 4


@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("draft_kv_len", [None, 3])
@pytest.mark.parametrize("num_tokens", [0, 3, 4, 6, 9])
def test_a_fork_has_the_kv_that_is_complete(
    num_tokens: int, draft_kv_len: int | None, whole_blocks: bool
) -> None:
    timeline = _timeline(list(range(9)), 8, draft=draft_kv_len is not None)
    if draft_kv_len is not None:
        timeline.draft_kv_len = draft_kv_len
    other = timeline.fork(num_tokens, whole_blocks=whole_blocks)
    other.check()
    complete = min(num_tokens, 8 if draft_kv_len is None else draft_kv_len)
    assert other.kv_len == (complete // 4 * 4 if whole_blocks else complete)
    assert other.tokens.tolist() == list(range(num_tokens))
    assert other.tables.blocks == timeline.tables.blocks[: -(-other.kv_len // 4)]
    other.extend([30, 31])
    assert timeline.tokens.tolist() == list(range(9))
    if num_tokens >= 4:
        assert other.tables.key(other.tokens, 0) == timeline.tables.key(timeline.tokens, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_len", 10), ("kv_len", -1), ("draft_kv_len", 10), ("blocks", []), ("_keys", [b""] * 3)],
)
def test_check_sees_a_broken_ledger(name: str, value: object) -> None:
    timeline = _timeline(list(range(9)), 8, draft=True)
    timeline.check()
    setattr(timeline.tables if name in Tables.__slots__ else timeline, name, value)
    with pytest.raises(AssertionError):
        timeline.check()


def test_check_sees_a_stale_flight() -> None:
    timeline = _timeline(list(range(9)), 8)
    _flight(timeline, 1)
    timeline.epoch += 1
    with pytest.raises(AssertionError):
        timeline.check()


def test_tokens_are_32_bit_ids() -> None:
    assert Timeline(Tables(BlockPool(1), 4)).tokens == array("i")
