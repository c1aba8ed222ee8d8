"""The local runtime: references into steps that were planned but not known, verification, what drafters are asked."""

import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from segue.contract.step import (
    MAX_STEPS_IN_FLIGHT,
    NOT_FINITE,
    After,
    ForwardResult,
    Sampling,
    SeqStep,
    StepPlan,
    TokenLogprobs,
)
from segue.runtime.runtime import LocalRuntime
from segue.speculate.drafter import DraftRequest, Proposal

GREEDY = Sampling()
LOGPROBS = Sampling(num_logprobs=0)
PENALISED = Sampling(frequency_penalty=0.5)

PROMPT = array("i", [1, 2, 3])
SCRIPT = [0, 0, 0, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
"""What is sampled for each position."""


class Scripted:
    """Samples what the script has for a position. Keeps the steps it was given."""

    vocab_size = 100
    max_model_len = 100
    kv_bytes_per_token = 1

    def __init__(self) -> None:
        self.steps: list[SeqStep] = []
        self.copies: list[Sequence[tuple[int, int]]] = []
        self.errors: dict[int, str] = {}
        self.fails = False
        self.is_closed = False

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """It has no KV."""

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        self.steps = list(seqs)
        self.copies.append(copies)
        if self.fails:
            raise RuntimeError("no")
        result = ForwardResult([], {}, {}, self.errors)
        for i, seq in enumerate(seqs):
            assert seq.after is None
            if i in self.errors:
                continue
            if seq.sampling is not None:
                end = seq.start + len(seq.tokens)
                for position in range(end, end + 1 + len(seq.drafts)):
                    if seq.sampling.num_logprobs is not None:
                        result.logprobs[len(result.tokens)] = TokenLogprobs(-float(position), 1, (), ())
                    result.tokens.append(SCRIPT[position])
            if seq.prompt_targets:
                result.prompt_logprobs[i] = [TokenLogprobs(-1.0, 1, (), ()) for _ in seq.prompt_targets]
        return result

    def close(self) -> None:
        self.is_closed = True


class ScriptedDrafter:
    """Proposes given drafts; keeps what it was asked."""

    def __init__(self, *proposals: Sequence[int], has_kv: bool = False) -> None:
        self.has_kv = has_kv
        self.requests: list[DraftRequest] = []
        self.copies: list[Sequence[tuple[int, int]]] = []
        self._proposals = list(proposals)
        self.is_closed = False

    def propose(
        self, requests: Sequence[DraftRequest], copies: Sequence[tuple[int, int]]
    ) -> Sequence[Proposal]:
        self.requests = list(requests)
        self.copies.append(copies)
        return [
            Proposal(
                self._proposals.pop(0) if request.count else (),
                request.first + len(request.token_ids) if self.has_kv else None,
            )
            for request in requests
        ]

    def close(self) -> None:
        self.is_closed = True


def _prefill(**options: Any) -> SeqStep:
    values: dict[str, Any] = {
        "tokens": PROMPT,
        "sampling": GREEDY,
        "history": PROMPT,
        "history_len": 3,
    } | options
    return SeqStep(start=0, blocks=[0], **values)


def _after(step: int, start: int, *, index: int = 0, history: Any = PROMPT, **options: Any) -> SeqStep:
    values: dict[str, Any] = {"sampling": GREEDY, "history": history, "history_len": len(history)} | options
    return SeqStep(start=start, tokens=(), blocks=[0], after=After(step, index), **values)


# --- references -------------------------------------------------------------------------------------------------


def test_a_reference_becomes_the_last_id_sampled_and_its_position() -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor)
    (first,) = runtime.execute(StepPlan(0, [_prefill()])).seqs
    assert (first.start, list(first.tokens)) == (0, [10])
    (second,) = runtime.execute(StepPlan(1, [_after(0, 3)])).seqs
    (step,) = executor.steps
    assert (step.start, list(step.tokens), list(step.drafts)) == (3, [10], [])
    assert (second.start, list(second.tokens)) == (3, [11])


