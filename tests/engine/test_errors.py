"""What goes wrong touches those it concerns and nobody else, and says what it was in one line."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from segue.contract.reports import FinishReason
from segue.engine.config import EngineConfig, SpeculativeConfig
from segue.errors import CapacityError, ParameterError, UsageError
from segue.sample.params import SamplingParams
from tests.engine.calls import add_chunk, add_request, fork
from tests.engine.harness import Harness, draft_model, greedy, ngram, plain_turns
from tests.sim.oracle import Failure

DEPTHS = (1, 2, 3)

# --- a step that fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "speculative", [None, ngram(3), draft_model(2)], ids=["plain", "ngram", "draft_model"]
)
def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    depth: int, speculative: SpeculativeConfig | None
) -> None:
    # One request in each step: with room for one, the other waits.
    harness = Harness(max_num_seqs=1, speculative=speculative, async_depth=depth, block_size=4)
    params = greedy(12, ignore_eos=True)
    harness.add("unlucky", [2, 6, 10, 2, 6], params)
    harness.add("waiting", [2, 6, 10, 2, 6, 10], params)
    harness.step_until(lambda: len(harness.said["unlucky"].token_ids) >= 3)
    harness.executor.fail_next = Failure.BEFORE_COPIES
    harness.run()

    end = harness.said["unlucky"].end
    assert end.finish_reason is FinishReason.ERROR
    assert end.finished
    assert end.error == ("the step that computed this request failed: injected failure with a second line")
    assert harness.said["waiting"].token_ids == harness.expect([2, 6, 10, 2, 6, 10], params).token_ids
    harness.assert_all_free()

    harness.add("later", [2, 6, 10, 2, 6], params)
    harness.run()
    assert harness.said["later"].token_ids == harness.expect([2, 6, 10, 2, 6], params).token_ids


@pytest.mark.parametrize("depth", DEPTHS)
def test_all_requests_of_a_failed_step_fail(depth: int) -> None:
    harness = Harness(async_depth=depth)
    names = ["a", "b", "c"]
    for name in names:
        harness.add(name, [2, 6, 10], greedy(12, ignore_eos=True))
    harness.step_until(lambda: all(len(harness.said[name].token_ids) >= 2 for name in names))
    harness.executor.fail_next = Failure.BEFORE_COPIES
    harness.run()
    assert [harness.said[name].end.finish_reason for name in names] == [FinishReason.ERROR] * 3
    harness.assert_all_free()


@pytest.mark.parametrize("depth", DEPTHS)
def test_logits_that_are_not_finite_fail_one_request_of_the_step(depth: int) -> None:
    harness = Harness(async_depth=depth, speculative=ngram(2), block_size=4)
    params = greedy(14, ignore_eos=True, logprobs=1)
    harness.add("first", [2, 6, 10, 2, 6], params)
    harness.add("second", [3, 3, 3], params)
    harness.step_until(lambda: all(len(harness.said[name].token_ids) >= 2 for name in ("first", "second")))
    harness.executor.nan_next = 0
    harness.run()
    end = harness.said["first"].end
    assert end.finish_reason is FinishReason.ERROR
    assert end.error == "the model's logits are not finite (NaN or infinity)"
    expected = harness.expect([3, 3, 3], params)
    assert harness.said["second"].token_ids == expected.token_ids
    assert harness.said["second"].logprobs == expected.logprobs
    harness.assert_all_free()


def test_what_was_computed_before_a_failure_stays_right_in_the_prefix_cache() -> None:
    """Blocks that the failing step was writing are not offered to anybody."""
    harness = Harness(block_size=4, max_num_batched_tokens=8)
    prompt = [2, 6, 10, 3] * 4
    harness.add("a", prompt, greedy(4))
    harness.step()
    harness.executor.fail_next = Failure.BEFORE_COPIES
    harness.run()
    harness.add("b", prompt, greedy(4))
    harness.run()
    end = harness.said["b"].end
    assert end.metrics is not None
    assert end.metrics.num_cached_tokens == 8
    assert harness.said["b"].token_ids == harness.expect(prompt, greedy(4)).token_ids


@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("speculative", [None, draft_model(2)], ids=["plain", "draft_model"])
def test_nobody_counts_on_a_copy_that_a_failed_step_was_to_make(
    speculative: SpeculativeConfig | None, depth: int, failure: Failure
) -> None:
    """A fork's copy of a shared block is in flight when the fork is cut, and forked again, and that fork goes on in
    a later step, with a copy of the copy. Then the first step fails because of somebody else."""
    harness = Harness(block_size=4, async_depth=depth, speculative=speculative)
    prompt, more, answer = [2, 6, 10, 2, 6, 10], [5, 6], greedy(6, ignore_eos=True)
    harness.add("a", prompt, None, resumable=True)
    harness.run()
    harness.add("other", [3, 4], greedy(40, ignore_eos=True))
    harness.step()
    fork(harness.engine, "a", "fork")
    harness.checker.salts |= {"fork": None, "grandchild": None, "late": None}
    add_chunk(harness.engine, "fork", more, answer)
    harness.step_until(lambda: bool(harness.engine._in_flight[0].step.plan.copies))
    harness.engine.truncate("fork", 5)
    fork(harness.engine, "fork", "late")
    fork(harness.engine, "fork", "grandchild")
    add_chunk(harness.engine, "grandchild", more, answer)
    harness.executor.fail_next = failure
    harness.step_until(lambda: harness.said["other"].last is not None and harness.said["other"].last.finished)
    for name in ("fork", "late"):
        add_chunk(harness.engine, name, more, answer)
    harness.run()
    plain = harness.plain()
    plain.history = prompt[:5]
    expected = plain_turns(plain, [(more, answer)])
    for name in ("fork", "late", "grandchild"):
        assert harness.said[name].turns[-1:] == expected, name
    for name in ("a", "fork", "late", "grandchild"):
        harness.engine.abort_request(name)
    harness.run()
    harness.assert_all_free()


# --- refusals ---------------------------------------------------------------------------------------------------

BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens=-1: must be at least 1"),
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ({"max_tokens": 2.5}, "max_tokens=2.5: must be an integer"),
    ({"max_tokens": True}, "max_tokens=True: must be an integer"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5: is more than max_tokens=4"),
    ({"min_tokens": -1}, "min_tokens=-1: must be at least 0"),
    ({"temperature": -0.5}, "temperature=-0.5: must be in [0, ∞)"),
    ({"temperature": float("nan")}, "temperature=nan: must be a finite number"),
    ({"top_p": 0.0}, "top_p=0.0: must be in (0, 1]"),
    ({"top_p": 1.5}, "top_p=1.5: must be in (0, 1]"),
    ({"top_k": -2}, "top_k=-2: must be at least -1"),
    ({"min_p": 1.1}, "min_p=1.1: must be in [0, 1]"),
    ({"n": 0}, "n=0: must be in [1, 1024]"),
    ({"presence_penalty": 3.0}, "presence_penalty=3.0: must be in [-2, 2]"),
    ({"frequency_penalty": -3.0}, "frequency_penalty=-3.0: must be in [-2, 2]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be in (0, ∞)"),
    ({"logprobs": -1}, "logprobs=-1: must be in [0, 1024]"),
    ({"logit_bias": {3: 101.0}}, "logit_bias=101.0: must be in [-100, 100]"),
    ({"stop": ""}, "stop='': must be a non-empty string or a list of them"),
    ({"seed": "x"}, "seed='x': must be an integer"),
]


@pytest.mark.parametrize(("options", "message"), BAD_PARAMS, ids=[message for _, message in BAD_PARAMS])
def test_bad_sampling_parameters_are_refused_by_name_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as refusal:
        SamplingParams(**options)
    assert str(refusal.value) == message
    assert refusal.value.parameter in options


def _config(**options: Any) -> EngineConfig:
    return EngineConfig(**({"max_model_len": 64, "num_kv_blocks": 8} | options))


BAD_CONFIGS: list[tuple[Callable[[], object], str]] = [
    (lambda: _config(max_num_seqs=0), "max_num_seqs=0: must be a positive integer below 2^31"),
    (lambda: _config(block_size=-16), "block_size=-16: must be a positive integer below 2^31"),
    (lambda: _config(async_depth=9), "async_depth=9: must be at most 8"),
    (
        lambda: _config(scheduling_policy="lifo"),
        "scheduling_policy='lifo': unknown; known are fcfs, priority",
    ),
    (
        lambda: _config(max_num_batched_tokens=100, max_num_seqs=101),
        "max_num_batched_tokens=100: is less than max_num_seqs=101; each running request needs one token a step",
    ),
    (
        lambda: _config(num_kv_blocks=3),
        "max_model_len=64 needs 4 KV blocks of 16 tokens, num_kv_blocks=3: raise num_kv_blocks or lower max_model_len",
    ),
    (
        lambda: SpeculativeConfig.of({"method": "magic", "num_speculative_tokens": 2}),
        "speculative_config.method='magic': unknown; known are ngram, draft_model",
    ),
    (
        lambda: SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 0}),
        "speculative_config.num_speculative_tokens=0: must be a positive integer below 2^31",
    ),
    (
        lambda: SpeculativeConfig.of({"method": "draft_model", "num_speculative_tokens": 2}),
        "speculative_config.model=None: draft_model needs a model",
    ),
    (
        lambda: SpeculativeConfig.of(
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 9}
        ),
        "speculative_config.prompt_lookup_max=5: is less than prompt_lookup_min=9",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD_CONFIGS, ids=[message for _, message in BAD_CONFIGS])
def test_bad_configurations_are_refused_by_name_and_value(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        make()


def test_an_unknown_key_of_speculative_config_is_refused() -> None:
    with pytest.raises(ParameterError, match="k_max"):
        SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 2, "k_max": 3})


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "prompt_token_ids=[]: is empty; give at least one token"),
    ({"token_ids": [1, 32]}, "prompt_token_ids=32: is no token id; the model has 32"),
    ({"token_ids": [1, -5]}, "prompt_token_ids=-5: is no token id; the model has 32"),
    ({"token_ids": [1, "x"]}, "prompt_token_ids=[1, 'x']: must be a list of token ids"),
    ({"params": greedy(4, stop_token_ids=[99])}, "stop_token_ids=99: is no token id; the model has 32"),
    ({"params": greedy(4, logit_bias={40: 1.0})}, "logit_bias=40: is no token id; the model has 32"),
    ({"params": None}, "params=None: only a resumable request can do without"),
    ({"keep": "some"}, 'keep=\'some\': must be "computed" or "all"'),
    ({"request_id": "taken"}, "request_id='taken': is in use by an unfinished request"),
    (
        {"token_ids": [2] * 64},
        "this model's maximum context length is 64 tokens, with the answer; the input has 64: shorten it",
    ),
    (
        {"params": greedy(4, prompt_logprobs=1), "resumable": True},
        "prompt_logprobs=1: not for a resumable request",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_REQUESTS, ids=[message for _, message in BAD_REQUESTS])
def test_bad_requests_are_refused_and_leave_nothing_behind(options: dict[str, Any], message: str) -> None:
    harness = Harness(max_model_len=64)
    harness.add("taken", [2, 3], greedy(3))
    arguments: dict[str, Any] = {"request_id": "a", "token_ids": [2, 6], "params": greedy(4)} | options
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        add_request(harness.engine, **arguments)
    assert list(harness.engine.requests) == ["taken"]
    harness.run()
    assert harness.said["taken"].token_ids == harness.expect([2, 3], greedy(3)).token_ids
    harness.assert_all_free()


def test_the_longest_prompt_gets_one_token() -> None:
    harness = Harness(max_model_len=64, num_kv_blocks=4, speculative=ngram(3))
    harness.add("a", [2] * 63, greedy(None, ignore_eos=True))
    harness.run()
    assert len(harness.said["a"].token_ids) == 1
    assert harness.said["a"].end.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda engine: add_chunk(engine, "gone", [2], greedy(1)),
            "request_id='gone': is no request with open input",
        ),
        (lambda engine: engine.end_input("gone"), "request_id='gone': is no request with open input"),
        (
            lambda engine: add_chunk(engine, "closed", [2], greedy(1)),
            "request_id='closed': is no request with open input",
        ),
        (
            lambda engine: fork(engine, "open", "closed"),
            "request_id='closed': is in use by an unfinished request",
        ),
        (
            lambda engine: engine.truncate("open", 7),
            "num_tokens=7: must be in [0, 3], the history there is",
        ),
        (
            lambda engine: fork(engine, "open", "new", -1),
            "num_tokens=-1: must be in [0, 3], the history there is",
        ),
    ],
)
def test_bad_calls_on_sessions_are_refused(call: Callable[[Any], object], message: str) -> None:
    harness = Harness(max_model_len=64)
    harness.add("open", [2, 3, 4], None, resumable=True)
    harness.add("closed", [2, 3, 4], greedy(20, ignore_eos=True))
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        call(harness.engine)
    harness.engine.end_input("open")
    harness.run()
    assert len(harness.said["closed"].token_ids) == 20
    harness.assert_all_free()


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("is_answered", [False, True])
def test_a_chunk_that_does_not_fit_is_left_out_and_its_session_goes_on(
    *, is_queued: bool, is_answered: bool
) -> None:
    """The same for one that waits for its turn, whose answer uses up the room, and for one whose turn has come."""
    harness = Harness(max_model_len=32, num_kv_blocks=4)
    answer = greedy(20, ignore_eos=True)
    harness.add("a", [2, 3, 4], answer, resumable=True)
    if not is_queued:
        harness.run_until_turn_ends("a")
    add_chunk(harness.engine, "a", [5] * 12, greedy(4) if is_answered else None)
    add_chunk(harness.engine, "a", [6, 7], greedy(4, ignore_eos=True))
    refused = []
    while harness.engine.has_unfinished_requests():
        refused += [each for each in harness.step() if each.error is not None]
    (refusal,) = refused
    assert (refusal.finish_reason, refusal.finished, refusal.token_ids) == (FinishReason.ERROR, False, ())
    assert refusal.error is not None
    assert refusal.error.endswith(
        "context length is 32 tokens, with the answer; the input has 34: shorten it"
    )
    plain = harness.plain()
    first, second = plain_turns(plain, [([2, 3, 4], answer), ([6, 7], greedy(4, ignore_eos=True))])
    assert harness.said["a"].token_ids == first + second
    harness.engine.end_input("a")
    harness.run()
    assert harness.said["a"].end.finish_reason is FinishReason.STOP
    harness.assert_all_free()


def test_there_must_be_something_to_answer() -> None:
    harness = Harness()
    harness.add("a", [2, 3, 4], None, resumable=True)
    harness.engine.truncate("a", 0)
    add_chunk(harness.engine, "a", [], greedy(1))
    add_chunk(harness.engine, "a", [5], greedy(1))
    harness.run()
    assert harness.said["a"].token_ids == harness.expect([5], greedy(1)).token_ids


def test_what_can_never_fit_is_refused_at_once() -> None:
    """A prompt of the whole context is too long even though the pool would hold it."""
    harness = Harness(max_model_len=64, num_kv_blocks=64)
    with pytest.raises(CapacityError, match="64 tokens, with the answer; the input has 64"):
        add_request(harness.engine, "a", [2] * 64, greedy(1))
    with pytest.raises(
        CapacityError, match="max_model_len=64 needs 4 KV blocks of 16 tokens, num_kv_blocks=3"
    ):
        Harness(max_model_len=64, num_kv_blocks=3)


def test_an_aborted_request_says_nothing_more() -> None:
    """Not even what was to be said with the next step."""
    harness = Harness()
    harness.add("a", [2, 3, 4], greedy(20, ignore_eos=True), resumable=True)
    harness.add("idle", [2, 3, 4], None, resumable=True)
    harness.add("other", [5, 6], greedy(20, ignore_eos=True))
    harness.step()
    harness.engine.truncate("a", 3)
    harness.engine.end_input("idle")
    num_said = len(harness.said["a"].token_ids)
    for name in ("a", "idle"):
        harness.engine.abort_request(name)
    harness.run()
    assert len(harness.said["a"].token_ids) == num_said
    assert harness.said["a"].end.finish_reason is None
    assert "idle" not in harness.said
    assert len(harness.said["other"].token_ids) == 20
    harness.assert_all_free()


def test_an_id_is_in_use_until_its_end_was_reported() -> None:
    harness = Harness()
    harness.add("a", [2, 3, 4], None, resumable=True)
    harness.run()
    harness.engine.end_input("a")
    with pytest.raises(ParameterError, match="request_id='a': is in use"):
        add_request(harness.engine, "a", [2], greedy(1))
    add_request(harness.engine, "b", [2], None, resumable=True)
    with pytest.raises(ParameterError, match="request_id='a': is in use"):
        fork(harness.engine, "b", "a")
    harness.engine.abort_request("b")
    harness.run()
    assert harness.said["a"].end.finished
    add_request(harness.engine, "a", [2], greedy(1))
