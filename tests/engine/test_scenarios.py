"""Situations in which engines of this kind have gone wrong, each with its name."""

from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from segue.contract.reports import FinishReason
from segue.contract.step import Sampling, SeqResult, StepHandle, StepPlan, StepResult
from segue.engine.config import EngineConfig, SpeculativeConfig
from segue.engine.engine import Engine
from segue.engine.request import Chunk, Request, State
from segue.engine.tables import Tables
from segue.engine.timeline import Timeline
from segue.runtime.runtime import LocalRuntime, OnDemand
from segue.sample.params import SamplingParams
from tests.engine.calls import add_chunk, add_request, fork
from tests.engine.harness import (
    EOS,
    Harness,
    LowIdModel,
    ScriptedDrafter,
    ScriptedModel,
    draft_model,
    greedy,
    ngram,
    plain_turns,
)
from tests.sim.grammar import GrammarParams, SimGuides
from tests.sim.oracle import OracleExecutor, OracleModel

DEPTHS = (1, 2, 3)

# --- folding input into a session that speculates ---------------------------------------------------------------

SCRIPT = (0, 0, 0, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22)
"""After the prompt [1, 2, 3] the model says 10, 11, 12, 13, … by position, and the drafter knows it."""


def _folding_session(depth: int, stop_id: int | None = None) -> Harness:
    script = list(SCRIPT)
    if stop_id is not None:
        script[4] = stop_id
    return Harness(
        model=ScriptedModel(script=script),
        drafter=ScriptedDrafter(script),
        speculative=ngram(2),
        max_model_len=16,
        async_depth=depth,
    )


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("params", "stop_id"),
    [
        (greedy(2), 11),
        (greedy(10), EOS),
        (greedy(10, stop_token_ids=[11]), 11),
    ],
    ids=["max_tokens", "eos", "stop_token"],
)
def test_input_folded_in_after_a_stop_inside_accepted_drafts(
    depth: int, params: SamplingParams, stop_id: int
) -> None:
    """The turn stops at the first of two accepted drafts: kept is what is computed, [1, 2, 3, 10], and no more."""
    harness = _folding_session(depth, stop_id)
    request = harness.add("a", [1, 2, 3], params, resumable=True)
    ended = harness.run_until_turn_ends("a")
    assert harness.said["a"].token_ids == [10, stop_id]
    assert ended.finish_reason is (FinishReason.LENGTH if params.max_tokens == 2 else FinishReason.STOP)
    assert ended.stop_reason == (11 if params.stop_token_ids else None)
    if params.max_tokens != 2:
        # Under `max_tokens` nothing is drafted that could not be kept.
        assert (3, (10, stop_id, 12)) in harness.computed

    num_computed = len(harness.computed)
    add_chunk(harness.engine, "a", [7, 8], greedy(2))
    assert request.timeline.tokens.tolist() == [1, 2, 3, 10, 7, 8]
    assert request.timeline.kv_len == 4
    harness.run_until_turn_ends("a")
    # Steps that were in flight at the stop may still run, for nobody.
    assert [part for part in harness.computed[num_computed:] if part[1][0] == 7] == [(4, (7, 8))]
    assert harness.said["a"].turns == [[10, stop_id], [13, 14]]


class _CannedRuntime:
    """Answers each step with the next of these ids, whatever was planned."""

    vocab_size = 32

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self._answers = list(answers)
        self.plans: list[StepPlan] = []

    def is_ready(self, sampling: Sampling, *, wait_s: float = 0.0) -> bool:
        return True

    def submit(self, plan: StepPlan) -> StepHandle:
        return OnDemand(partial(self._execute, plan))

    def _execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        (seq,) = plan.seqs
        tokens = self._answers.pop(0)
        result = SeqResult(start=seq.start, tokens=tokens, num_drafts=max(0, len(tokens) - 1))
        return StepResult(step=plan.step, seqs=[result])

    def close(self) -> None:
        """Nothing to release."""