@pytest.mark.parametrize(
    ("drafts", "kept", "start"),
    [
        ([11, 12], [11, 12, 13], 6),
        ([11, 50], [11, 12], 5),
        ([50, 12], [11], 4),
        ([11, 12, 13], [11, 12, 13, 14], 7),
    ],
)
def test_drafts_are_kept_up_to_the_first_wrong_one_and_the_next_step_starts_after_them(
    drafts: list[int], kept: list[int], start: int
) -> None:
    executor = Scripted()
    drafter = ScriptedDrafter(drafts, [])
    runtime = LocalRuntime(executor, drafter=drafter)
    (first,) = runtime.execute(StepPlan(0, [_prefill(propose=3)])).seqs
    assert list(first.drafts) == drafts
    (second,) = runtime.execute(StepPlan(1, [_after(0, 3, max_drafts=3, propose=3)])).seqs
    assert (executor.steps[0].start, list(executor.steps[0].drafts)) == (3, drafts)
    assert (list(second.tokens), second.num_drafts) == (kept, len(drafts))
    runtime.execute(StepPlan(2, [_after(1, 4)]))
    assert (executor.steps[0].start, list(executor.steps[0].tokens)) == (start, kept[-1:])


def test_no_more_drafts_are_verified_than_the_plan_allows() -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor, drafter=ScriptedDrafter([11, 12, 13]))
    runtime.execute(StepPlan(0, [_prefill(propose=3)]))
    (result,) = runtime.execute(StepPlan(1, [_after(0, 3, max_drafts=1)])).seqs
    assert list(executor.steps[0].drafts) == [11]
    assert list(result.tokens) == [11, 12]


def test_references_name_a_sequence_of_a_step() -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor)
    other = SeqStep(start=5, tokens=[9], blocks=[1], sampling=GREEDY)
    runtime.execute(StepPlan(0, [_prefill(), other]))
    runtime.execute(StepPlan(1, [_after(0, 6, index=1), _after(0, 3, index=0)]))
    assert [(step.start, list(step.tokens)) for step in executor.steps] == [(6, [13]), (3, [10])]


def test_references_reach_as_far_back_as_may_fly() -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor)
    runtime.execute(StepPlan(0, [_prefill()]))
    for step in range(1, MAX_STEPS_IN_FLIGHT):
        runtime.execute(StepPlan(step, []))
    (late,) = runtime.execute(StepPlan(MAX_STEPS_IN_FLIGHT - 1, [_after(0, 3)])).seqs
    assert late.error is None
    (too_late,) = runtime.execute(StepPlan(MAX_STEPS_IN_FLIGHT, [_after(0, 3)])).seqs
    assert too_late.error == "an earlier step of this request failed"


# --- history ----------------------------------------------------------------------------------------------------


def test_history_is_the_known_ids_and_those_that_were_in_flight_at_planning() -> None:
    """Two steps were planned before the first was settled: the second one's penalties see what it gave."""
    executor = Scripted()
    runtime = LocalRuntime(executor, drafter=ScriptedDrafter([11, 12], [14]))
    runtime.execute(StepPlan(0, [_prefill(sampling=PENALISED, propose=2)]))
    assert executor.steps[0].history == PROMPT
    runtime.execute(StepPlan(1, [_after(0, 3, sampling=PENALISED, max_drafts=2, propose=1)]))
    assert executor.steps[0].history == array("i", [1, 2, 3, 10])
    runtime.execute(StepPlan(2, [_after(1, 4, sampling=PENALISED, max_drafts=1)]))
    assert executor.steps[0].history == array("i", [1, 2, 3, 10, 11, 12, 13])


def test_history_that_was_settled_meanwhile_is_not_counted_twice() -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor)
    runtime.execute(StepPlan(0, [_prefill()]))
    runtime.execute(StepPlan(1, [_after(0, 3)]))
    settled = array("i", [1, 2, 3, 10])
    runtime.execute(StepPlan(2, [_after(1, 4, history=settled, sampling=PENALISED)]))
    assert executor.steps[0].history == array("i", [1, 2, 3, 10, 11])
    settled = array("i", [1, 2, 3, 10, 11, 12])
    runtime.execute(StepPlan(3, [_after(2, 5, history=settled, sampling=PENALISED)]))
    assert executor.steps[0].history == settled


