"""The automaton against a search of the whole text."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segue.tokens.stop import StopMatch, StopMatcher


@settings(max_examples=500)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=3),
)
@example(stops=["caaba", "aac", "abb"], text="caabb", cuts=[])
def test_the_first_match_and_what_is_held_before_it(stops: list[str], text: str, cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in pairwise(edges):
        match = matcher.feed(text[start:end])
        assert match == _first_match(stops, text[:end])
        if match is not None:
            return
        assert matcher.num_held == _held(stops, text[:end])


def test_of_stops_that_end_together_the_longest_matches() -> None:
    for stops in (["b", "ab", "cab"], ["cab", "ab", "b"]):
        assert StopMatcher(stops).feed("ccabb") == StopMatch("cab", 1, 4)


def test_a_stop_string_must_not_be_empty() -> None:
    with pytest.raises(AssertionError, match="empty"):
        StopMatcher(["a", ""])


def _first_match(stops: list[str], text: str) -> StopMatch | None:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


def _held(stops: list[str], text: str) -> int:
    prefixes = [stop[:n] for stop in stops for n in range(1, len(stop))]
    return max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)


def test_answers_to_a_request_share_what_finds_their_stops() -> None:
    one, other = StopMatcher(["ab", "b"]), StopMatcher(("ab", "b"))
    assert one._automaton is other._automaton
    assert one.feed("a") is None
    assert other.feed("b") == StopMatch("b", 0, 1)
    assert one.feed("b") == StopMatch("ab", 0, 2)