def test_a_result_longer_than_max_tokens_is_trimmed_before_it_counts() -> None:
    """Whatever comes back: [11, 12, 13] ends at 11 by `max_tokens`, and history is [1, 2, 3, 10]."""
    runtime = _CannedRuntime([[10], [11, 12, 13], [5]])
    engine = Engine(runtime, EngineConfig(max_model_len=16, num_kv_blocks=4, max_num_seqs=8))
    add_request(engine, "a", [1, 2, 3], greedy(2), resumable=True)
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [list(output.token_ids) for output in outputs] == [[10], [11]]
    assert outputs[-1].finish_reason is FinishReason.LENGTH

    add_chunk(engine, "a", [7, 8], greedy(1))
    timeline = engine.requests["a"].timeline
    assert timeline.tokens.tolist() == [1, 2, 3, 10, 7, 8]
    assert timeline.kv_len == 4
    engine.step()
    (seq,) = runtime.plans[-1].seqs
    assert (seq.start, list(seq.tokens)) == (4, [7, 8])
    engine.close()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("keep", ["computed", "all"])
def test_two_updates_queued_on_a_live_speculating_request(depth: int, keep: str) -> None:
    """Both are folded in, one after the other, and each answer is that of the plain run."""
    harness = Harness(speculative=ngram(3), async_depth=depth, block_size=4)
    chunks = [
        ([2, 6, 10, 2, 6], greedy(12, ignore_eos=True)),
        ([9, 4], greedy(9, ignore_eos=True)),
        ([7], greedy(10, ignore_eos=True)),
    ]
    request = harness.add("a", *chunks[0], resumable=True, keep=keep)
    harness.step_until(lambda: len(harness.said["a"].token_ids) >= 3)
    assert request.turn is not None
    assert depth == 1 or request.timeline.flights
    for chunk in chunks[1:]:
        add_chunk(harness.engine, "a", *chunk)
    assert len(request.chunks) == 2
    harness.engine.end_input("a")
    harness.run()

    plain = harness.plain(keep)
    assert harness.said["a"].turns == plain_turns(plain, chunks)
    assert harness.said["a"].end.finished
    assert harness.engine.stats.num_accepted_tokens > 0
    harness.assert_all_free()


# --- sessions ---------------------------------------------------------------------------------------------------

CHUNKS = ([2, 6, 10, 2, 6, 10, 2], [6, 10], [3, 5, 5], [2], [8, 9, 2, 6], [10, 2, 6])


def _session(max_tokens: int, **options: Any) -> Harness:
    """Six chunks, one after the other."""
    harness = Harness(block_size=4, **options)
    params = greedy(max_tokens, logprobs=2, ignore_eos=True)
    harness.add("a", CHUNKS[0], params, resumable=True)
    harness.run_until_turn_ends("a")
    for chunk in CHUNKS[1:]:
        add_chunk(harness.engine, "a", chunk, params)
        harness.run_until_turn_ends("a")
    harness.engine.end_input("a")
    harness.run()
    return harness


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [2, 3, 8])
def test_a_session_of_six_chunks_is_the_same_with_and_without_drafts(depth: int, max_tokens: int) -> None:
    plain = _session(max_tokens)
    drafted = _session(max_tokens, speculative=ngram(4), async_depth=depth)
    assert drafted.said["a"].turns == plain.said["a"].turns
    assert drafted.said["a"].logprobs == plain.said["a"].logprobs
    assert [len(turn) for turn in plain.said["a"].turns] == [max_tokens] * 6
    if max_tokens > 2:
        # The second of two ids comes from the first one's step, so there is nothing to draft.
        assert drafted.engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "speculative", [None, ngram(3), draft_model(2)], ids=["plain", "ngram", "draft_model"]
)
def test_a_session_whose_turn_ends_while_it_is_preempted(
    depth: int, speculative: SpeculativeConfig | None
) -> None:
    """It loses its blocks when all but its last id is known, is recomputed, and goes on as if nothing had been."""
    harness = Harness(
        block_size=4, num_kv_blocks=12, max_model_len=48, speculative=speculative, async_depth=depth
    )
    first, second = (([7, 9, 7, 9, 7], greedy(11, ignore_eos=True)), ([3, 4], greedy(5, ignore_eos=True)))
    session = harness.add("session", *first, resumable=True)
    harness.step_until(lambda: len(session.timeline.tokens) >= 5 + 11 - 4)
    harness.engine.scheduler._preempt(session)
    assert session.state is State.WAITING
    assert not session.timeline.tables.blocks
    add_chunk(harness.engine, "session", *second)
    harness.engine.end_input("session")
    harness.run()
    plain = harness.plain()
    assert harness.said["session"].turns == plain_turns(plain, [first, second])
    harness.assert_all_free()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("ending", ["abort", "truncate", "end_input"])