def test_only_the_part_of_the_history_that_counts_is_seen_and_as_a_copy() -> None:
    """The engine has appended more to it since the step was planned."""
    executor = Scripted()
    runtime = LocalRuntime(executor)
    growing = array("i", [1, 2, 3, 77])
    runtime.execute(StepPlan(0, [_prefill(history=growing, sampling=PENALISED)]))
    assert executor.steps[0].history == PROMPT
    growing[0] = 5
    assert executor.steps[0].history == PROMPT


def test_history_stays_behind_when_drawing_does_not_need_it() -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor)
    runtime.execute(StepPlan(0, [_prefill()]))
    assert executor.steps[0].history is None


# --- what drafters are asked ------------------------------------------------------------------------------------


def test_the_drafter_sees_all_ids_up_to_the_newest() -> None:
    drafter = ScriptedDrafter([11, 50], [])
    runtime = LocalRuntime(Scripted(), drafter=drafter)
    runtime.execute(StepPlan(0, [_prefill(propose=2)]))
    (request,) = drafter.requests
    assert (request.first, request.token_ids, request.count) == (0, array("i", [1, 2, 3, 10]), 2)
    runtime.execute(StepPlan(1, [_after(0, 3, max_drafts=2, propose=4)]))
    (request,) = drafter.requests
    assert (request.token_ids, request.count) == (array("i", [1, 2, 3, 10, 11, 12]), 4)


def test_a_draft_model_is_given_only_what_it_is_behind_by() -> None:
    drafter = ScriptedDrafter([11, 12], [14], has_kv=True)
    runtime = LocalRuntime(Scripted(), drafter=drafter)
    (result,) = runtime.execute(StepPlan(0, [_prefill(propose=2, draft_start=1)])).seqs
    (request,) = drafter.requests
    assert (request.first, request.token_ids, request.draft_start) == (1, array("i", [2, 3, 10]), 1)
    assert result.draft_kv_len == 4
    # The plan knew only that position 1 was missing; the step before has computed up to 4 since.
    runtime.execute(StepPlan(1, [_after(0, 3, max_drafts=2, propose=1, draft_start=1)]))
    (request,) = drafter.requests
    assert (request.first, request.token_ids, request.draft_start) == (4, array("i", [11, 12, 13]), 4)


def test_a_chunk_of_a_prefill_fills_the_draft_model_without_proposals() -> None:
    drafter = ScriptedDrafter(has_kv=True)
    runtime = LocalRuntime(Scripted(), drafter=drafter)
    chunk = SeqStep(start=0, tokens=PROMPT[:2], blocks=[0], history=PROMPT, history_len=2, draft_start=0)
    (result,) = runtime.execute(StepPlan(0, [chunk])).seqs
    (request,) = drafter.requests
    assert (request.token_ids, request.count) == (array("i", [1, 2]), 0)
    assert (list(result.tokens), list(result.drafts), result.draft_kv_len) == ([], [], 2)


def test_who_wants_no_drafts_is_not_asked_about() -> None:
    drafter = ScriptedDrafter([11])
    runtime = LocalRuntime(Scripted(), drafter=drafter)
    other = SeqStep(start=5, tokens=[9], blocks=[1], sampling=GREEDY)
    results = runtime.execute(StepPlan(0, [other, _prefill(propose=1)])).seqs
    assert [request.count for request in drafter.requests] == [1]
    assert [list(result.drafts) for result in results] == [[], [11]]
    drafter.requests = []
    runtime.execute(StepPlan(1, [other]))
    assert drafter.requests == []


@pytest.mark.parametrize("has_worker", [False, True])
def test_a_step_that_fails_has_a_result_which_names_the_blocks_it_left_unfilled(has_worker: bool) -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor, has_worker=has_worker)
    executor.fails = True
    failed = runtime.submit(StepPlan(0, [_prefill(), _prefill()], [(1, 2), (2, 5)])).result()
    assert [seq.error is not None for seq in failed.seqs] == [True, True]
    assert list(failed.unfilled) == [2, 5]
    executor.fails = False
    assert list(runtime.submit(StepPlan(1, [_prefill()], [(1, 2)])).result().unfilled) == []
    runtime.close()


