"""From engine outputs to text, with outputs written by hand."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.answers.outputs import Delta, Logprob
from segue.answers.processor import OutputProcessor, Processed, answer_params, logprobs_by_id
from segue.contract.reports import EngineOutput, FinishReason, RequestMetrics
from segue.contract.step import TokenLogprobs
from segue.sample.params import SamplingParams
from segue.tokens import Tokenizer
from tests.tokens.small import small_tokenizer

TOKENIZER = small_tokenizer()


class Clock:
    """Advances by one second with each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def processor(params: SamplingParams, tokenizer: Tokenizer = TOKENIZER) -> OutputProcessor:
    """One with the request "r" open."""
    made = OutputProcessor(tokenizer, clock=Clock())
    made.add("r", prompt="hi", prompt_token_ids=TOKENIZER.encode("hi"), params=params)
    return made


def ids(text: str) -> list[int]:
    """One id for each byte: ids that stops can cut anywhere."""
    return [token for char in text for token in TOKENIZER.encode(char)]


def news(token_ids: Sequence[int], *, request_id: str = "r", logprobs: bool = False) -> EngineOutput:
    entries = [TokenLogprobs(-0.5, 1, (token,), (-0.5,)) for token in token_ids]
    return EngineOutput(
        request_id=request_id, token_ids=list(token_ids), logprobs=entries if logprobs else None
    )


def last(
    token_ids: Sequence[int], reason: FinishReason, *, request_id: str = "r", stop_reason: int | None = None
) -> EngineOutput:
    return EngineOutput(
        request_id=request_id,
        token_ids=list(token_ids),
        finish_reason=reason,
        stop_reason=stop_reason,
        finished=True,
        metrics=RequestMetrics(num_cached_tokens=3, num_computed_tokens=5),
    )


def test_answer_of_several_steps() -> None:
    made = processor(SamplingParams())
    assert [d.text for d in made.process([news(ids("ab"))]).deltas] == ["ab"]
    assert made.output("r").outputs[0].text == "ab"
    assert not made.is_finished("r")
    made.process([last(ids("c"), FinishReason.LENGTH)])
    output = made.pop("r")
    assert output.finished
    assert output.prompt == "hi"
    assert output.outputs[0].text == "abc"
    assert output.outputs[0].token_ids == ids("abc")
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert output.num_cached_tokens == 3
    assert (output.times.arrival_s, output.times.first_token_s, output.times.last_token_s) == (1.0, 2.0, 3.0)
    assert output.times.time_to_first_token_s == 1.0
    assert made.num_open_answers == 0


def test_end_of_sequence_is_a_token_and_no_text() -> None:
    (eos,) = list(TOKENIZER.eos_token_ids)[:1]
    made = processor(SamplingParams(skip_special_tokens=False))
    made.process([last([*ids("a"), eos], FinishReason.STOP)])
    answer = made.pop("r").outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("a", [*ids("a"), eos], None)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_token_is_text_only_when_asked_for(include: bool, text: str) -> None:
    (stop,) = ids("b")
    made = processor(SamplingParams(stop_token_ids=[stop], include_stop_str_in_output=include))
    made.process([last(ids("ab"), FinishReason.STOP, stop_reason=stop)])
    answer = made.pop("r").outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, ids("ab"), stop)


@pytest.mark.parametrize(("include", "text"), [(False, "xy"), (True, "xystop")])
def test_stop_string_cuts_text_and_tokens_and_aborts(include: bool, text: str) -> None:
    params = SamplingParams(stop=["stop"], include_stop_str_in_output=include, logprobs=0, max_tokens=64)
    made = processor(params)
    first = made.process([news(ids("xyst"), logprobs=True)])
    assert (first.deltas[0].text, first.aborts) == ("xy", [])
    output = news(ids("opabc"), logprobs=True)
    output.metrics = RequestMetrics(num_cached_tokens=7)
    second = made.process([output])
    assert second.aborts == ["r"]
    assert second.deltas[0].finish_reason == "stop"
    whole = made.pop("r")
    answer = whole.outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, ids("xystop"), "stop")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert answer.cumulative_logprob == -0.5 * len(answer.token_ids)
    assert whole.num_cached_tokens == 7


def test_stop_string_in_the_engines_last_output_needs_no_abort() -> None:
    made = processor(SamplingParams(stop="b"))
    assert made.process([last(ids("abc"), FinishReason.LENGTH)]).aborts == []
    answer = made.pop("r").outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a", "stop", "b")


def test_outputs_after_a_stop_are_dropped() -> None:
    made = processor(SamplingParams(stop="b"))
    made.process([news(ids("ab"))])
    assert made.process([news(ids("cd")), last([], FinishReason.LENGTH)]) == Processed([], [])
    assert made.pop("r").outputs[0].token_ids == ids("ab")


def test_text_that_never_became_a_stop_is_released_at_the_end() -> None:
    made = processor(SamplingParams(stop="stop"))
    assert made.process([news(ids("sto"))]).deltas[0].text == ""
    made.process([last([], FinishReason.LENGTH)])
    assert made.pop("r").outputs[0].text == "sto"


def test_incomplete_character_at_the_end_is_a_replacement_character() -> None:
    made = processor(SamplingParams())
    made.process([last(TOKENIZER.encode("\N{SNOWMAN}")[:1], FinishReason.LENGTH)])
    assert made.pop("r").outputs[0].text == "\ufffd"


def test_replacement_character_at_the_end_can_complete_a_stop() -> None:
    made = processor(SamplingParams(stop="\ufffd"))
    made.process([last([*ids("a"), *TOKENIZER.encode("\N{SNOWMAN}")[:1]], FinishReason.LENGTH)])
    answer = made.pop("r").outputs[0]
    assert (answer.text, answer.stop_reason) == ("a", "\ufffd")