def test_a_session_that_is_stopped_while_it_is_preempted(depth: int, ending: str) -> None:
    """Its user goes away, interrupts it or closes its input while it waits to be recomputed: no block is lost."""
    harness = Harness(
        block_size=4, num_kv_blocks=12, max_model_len=48, speculative=ngram(3), async_depth=depth
    )
    harness.add("other", [2] * 12, greedy(30, ignore_eos=True))
    session = harness.add("session", [7, 9, 7, 9, 7, 9, 7], greedy(20, ignore_eos=True), resumable=True)
    harness.step_until(lambda: session.state is State.WAITING and session.metrics.num_preemptions > 0)
    match ending:
        case "abort":
            harness.engine.abort_request("session")
        case "truncate":
            harness.engine.truncate("session", 5)
            assert session.timeline.tokens.tolist() == [7, 9, 7, 9, 7]
            harness.engine.end_input("session")
        case "end_input":
            harness.engine.end_input("session")
    harness.run()
    if ending == "end_input":
        expected = harness.expect([7, 9, 7, 9, 7, 9, 7], greedy(20, ignore_eos=True))
        assert harness.said["session"].token_ids == expected.token_ids
    harness.assert_all_free()


# --- admission and preemption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_prompt_is_not_admitted_to_be_preempted_by_its_own_drafts(depth: int) -> None:
    """30 tokens and drafts need three 16-token blocks, and two are free: it waits, and is computed once."""
    harness = Harness(
        block_size=16, num_kv_blocks=6, max_model_len=96, speculative=ngram(3), async_depth=depth
    )
    decodes = [harness.add(name, [2, 6] * 9, greedy(12, ignore_eos=True)) for name in ("a", "b")]
    harness.step_until(lambda: all(len(request.timeline.tokens) >= 20 for request in decodes))
    assert harness.engine.stats.num_free_blocks == 2
    late = harness.add("late", [2, 6, 10] * 10, greedy(20, ignore_eos=True))
    harness.step()
    assert late.state is State.WAITING
    harness.run()
    assert harness.engine.stats.num_preemptions == 0
    computed_at_once = [inputs for start, inputs in harness.computed if start == 0 and len(inputs) == 30]
    assert len(computed_at_once) == 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("decode_len", [20, 30, 36, 54])
