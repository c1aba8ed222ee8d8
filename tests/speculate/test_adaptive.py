"""k follows measured acceptance and the load, and speculation that does not pay turns itself off."""

import itertools

import pytest

from segue.speculate.adaptive import ROW_COST, AdaptiveDrafts


def _after(accepted_of_4: int, times: int = 100) -> AdaptiveDrafts:
    drafts = AdaptiveDrafts(8)
    for _ in range(times):
        drafts.observe(4, accepted_of_4)
    return drafts


def test_an_open_mind_at_first() -> None:
    assert AdaptiveDrafts(4).num_drafts(0, 1) > 0


def test_all_right_means_all_there_are() -> None:
    assert _after(4).num_drafts(0, 1) == 8


def test_never_more_than_the_configured_k() -> None:
    drafts = AdaptiveDrafts(3)
    for _ in range(50):
        drafts.observe(3, 3)
    assert drafts.num_drafts(0, 1) == 3


def test_more_acceptance_means_more_drafts_and_more_load_fewer() -> None:
    by_acceptance = [_after(accepted).num_drafts(0, 1) for accepted in range(5)]
    assert by_acceptance == sorted(by_acceptance)
    assert by_acceptance[0] == 0
    by_load = [_after(2).num_drafts(0, num_running) for num_running in (1, 2, 4, 8, 16, 64)]
    assert by_load == sorted(by_load, reverse=True)
    assert by_load[0] > by_load[-1]


@pytest.mark.parametrize("accepted", [1, 2, 3])
@pytest.mark.parametrize("num_running", [1, 3, 10])
def test_k_gives_the_most_tokens_for_the_cost(accepted: int, num_running: int) -> None:
    """Of each 4 drafts `accepted` are right and one is wrong: the chance is `accepted / (accepted + 1)`."""
    chance = accepted / (accepted + 1)

    def rate(k: int) -> float:
        tokens = sum(chance**i for i in range(k + 1))
        return tokens / (1 + ROW_COST * num_running * (1 + k))

    chosen = _after(accepted, times=400).num_drafts(0, num_running)
    # The running mean wobbles around the chance, so the choice need only be as good as the best within 3 %.
    assert rate(chosen) >= 0.97 * max(rate(k) for k in range(9))


def test_drafts_after_the_first_wrong_one_say_nothing() -> None:
    few, many = AdaptiveDrafts(8), AdaptiveDrafts(8)
    for _ in range(30):
        few.observe(2, 1)
        many.observe(8, 1)
    assert [few.num_drafts(0, n) for n in range(1, 9)] == [many.num_drafts(0, n) for n in range(1, 9)]


def test_pauses_double_up_to_a_limit() -> None:
    """Each new try is refuted; the next one comes twice as late."""
    drafts = AdaptiveDrafts(4)
    tried: list[int] = []
    for length in range(3000):
        if drafts.num_drafts(length, 1):
            tried.append(length)
            drafts.observe(4, 0)
    # Between the tries, which take a few steps each, lie the pauses.
    pauses = [after - before for before, after in itertools.pairwise(tried) if after - before > 1]
    assert pauses[:6] == [16 + 1, 32 + 1, 64 + 1, 128 + 1, 256 + 1, 512 + 1]
    assert set(pauses[6:]) == {512 + 1}


def test_nothing_verified_teaches_nothing() -> None:
    drafts = AdaptiveDrafts(4)
    before = [drafts.num_drafts(0, n) for n in range(1, 5)]
    drafts.observe(0, 0)
    assert [drafts.num_drafts(0, n) for n in range(1, 5)] == before