def test_without_a_worker_a_step_is_executed_once_when_its_result_is_asked_for() -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor)
    handle = runtime.submit(StepPlan(0, [_prefill()]))
    assert len(executor.copies) == 0
    assert handle.result() is handle.result()
    assert len(executor.copies) == 1


def test_a_worker_takes_steps_in_order_and_drops_at_the_end_what_has_not_begun() -> None:
    began, may_end = threading.Event(), threading.Event()

    class Slow(Scripted):
        def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
            began.set()
            assert may_end.wait(60)
            return super().forward(seqs, copies)

    executor = Slow()
    runtime = LocalRuntime(executor, has_worker=True)
    first, second = (runtime.submit(StepPlan(step, [_prefill()])) for step in range(2))
    assert began.wait(60), "a worker begins before anybody asks"
    may_end.set()
    assert [first.result().step, second.result().step] == [0, 1]

    began.clear()
    may_end.clear()
    running = runtime.submit(StepPlan(2, [_prefill()]))
    runtime.submit(StepPlan(3, [_prefill()]))
    assert began.wait(60)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    with suppress(RuntimeError):  # raised once it is closing, and nothing is left in its queue
        while closing.is_alive():
            runtime.submit(StepPlan(4, []))
    may_end.set()
    closing.join(60)
    assert running.result().step == 2
    assert len(executor.copies) == 3


def test_copies_go_to_the_executor_and_to_a_drafter_with_kv() -> None:
    for has_kv in (False, True):
        executor, drafter = Scripted(), ScriptedDrafter(has_kv=has_kv)
        runtime = LocalRuntime(executor, drafter=drafter)
        runtime.execute(StepPlan(0, [], [(1, 2)]))
        assert executor.copies == [[(1, 2)]]
        assert drafter.copies == ([[(1, 2)]] if has_kv else [])


class FailingDrafter(ScriptedDrafter):
    """Fails as often as it is told to."""

    def __init__(self, *proposals: Sequence[int], num_failures: int, has_kv: bool = False) -> None:
        super().__init__(*proposals, has_kv=has_kv)
        self.num_failures = num_failures

    def propose(
        self, requests: Sequence[DraftRequest], copies: Sequence[tuple[int, int]]
    ) -> Sequence[Proposal]:
        proposals = super().propose(requests, copies)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("no memory")
        return proposals