def test_no_prefill_token_is_computed_twice(depth: int, decode_len: int) -> None:
    """Prompts of 125 and 128 tokens in chunks, beside two decodes that speculate, in a pool of 7 blocks."""
    harness = Harness(
        model=LowIdModel(),
        block_size=64,
        num_kv_blocks=7,
        max_model_len=192,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
        speculative=draft_model(3),
        async_depth=depth,
    )
    decodes = [
        harness.add(name, [2, 6] * (decode_len // 2), greedy(40, ignore_eos=True)) for name in ("a", "b")
    ]
    harness.step_until(lambda: all(len(request.timeline.tokens) >= decode_len + 2 for request in decodes))
    # The ids of the prompts tell whose tokens were computed.
    prompts = {"c": [40 + i % 10 for i in range(125)], "d": [50 + i % 10 for i in range(128)]}
    for name, prompt in prompts.items():
        harness.add(name, prompt, greedy(8, ignore_eos=True))
    num_before = len(harness.computed)
    harness.run()
    for prompt in prompts.values():
        times = Counter[int]()
        for start, inputs in harness.computed[num_before:]:
            if inputs[0] // 10 == prompt[0] // 10:
                times.update(range(start, start + len(inputs)))
        assert times == Counter(range(len(prompt)))
    for name, prompt in prompts.items():
        assert harness.said[name].token_ids == harness.expect(prompt, greedy(8, ignore_eos=True)).token_ids


@pytest.mark.parametrize(
    ("prompt_len", "decode_tokens", "lookahead", "is_admitted"),
    [(64, 0, 0, True), (62, 0, 3, False), (57, 4, 3, True), (58, 4, 3, False)],
)
def test_admission_into_four_free_blocks(
    prompt_len: int, decode_tokens: int, lookahead: int, is_admitted: bool
) -> None:
    """A request fits when its prompt, its first decode step and the lookahead do: 64 slots for 64 or 65 tokens."""
    harness = Harness(block_size=16, num_kv_blocks=5, max_model_len=80)
    taken = harness.engine.pool.allocate(1)
    assert harness.engine.pool.num_free == 4
    harness.engine.scheduler.margin = decode_tokens + lookahead
    submission = harness.engine.intake.submission([2], greedy(1))
    timeline = Timeline(Tables(harness.engine.pool, 16))
    request = Request(submission, timeline, arrival=1, adaptive=None)
    request.fold(Chunk(array("i", [2] * prompt_len), greedy(1), 1), harness.config)
    harness.engine.scheduler.enqueue(request)
    planned = harness.engine.scheduler.schedule(0)
    assert (planned is not None) == is_admitted
    assert request.state is (State.RUNNING if is_admitted else State.WAITING)
    harness.engine.pool.release(taken)


def test_margins_of_the_configurations() -> None:
    """1 + k with drafts, and as much again as a draft model looks ahead; nothing without."""
    margins = [
        Harness(speculative=config).engine.scheduler.margin for config in (None, ngram(4), draft_model(3))
    ]
    assert margins == [0, 5, 7]


def test_requests_that_gave_up_waiting_are_forgotten() -> None:
    """Also when those before them never cease: the queue does not grow with everybody who went away."""
    harness = Harness(scheduling_policy="priority", max_num_seqs=1)
    harness.add("first", [2, 3], greedy(100, ignore_eos=True))
    harness.add("next", [4], greedy(2))
    harness.step()
    for i in range(1000):
        harness.add(f"impatient {i}", [2] * 20, greedy(5), priority=1)
        harness.engine.abort_request(f"impatient {i}")
    assert len(harness.engine.scheduler._waiting) < 10
    harness.add("patient", [5], greedy(2), priority=1)
    harness.run()
    for name, prompt in (("next", [4]), ("patient", [5])):
        assert harness.said[name].token_ids == harness.expect(prompt, greedy(2)).token_ids


# --- the schedule changes nothing -------------------------------------------------------------------------------

REQUESTS = {
    "a": ([2, 6, 10, 2, 6, 10, 2, 6, 10, 5], greedy(30, logprobs=2, ignore_eos=True)),
    "b": (
        [3, 3, 3, 8, 3, 3, 3, 8, 3],
        SamplingParams(max_tokens=24, temperature=1.0, seed=5, logprobs=0, ignore_eos=True),
    ),
    "c": ([9, 4] * 8, greedy(28, logprobs=1, frequency_penalty=0.5)),
    "d": (
        [2, 6, 10, 2, 6, 10, 2, 6, 10, 7],
        SamplingParams(max_tokens=18, temperature=1.0, seed=6, logprobs=2, ignore_eos=True),
    ),
}


def _answers(**options: Any) -> Harness:
    harness = Harness(block_size=4, max_model_len=48, **options)
    for name, (prompt, params) in REQUESTS.items():
        harness.add(name, prompt, params)
    harness.run()
    harness.assert_all_free()
    return harness


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("pressure", ["preemption", "chunked_prefill"])
def test_drafts_preemption_chunks_and_async_scheduling_change_nothing(depth: int, pressure: str) -> None:
    """Tokens and logprobs of each request are those of a run by itself, with ==."""
    options = {
        "preemption": {"num_kv_blocks": 12},
        "chunked_prefill": {"num_kv_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 5},
    }[pressure]
    harness = _answers(speculative=ngram(3), async_depth=depth, **options)
    for name, (prompt, params) in REQUESTS.items():
        alone = Harness(block_size=16, max_model_len=48)
        alone.add("alone", prompt, params)
        alone.run()
        assert harness.said[name].token_ids == alone.said["alone"].token_ids
        assert harness.said[name].logprobs == alone.said["alone"].logprobs
    stats = harness.engine.stats
    assert stats.num_accepted_tokens > 0
    if pressure == "preemption":
        assert stats.num_preemptions > 0
    else:
        longest = max(len(inputs) for _, inputs in harness.computed)
        assert longest <= 5


def _idle_session(harness: Harness, prompt: list[int], forks: int) -> list[str]:
    """A session and forks of it, all in the same blocks."""
    harness.add("s", prompt, None, resumable=True)
    harness.run()
    names = [f"s{i}" for i in range(forks)]
    for name in names:
        harness.checker.salts[name] = None
        fork(harness.engine, "s", name)
    return ["s", *names]


def _holding(harness: Harness, names: list[str]) -> list[str]:
    return [name for name in names if harness.engine.requests[name].timeline.tables.blocks]


def test_idle_sessions_keep_shared_blocks_that_would_not_be_enough() -> None:
    """Four tables name the same four blocks: giving them up makes room for four, not for sixteen."""
    harness = Harness(block_size=4, num_kv_blocks=12, max_model_len=48, enable_prefix_caching=False)
    names = _idle_session(harness, [2, 3] * 8, forks=3)
    harness.add("running", [4] * 17, greedy(15, ignore_eos=True))
    harness.step()
    harness.add("waiting", [5] * 30, greedy(2, ignore_eos=True))
    while "running" in harness.engine.requests:
        assert _holding(harness, names) == names
        harness.step()
    harness.run()
    assert _holding(harness, names) == names
    assert harness.said["waiting"].token_ids == harness.expect([5] * 30, greedy(2, ignore_eos=True)).token_ids
    assert harness.engine.stats.num_preemptions == 0


@pytest.mark.parametrize("admission", [True, False], ids=["admission", "decode"])
def test_idle_sessions_in_the_blocks_of_a_running_one_give_up_nothing(*, admission: bool) -> None:
    """What they hold stays held; the session with blocks of its own goes instead, though it was idle for less."""
    harness = Harness(block_size=4, num_kv_blocks=8, max_model_len=32, enable_prefix_caching=False)
    names = _idle_session(harness, [2, 3] * 8 + [2], forks=3)
    harness.add("own", [6] * 9, None, resumable=True)
    harness.run()
    add_chunk(harness.engine, "s", [7], greedy(2 if admission else 14, ignore_eos=True))
    harness.step()
    if admission:
        harness.add("new", [5] * 9, greedy(2, ignore_eos=True))
    harness.run()
    assert _holding(harness, [*names, "own"]) == names
    assert harness.engine.stats.num_preemptions == 0


def test_a_session_in_a_full_pool_is_admitted_when_the_fork_of_its_last_block_goes() -> None:
    """There is no block for a copy, and none is needed then."""
    harness = Harness(block_size=4, num_kv_blocks=4, max_model_len=16, enable_prefix_caching=False)
    prompt, more = [2, 3] * 7, greedy(1, ignore_eos=True)
    harness.add("s", prompt, None, resumable=True)
    harness.run()
    harness.checker.salts["fork"] = None
    fork(harness.engine, "s", "fork")
    add_chunk(harness.engine, "s", [7], more)
    harness.run()
    assert harness.said["s"].token_ids == harness.expect([*prompt, 7], more).token_ids
    assert _holding(harness, ["s", "fork"]) == ["s"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_empty_chunk_while_the_last_of_the_input_is_computed(depth: int) -> None:
    """Nothing is added and nothing is left to plan: no part without input, which would fail its step for all."""
    harness = Harness(async_depth=depth)
    harness.add("other", [3, 4], greedy(12, ignore_eos=True))
    harness.step()
    harness.add("a", [2, 6, 10], None, resumable=True)
    harness.step()
    add_chunk(harness.engine, "a", [], None)
    harness.run()
    add_chunk(harness.engine, "a", [], greedy(3))
    harness.run()
    assert harness.said["a"].token_ids == harness.expect([2, 6, 10], greedy(3)).token_ids
    assert harness.said["other"].token_ids == harness.expect([3, 4], greedy(12, ignore_eos=True)).token_ids


def test_who_waits_for_a_grammar_holds_up_nobody() -> None:
    class SlowGuides(SimGuides):
        is_done = False

        def is_ready(self, sampling: Sampling, wait_s: float) -> bool:
            return self.is_done and super().is_ready(sampling, wait_s)

    guides = SlowGuides(32)
    executor = OracleExecutor(OracleModel(), 64)
    executor.allocate_kv(16, 4)
    config = EngineConfig(max_model_len=64, num_kv_blocks=16, block_size=4, max_num_seqs=1)
    engine = Engine(LocalRuntime(executor, guides=guides), config)
    add_request(engine, "guided", [2, 3, 4], GrammarParams(max_tokens=5))
    add_request(engine, "plain", [2, 3, 5], SamplingParams(max_tokens=5, ignore_eos=True))
    outputs = [output for _ in range(6) for output in engine.step()]
    assert {output.request_id for output in outputs} == {"plain"}
    assert outputs[-1].finished
    assert (engine.stats.num_waiting, engine.has_unfinished_requests()) == (1, True)
    assert engine.step() == []
    guides.is_done = True
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"guided"}
    add_request(engine, "gone", [2, 3, 4], GrammarParams(max_tokens=5, seed=1))
    engine.abort_request("gone")
    assert engine.step() == []
    assert engine.stats.num_free_blocks == 16
    engine.close()
