"""Text as it arrives: the same for every split, nothing shown too early, nothing held too long."""

import codecs
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from segue.errors import ParameterError
from segue.tokens import Detokenizer, Tokenizer
from tests.tokens.small import TOKENS, small_tokenizer

SMALL = small_tokenizer()


def _ids_of(texts: list[str]) -> list[int]:
    return [i for text in texts for i in SMALL.encode(text, parse_special=True)]


IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=30) | st.lists(
    st.sampled_from(["ab", "abc", "aab", "é", "👩‍👧", "<|im_end|>", "stop", "st", "\n\n", "!"]), max_size=10
).map(_ids_of)
STOPS = st.lists(
    st.text("abcs", min_size=1, max_size=4)
    | st.sampled_from(["stop", "top", "é", "éa", "👩‍👧", "\n\n", "\ufffd", "a\ufffd", "<|im_end|>"]),
    max_size=4,
)
CUTS = st.lists(st.integers(0, 30), max_size=8)


@dataclass(frozen=True)
class Expected:
    """What should come out, found by looking at the whole text."""

    text: str
    stopped: str | None
    num_tokens: int | None


def _expected(ids: list[int], stops: list[str], *, include_stop: bool, skip: bool) -> Expected:
    text = SMALL.decode(ids, skip_special_tokens=skip)
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            num_tokens = next(
                (n for n in range(len(ids)) if len(_complete_text(ids[:n], skip)) >= end), len(ids)
            )
            return Expected(text[: end if include_stop else end - len(stop)], stop, num_tokens)
    return Expected(text, None, None)


def _complete_text(ids: list[int], skip: bool) -> str:
    """The text of ids without the bytes of a last, incomplete character."""
    skipped = SMALL.special_ids if skip else frozenset()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(b"".join(SMALL.token_bytes(i) for i in ids if i not in skipped))


def _safe_text(ids: list[int], stops: list[str], skip: bool) -> str:
    """The most that may be shown after these ids when none of them completed a stop string."""
    text = _complete_text(ids, skip)
    held = [len(part) for stop in stops for part in _proper_prefixes(stop) if text.endswith(part)]
    return text[: len(text) - max(held, default=0)]


def _proper_prefixes(stop: str) -> list[str]:
    return [stop[:n] for n in range(1, len(stop))]


def _split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


@given(ids=IDS, stops=STOPS, cuts=CUTS, include_stop=st.booleans(), skip=st.booleans())
@example(ids=_ids_of(["aab"]), stops=["ab", "b"], cuts=[], include_stop=False, skip=True)
@example(ids=_ids_of(["abc"]), stops=["b", "abc"], cuts=[1], include_stop=True, skip=True)
@example(ids=SMALL.encode("a👩")[:-1], stops=["a\ufffd"], cuts=[], include_stop=False, skip=True)
def test_any_split_gives_the_text_up_to_the_first_stop(
    ids: list[int], stops: list[str], cuts: list[int], include_stop: bool, skip: bool
) -> None:
    expected = _expected(ids, stops, include_stop=include_stop, skip=skip)
    detokenizer = Detokenizer(SMALL, stop=stops, include_stop=include_stop, skip_special_tokens=skip)
    shown = ""
    pushed: list[int] = []
    for part in _split(ids, cuts):
        shown += detokenizer.push(part)
        pushed += part
        if detokenizer.stopped is None:
            assert shown == _safe_text(pushed, stops, skip)
        else:
            assert shown == expected.text
    shown += detokenizer.finish()
    assert shown == expected.text
    assert detokenizer.stopped == expected.stopped
    assert detokenizer.num_tokens_at_stop == expected.num_tokens


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    detokenizer = Detokenizer(SMALL)
    ids = SMALL.encode("👩")
    assert len(ids) == 4
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "👩"]


def test_an_incomplete_character_becomes_a_replacement_at_the_end() -> None:
    detokenizer = Detokenizer(SMALL)
    assert detokenizer.push(SMALL.encode("a👩")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_a_stop_string_over_tokens_is_held_back_and_never_shown() -> None:
    detokenizer = Detokenizer(SMALL, stop=["\n\nhi"])
    pushes = [detokenizer.push([i]) for i in SMALL.encode("ab\n\nhiab")]
    assert "".join(pushes) == "ab"
    assert detokenizer.stopped == "\n\nhi"
    assert detokenizer.num_tokens_at_stop == 4
    assert detokenizer.push(SMALL.encode("hi")) == detokenizer.finish() == ""


def test_text_that_was_held_in_vain_is_shown() -> None:
    detokenizer = Detokenizer(SMALL, stop=["aaab"])
    assert detokenizer.push(SMALL.encode("aa")) == ""
    assert detokenizer.push(SMALL.encode("aa")) == "a"
    assert detokenizer.push(SMALL.encode("!")) == "aaa!"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(("include", "text"), [(False, "h"), (True, "hé!")])
def test_a_stop_string_with_characters_of_several_bytes(include: bool, text: str) -> None:
    detokenizer = Detokenizer(SMALL, stop=["é!"], include_stop=include)
    assert "".join(detokenizer.push([i]) for i in SMALL.encode("hé!?")) == text


def test_a_stop_in_the_middle_of_a_token_cuts_the_token() -> None:
    (token,) = SMALL.encode("stop")
    detokenizer = Detokenizer(SMALL, stop=["to"])
    assert detokenizer.push([token, token]) == "s"
    assert detokenizer.num_tokens_at_stop == 1


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, "ab"), (2, "ababc"), (3, "ababc"), (9, "ababcab")]
)
def test_a_stop_string_counts_after_min_tokens(min_tokens: int, text: str) -> None:
    detokenizer = Detokenizer(SMALL, stop=["ab"], min_tokens=min_tokens)
    assert detokenizer.push(_ids_of(["ab", "ab", "c", "ab"])) + detokenizer.finish() == text
    assert detokenizer.stopped == ("ab" if min_tokens < 4 else None)


def test_an_unknown_id_is_an_error() -> None:
    with pytest.raises(ParameterError, match="no token id"):
        Detokenizer(SMALL).push([len(TOKENS)])


@given(text=st.text(max_size=30), cuts=CUTS)
def test_the_real_vocabulary(smollm2: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = smollm2.encode(text.encode(errors="ignore").decode())
    detokenizer = Detokenizer(smollm2)
    assert "".join(map(detokenizer.push, _split(ids, cuts))) + detokenizer.finish() == smollm2.decode(ids)
