"""The prefix cache as a user sees it: what is found, what is computed, what is never offered."""

import pytest

from segue.engine.request import Request
from tests.engine.calls import add_chunk
from tests.engine.harness import EOS, Harness, ScriptedDrafter, ScriptedModel, draft_model, greedy, ngram

DEPTHS = (1, 2, 3)
PROMPT = [2, 6, 10, 3, 4, 5, 7, 8, 9, 2, 6, 10, 11, 12, 13, 14]


def _num_cached(harness: Harness, request_id: str) -> int:
    metrics = harness.said[request_id].end.metrics
    assert metrics is not None
    return metrics.num_cached_tokens


@pytest.mark.parametrize("depth", DEPTHS)
def test_cached_tokens_are_counted_and_not_computed_again(depth: int) -> None:
    harness = Harness(block_size=4, async_depth=depth)
    harness.add("a", PROMPT, greedy(3, ignore_eos=True))
    harness.run()
    assert _num_cached(harness, "a") == 0
    # The same 10 ids and then others: two whole blocks are found.
    other = [*PROMPT[:10], 20, 21, 22]
    harness.add("b", other, greedy(3, ignore_eos=True))
    num_before = len(harness.computed)
    harness.run()
    assert _num_cached(harness, "b") == 8
    assert harness.computed[num_before] == (8, tuple(other[8:]))
    assert harness.said["b"].token_ids == harness.expect(other, greedy(3, ignore_eos=True)).token_ids


def test_a_prompt_that_is_cached_whole_computes_exactly_its_last_block() -> None:
    """Its last id must be computed to sample, and a block is written by nobody who shares it."""
    harness = Harness(block_size=4)
    harness.add("a", PROMPT, greedy(3, ignore_eos=True))
    harness.run()
    harness.add("b", PROMPT, greedy(3, ignore_eos=True))
    num_before = len(harness.computed)
    harness.run()
    assert _num_cached(harness, "b") == 12
    assert harness.computed[num_before] == (12, tuple(PROMPT[12:]))
    assert harness.said["b"].token_ids == harness.said["a"].token_ids


def test_with_blocks_of_one_token_a_full_hit_computes_exactly_the_last_token() -> None:
    harness = Harness(block_size=1, max_model_len=64)
    for name in ("a", "b"):
        num_before = len(harness.computed)
        harness.add(name, PROMPT, greedy(1))
        harness.run()
    assert _num_cached(harness, "b") == 15
    assert harness.computed[num_before:] == [(15, (14,))]


def test_an_answer_is_found_by_the_next_turn_that_repeats_it() -> None:
    harness = Harness(block_size=4)
    harness.add("a", PROMPT, greedy(9, ignore_eos=True))
    harness.run()
    answer = harness.said["a"].token_ids
    harness.add("b", [*PROMPT, *answer, 3], greedy(2))
    harness.run()
    # Of 16 + 9 ids, the last one drawn was never computed.
    assert _num_cached(harness, "b") == 24


def test_salts_separate() -> None:
    harness = Harness(block_size=4)
    for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", "y"), ("e", None)):
        harness.add(name, PROMPT, greedy(1), cache_salt=salt)
        harness.run()
    assert [_num_cached(harness, name) for name in "abcde"] == [0, 0, 12, 0, 12]


def test_switched_off_nothing_is_found() -> None:
    harness = Harness(block_size=4, enable_prefix_caching=False)
    for name in ("a", "b"):
        harness.add(name, PROMPT, greedy(1))
        harness.run()
    assert _num_cached(harness, "b") == 0
    assert harness.engine.stats.num_cached_blocks == 0


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("resume", [False, True], ids=["running", "idle"])
def test_reset_while_requests_hold_blocks(depth: int, resume: bool) -> None:
    """They keep what they hold and go on; nothing of the time before the reset is found afterwards."""
    harness = Harness(block_size=4, async_depth=depth, speculative=ngram(3))
    params = greedy(20, ignore_eos=True)
    harness.add("a", PROMPT, params, resumable=resume)
    harness.step_until(lambda: len(harness.said["a"].token_ids) >= 4)
    if resume:
        harness.run_until_turn_ends("a")
    harness.engine.reset_prefix_cache()
    harness.add("b", PROMPT, params)
    harness.run()
    assert _num_cached(harness, "b") == 0
    expected = harness.expect(PROMPT, params)
    assert harness.said["a"].token_ids == harness.said["b"].token_ids == expected.token_ids
    if resume:
        harness.engine.end_input("a")
        harness.run()
    harness.assert_all_free()
    harness.add("c", PROMPT, params)
    harness.run()
    assert _num_cached(harness, "c") == 12


def _stale_keys(harness: Harness, request: Request) -> list[int]:
    """Blocks of the request that are offered under a key which their ids do not have."""
    timeline, pool = request.timeline, harness.engine.pool
    wrong = []
    for index, block in enumerate(timeline.tables.blocks):
        key = pool.key_of(block)
        whole = (index + 1) * harness.config.block_size <= len(timeline.tokens)
        if key is not None and not (whole and key == timeline.tables.key(timeline.tokens, index)):
            wrong.append(index)
    return wrong


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_stale_key_remains_after_a_stop_inside_accepted_drafts(depth: int) -> None:
    """With blocks of one token every accepted draft fills one; those after the stop are not offered."""
    script = [0, 0, 0, 10, 11, EOS, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
    harness = Harness(
        model=ScriptedModel(script=script),
        drafter=ScriptedDrafter(script),
        speculative=ngram(3),
        max_model_len=16,
        block_size=1,
        async_depth=depth,
    )
    request = harness.add("a", [1, 2, 3], greedy(10), resumable=True)
    harness.run_until_turn_ends("a")
    assert harness.said["a"].token_ids == [10, 11, EOS]
    assert request.timeline.tokens.tolist() == [1, 2, 3, 10, 11]
    assert (3, (10, 11, EOS, 13)) in harness.computed
    assert _stale_keys(harness, request) == []
    add_chunk(harness.engine, "a", [7, 8, 9], greedy(2))
    harness.run_until_turn_ends("a")
    assert _stale_keys(harness, request) == []

    # Whoever has the ids that were cut off finds only what was kept.
    harness.add("b", [1, 2, 3, 10, 11, EOS, 13, 14], greedy(1))
    harness.run()
    assert _num_cached(harness, "b") == 5


@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_are_offered_only_when_the_draft_model_has_computed_them_too(depth: int) -> None:
    harness = Harness(block_size=4, async_depth=depth, speculative=draft_model(2))
    params = greedy(16, ignore_eos=True)
    for name in ("a", "b", "c"):
        harness.add(name, PROMPT, params)
        harness.run()
        assert harness.said[name].token_ids == harness.expect(PROMPT, params).token_ids
    assert _num_cached(harness, "c") == 12
    assert harness.engine.stats.num_accepted_tokens > 0