def test_stop_string_does_not_count_before_min_tokens() -> None:
    made = processor(SamplingParams(stop="b", min_tokens=3))
    assert made.process([news(ids("abc"))]).aborts == []
    assert made.process([news(ids("ab"))]).aborts == ["r"]
    answer = made.output("r").outputs[0]
    assert (answer.text, answer.token_ids) == ("abca", ids("abcab"))


def test_n_answers_have_their_own_seeds_and_one_scores_the_prompt() -> None:
    params = SamplingParams(n=3, seed=2**64 - 1, prompt_logprobs=0)
    each = [answer_params(params, index) for index in range(3)]
    assert [p.seed for p in each] == [2**64 - 1, 0, 1]
    assert [p.prompt_logprobs for p in each] == [0, None, None]
    assert [p.n for p in each] == [1, 1, 1]
    assert answer_params(SamplingParams(n=2), 1).seed is None


def test_n_answers_end_one_by_one() -> None:
    made = OutputProcessor(TOKENIZER)
    params = SamplingParams(n=2, stop="b")
    made.add("r", prompt=None, prompt_token_ids=[1], params=params, engine_ids=["r-0", "r-1"])
    processed = made.process([news(ids("ab"), request_id="r-1"), news(ids("xy"), request_id="r-0")])
    assert processed.aborts == ["r-1"]
    assert [(d.request_id, d.index, d.text) for d in processed.deltas] == [("r", 1, "a"), ("r", 0, "xy")]
    assert not made.is_finished("r")
    made.process([last(ids("z"), FinishReason.LENGTH, request_id="r-0")])
    output = made.pop("r")
    assert [(a.index, a.text, a.finish_reason) for a in output.outputs] == [
        (0, "xyz", "length"),
        (1, "a", "stop"),
    ]


def test_abort_keeps_what_there_is() -> None:
    made = OutputProcessor(TOKENIZER)
    params = SamplingParams(n=2)
    made.add("r", prompt=None, prompt_token_ids=[1], params=params, engine_ids=["r-0", "r-1"])
    made.process([last(ids("a"), FinishReason.LENGTH, request_id="r-0"), news(ids("b"), request_id="r-1")])
    assert made.abort("r") == ["r-1"]
    assert made.abort("r") == []
    assert [(a.text, a.finish_reason) for a in made.pop("r").outputs] == [("a", "length"), ("b", "abort")]
    assert made.num_open_answers == 0


def test_error_is_reported_with_its_line() -> None:
    made = processor(SamplingParams())
    failed = EngineOutput(
        request_id="r", finish_reason=FinishReason.ERROR, finished=True, error="the step failed"
    )
    (delta,) = made.process([failed]).deltas
    assert (delta.finish_reason, delta.error) == ("error", "the step failed")
    assert made.pop("r").outputs[0].error == "the step failed"


def test_logprobs_have_the_drawn_id_first_and_equal_ranks_for_equals() -> None:
    entry = TokenLogprobs(-4.0, 9, (5, 6, 7), (-1.0, -1.0, -2.0))
    by_id = logprobs_by_id(8, entry, lambda token: f"<{token}>")
    assert list(by_id) == [8, 5, 6, 7]
    assert by_id[8] == Logprob(-4.0, 9, "<8>")
    assert [by_id[token].rank for token in (5, 6, 7)] == [1, 1, 3]


def test_drawn_id_among_the_most_likely_appears_once() -> None:
    entry = TokenLogprobs(-1.0, 1, (5, 6), (-1.0, -2.0))
    assert list(logprobs_by_id(6, entry, str)) == [6, 5]


def test_prompt_logprobs_start_with_none() -> None:
    made = processor(SamplingParams(prompt_logprobs=1))
    prompt = TOKENIZER.encode("hi")
    scored = [None, *(TokenLogprobs(-1.0, 2, (3,), (-0.5,)) for _ in prompt[1:])]
    made.process([EngineOutput(request_id="r", token_ids=ids("a"), prompt_logprobs=scored)])
    entries = made.output("r").prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [list(entry) for entry in entries[1:] if entry] == [[token, 3] for token in prompt[1:]]


@given(
    text=st.text("ab stop\N{SNOWMAN}é", max_size=24),
    stops=st.lists(st.text("abstop\N{SNOWMAN}", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_deltas_join_to_the_answer_however_steps_are_cut(
    text: str, stops: list[str], cuts: list[int], min_tokens: int, include: bool
) -> None:
    params = SamplingParams(
        stop=stops, min_tokens=min_tokens, max_tokens=64, logprobs=0, include_stop_str_in_output=include
    )
    token_ids = TOKENIZER.encode(text)
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    whole, split = processor(params), processor(params)
    outputs = [news(token_ids[a:b], logprobs=True) for a, b in itertools.pairwise(bounds)]
    end = last([], FinishReason.LENGTH)
    deltas: list[Delta] = []
    for output in [*outputs, end]:
        deltas += split.process([output]).deltas
    whole.process([news(token_ids, logprobs=True)])
    whole.process([end])
    expected, answer = whole.pop("r").outputs[0], split.pop("r").outputs[0]
    assert answer == expected
    assert "".join(delta.text for delta in deltas) == answer.text
    assert [token for delta in deltas for token in delta.token_ids] == answer.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs or ()] == answer.logprobs
    assert deltas[-1].finish_reason == answer.finish_reason
    if answer.finish_reason == "length":
        assert answer.text == text