@pytest.mark.parametrize("has_kv", [False, True])
def test_a_drafter_that_fails_costs_drafts_and_no_answer(
    has_kv: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = FailingDrafter([11], [11], num_failures=1, has_kv=has_kv)
    runtime = LocalRuntime(Scripted(), drafter=drafter)
    step = _prefill(propose=1, draft_start=0 if has_kv else None)
    (result,) = runtime.execute(StepPlan(0, [step], [(1, 2)])).seqs
    assert (result.error, list(result.tokens), list(result.drafts)) == (None, [10], [])
    assert result.draft_kv_len is None
    assert "no memory" in caplog.text
    # The copies are made up for; the next step has drafts again.
    assert [list(copies) for copies in drafter.copies] == ([[(1, 2)], [(1, 2)]] if has_kv else [[]])
    (result,) = runtime.execute(StepPlan(1, [step])).seqs
    assert list(result.drafts) == [11]


def test_a_drafter_whose_copies_are_lost_is_not_asked_again() -> None:
    drafter = FailingDrafter([11], num_failures=2, has_kv=True)
    runtime = LocalRuntime(Scripted(), drafter=drafter)
    step = _prefill(propose=1, draft_start=0)
    runtime.execute(StepPlan(0, [step], [(1, 2)]))
    assert drafter.is_closed
    (result,) = runtime.execute(StepPlan(1, [step])).seqs
    assert (result.error, list(result.tokens), list(result.drafts)) == (None, [10], [])
    assert result.draft_kv_len == 4


# --- grammars -----------------------------------------------------------------------------------------------------


class ScriptedGuides:
    """Allows everything, and fails after id 77."""

    num_ids = 0

    def is_ready(self, sampling: Sampling, wait_s: float) -> bool:
        return True

    def of(self, sampling: Sampling) -> "ScriptedGuides":
        return self

    def masks(self, known: int, ids: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        if list(ids) == [77]:
            raise ZeroDivisionError("secret\nof the inside")
        return [b"\xff" * 13] * (1 + len(drafts))

    def close(self) -> None:
        """Nothing to release."""


def test_what_fails_in_one_grammar_is_the_error_of_its_sequence(caplog: pytest.LogCaptureFixture) -> None:
    guided = Sampling(grammar="g", output_start=3)
    runtime = LocalRuntime(Scripted(), guides=ScriptedGuides())
    broken, whole = (
        SeqStep(
            start=3,
            tokens=[token],
            blocks=[0],
            sampling=guided,
            history=array("i", [1, 2, 3, token]),
            history_len=4,
        )
        for token in (77, 10)
    )
    first, second, third = runtime.execute(StepPlan(0, [broken, whole, _prefill()])).seqs
    assert first.error == "an internal error (ZeroDivisionError) ended this request: the log says more"
    assert "secret" in caplog.text
    assert (second.error, list(second.tokens)) == (None, [11])
    assert (third.error, list(third.tokens)) == (None, [10])


# --- results ----------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_ids_that_are_kept() -> None:
    runtime = LocalRuntime(Scripted())
    drafting = SeqStep(start=3, tokens=[10], blocks=[0], drafts=[11, 50], sampling=LOGPROBS)
    silent = SeqStep(start=6, tokens=[13], blocks=[1], drafts=[14], sampling=GREEDY)
    first, second, third = runtime.execute(StepPlan(0, [silent, drafting, drafting])).seqs
    assert first.logprobs is None
    for result in (second, third):
        assert result.logprobs is not None
        assert [entry.logprob for entry in result.logprobs] == [-4.0, -5.0]


def test_prompt_logprobs_belong_to_their_sequence() -> None:
    runtime = LocalRuntime(Scripted())
    other = SeqStep(start=5, tokens=[9], blocks=[1], sampling=GREEDY)
    first, second = runtime.execute(StepPlan(0, [other, _prefill(prompt_targets=[2, 3])])).seqs
    assert first.prompt_logprobs is None
    assert second.prompt_logprobs is not None
    assert len(second.prompt_logprobs) == 2


def test_an_error_concerns_one_sequence_and_its_later_parts() -> None:
    executor = Scripted()
    drafter = ScriptedDrafter([14])
    runtime = LocalRuntime(executor, drafter=drafter)
    drafting = SeqStep(
        start=3,
        tokens=[10],
        blocks=[0],
        drafts=[11],
        sampling=GREEDY,
        propose=1,
        history=array("i", [1, 2, 3, 10]),
        history_len=4,
    )
    other = SeqStep(start=5, tokens=[12], blocks=[1], sampling=GREEDY)
    executor.errors = {0: NOT_FINITE}
    first, second = runtime.execute(StepPlan(0, [drafting, other])).seqs
    assert first.error == NOT_FINITE
    assert list(second.tokens) == [13]
    assert drafter.requests == []
    executor.errors = {}
    first, second = runtime.execute(StepPlan(1, [_after(0, 5), _after(0, 6, index=1)])).seqs
    assert first.error == "an earlier step of this request failed"
    assert second.error is None
    assert list(second.tokens) == [14]
    # And so on, as far as references go.
    (again,) = runtime.execute(StepPlan(2, [_after(1, 6)])).seqs
    assert again.error == "an earlier step of this request failed"


def test_what_refers_to_a_step_that_raised_is_an_error_and_the_rest_is_computed() -> None:
    executor = Scripted()
    runtime = LocalRuntime(executor)
    executor.fails = True
    with pytest.raises(RuntimeError, match="no"):
        runtime.execute(StepPlan(0, [_prefill()]))
    executor.fails = False
    first, second = runtime.execute(StepPlan(1, [_after(0, 3), _prefill()])).seqs
    assert first.error == "an earlier step of this request failed"
    assert list(second.tokens) == [10]
    assert len(executor.steps) == 1


def test_close_closes_both() -> None:
    executor, drafter = Scripted(), ScriptedDrafter()
    LocalRuntime(executor, drafter=drafter).close()
    assert executor.is_closed
    assert drafter.is_closed
