"""Executes plans on an executor: resolves references, verifies drafts, asks the drafter for the next ones.

plan ──▶ resolve `after` ──▶ forward ──▶ keep the drafts that equal what was sampled ──▶ propose ──▶ result
               ▲                                        │
               └──── what the last few steps came to ◀──┘
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from segue.contract.step import (
    MAX_STEPS_IN_FLIGHT,
    After,
    Executor,
    ForwardResult,
    Sampling,
    SeqResult,
    SeqStep,
    StepHandle,
    StepPlan,
    StepResult,
)
from segue.errors import UsageError, describe
from segue.sample.guide import Guides, without
from segue.speculate.drafter import Drafter, DraftRequest, Proposal

log = logging.getLogger("segue")


class _Outcome(msgspec.Struct, frozen=True):
    """What one sequence's part of a step came to, kept for the parts that go on from it."""

    after: After | None
    first_new: int
    """Position of the first of `result.tokens`."""
    result: SeqResult


class OnDemand:
    """A step that is executed when its result is asked for, by the thread that asks."""

    def __init__(self, execute: Callable[[], StepResult]) -> None:
        self._execute = execute
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._execute()
        return self._result


class LocalRuntime:
    """A `Runtime` over an `Executor` of this process."""

    def __init__(
        self,
        executor: Executor,
        *,
        drafter: Drafter | None = None,
        guides: Guides | None = None,
        has_worker: bool = False,
    ) -> None:
        """`guides` makes what follows an answer's grammar; without it no request may have one.

        `has_worker`: a thread executes the steps beside the caller; else each is executed when its result is asked for.
        """
        self._executor = executor
        self._drafter = drafter
        self._guides = guides
        self._worker = ThreadPoolExecutor(1, "segue-step") if has_worker else None
        self._outcomes: dict[int, list[_Outcome]] = {}

    @property
    def vocab_size(self) -> int:
        return self._executor.vocab_size

    def is_ready(self, sampling: Sampling, *, wait_s: float = 0.0) -> bool:
        if self._guides is None or sampling.grammar is None:
            return True
        return self._guides.is_ready(sampling, wait_s)

    def submit(self, plan: StepPlan) -> StepHandle:
        if self._worker is None:
            return OnDemand(partial(self._result, plan))
        return self._worker.submit(self._result, plan)

    def _result(self, plan: StepPlan) -> StepResult:
        try:
            return self.execute(plan)
        except Exception as error:
            return _failed(plan, error)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, here and now. Raises what the executor raises; the step has failed then. What goes wrong with
        one sequence's grammar is that sequence's error, and a drafter's failure costs drafts alone."""
        self._outcomes.pop(plan.step - MAX_STEPS_IN_FLIGHT, None)
        results: list[SeqResult | None] = []
        steps: list[SeqStep] = []
        for seq in plan.seqs:
            try:
                step = self._resolve(seq)
            except Exception as error:
                step = SeqResult(error=describe(error))
            if isinstance(step, SeqStep):
                steps.append(step)
                results.append(None)
            else:
                results.append(step)
        forward = self._executor.forward(steps, plan.copies)
        verified = iter(_verify(steps, forward))
        concrete = iter(steps)
        outcomes = []
        for seq, result in zip(plan.seqs, results, strict=True):
            if result is None:
                step, result = next(concrete), next(verified)
                first_new = step.start + len(step.tokens)
            else:
                first_new = seq.start
            outcomes.append(_Outcome(seq.after, first_new, result))
        if self._drafter is not None:
            self._propose(self._drafter, plan, outcomes)
        self._outcomes[plan.step] = outcomes
        return StepResult(step=plan.step, seqs=[outcome.result for outcome in outcomes])

    # --- references -------------------------------------------------------------------------------------------

    def _parent(self, after: After) -> _Outcome | None:
        """The part referred to; None when its step failed."""
        outcomes = self._outcomes.get(after.step)
        return None if outcomes is None else outcomes[after.index]

    def _resolve(self, seq: SeqStep) -> SeqStep | SeqResult:
        """The part with nothing left open: known inputs, and its own copy of the history if it needs one."""
        wants_history = seq.sampling is not None and seq.sampling.has_penalties
        if seq.after is None:
            if seq.history is None:
                return seq
            history = self._history(seq, 0, None) if wants_history else None
            return self._guide(seq, msgspec.structs.replace(seq, history=history))
        parent = self._parent(seq.after)
        if parent is None or parent.result.error is not None:
            return SeqResult(error="an earlier step of this request failed")
        tokens = parent.result.tokens
        return self._guide(
            seq,
            msgspec.structs.replace(
                seq,
                start=parent.first_new + len(tokens) - 1,
                tokens=tokens[-1:],
                drafts=parent.result.drafts[: seq.max_drafts],
                after=None,
                history=self._history(seq, 0, seq.after) if wants_history else None,
            ),
        )

    def _guide(self, seq: SeqStep, step: SeqStep) -> SeqStep:
        """With a grammar, also which ids each row may draw. Drafts that it forbids are left out."""
        sampling = seq.sampling
        if sampling is None or sampling.grammar is None:
            return step
        if self._guides is None:
            raise UsageError("this runtime has no guides for grammars")
        guide = self._guides.of(sampling)
        end = step.start + len(step.tokens)
        # The ids that a guide was told before are the same: what is drawn depends on its `Sampling` alone.
        known = min(guide.num_ids, end - sampling.output_start)
        masks = guide.masks(known, self._history(seq, sampling.output_start + known, seq.after), step.drafts)
        if end < sampling.banned_until:
            masks = [
                without(mask, sampling.last_resort) if end + row < sampling.banned_until else mask
                for row, mask in enumerate(masks)
            ]
        return msgspec.structs.replace(step, masks=masks, drafts=step.drafts[: len(masks) - 1])

    def _history(self, seq: SeqStep, first: int, after: After | None) -> "array[int]":
        """The sequence's ids from position `first` on: the committed ones, then those in flight up to `after`.

        A copy: the engine goes on appending to the history while this step runs.
        """
        assert seq.history is not None
        ids = seq.history[first : seq.history_len]
        parts = []
        while after is not None:
            parent = self._parent(after)
            if parent is None or parent.first_new + len(parent.result.tokens) <= seq.history_len:
                break
            parts.append(parent)
            after = parent.after
        end = max(first, seq.history_len)
        for part in reversed(parts):
            ids.extend(part.result.tokens[max(0, end - part.first_new) :])
            end = max(end, part.first_new + len(part.result.tokens))
        return ids

    # --- drafts -----------------------------------------------------------------------------------------------

    def _propose(self, drafter: Drafter, plan: StepPlan, outcomes: list[_Outcome]) -> None:
        """Have the drafter go on from what this step came to; its proposals go into the results."""
        asked = []
        requests = []
        for seq, outcome in zip(plan.seqs, outcomes, strict=True):
            wanted = seq.propose > 0 or seq.draft_start is not None
            if wanted and outcome.result.error is None:
                asked.append(outcome.result)
                requests.append(self._draft_request(drafter, seq, outcome))
        if not requests and not (drafter.has_kv and plan.copies):
            return
        copies = plan.copies if drafter.has_kv else ()
        try:
            proposals: Sequence[Proposal] = drafter.propose(requests, copies)
        except Exception:
            # Without proposals the draft model's KV counts as left alone; only the copies must not be missing.
            log.exception("the drafter failed: a step has no drafts")
            proposals = [Proposal() for _ in requests]
            if copies:
                self._copy_for_drafter(drafter, copies)
        for result, proposal in zip(asked, proposals, strict=True):
            result.drafts = proposal.drafts
            result.draft_kv_len = proposal.draft_kv_len

    def _copy_for_drafter(self, drafter: Drafter, copies: Sequence[tuple[int, int]]) -> None:
        try:
            drafter.propose((), copies)
        except Exception:
            log.exception(
                "the drafter failed again, and its KV is not right any more: there are no drafts from now on"
            )
            self._drafter = _NoDrafts()
            drafter.close()

    def _draft_request(self, drafter: Drafter, seq: SeqStep, outcome: _Outcome) -> DraftRequest:
        tokens = outcome.result.tokens
        end = outcome.first_new + len(tokens)
        start = seq.draft_start
        if start is not None and seq.after is not None:
            parent = self._parent(seq.after)
            if parent is not None and parent.result.draft_kv_len is not None:
                start = max(start, parent.result.draft_kv_len)
        first = 0 if start is None else min(start, end - 1)
        ids = self._history(seq, first, seq.after)
        ids.extend(tokens[max(0, first - outcome.first_new) :])
        return DraftRequest(
            token_ids=ids,
            first=first,
            count=seq.propose,
            blocks=seq.blocks,
            draft_start=start,
            sampling=seq.sampling,
        )

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._executor.close()
        if self._guides is not None:
            self._guides.close()
        if self._drafter is not None:
            self._drafter.close()


class _NoDrafts:
    """In place of a drafter that is lost. Nobody reads its KV any more, so that counts as right: what depends on it,
    as publishing blocks does, goes on."""

    has_kv = True

    def propose(
        self, requests: Sequence[DraftRequest], copies: Sequence[tuple[int, int]]
    ) -> Sequence[Proposal]:
        return [Proposal((), request.first + len(request.token_ids)) for request in requests]

    def close(self) -> None:
        """Nothing to release."""


def _failed(plan: StepPlan, error: Exception) -> StepResult:
    """Nothing of the step counts, and nobody knows which of its copies were made."""
    text = f"the step that computed this request failed: {describe(error)}"
    return StepResult(
        step=plan.step,
        seqs=[SeqResult(error=text) for _ in plan.seqs],
        unfilled=[target for _, target in plan.copies],
    )


def _verify(steps: Sequence[SeqStep], forward: ForwardResult) -> list[SeqResult]:
    """What each sequence's rows come to: drafts are kept while they equal the id sampled in their place."""
    results = []
    row = 0
    for i, step in enumerate(steps):
        if (error := forward.errors.get(i)) is not None:
            results.append(SeqResult(error=error))
            continue
        num_drafts = len(step.drafts)
        result = SeqResult(start=step.start, prompt_logprobs=forward.prompt_logprobs.get(i))
        if step.sampling is not None:
            sampled = forward.tokens[row : row + 1 + num_drafts]
            num_kept = 1
            while num_kept <= num_drafts and step.drafts[num_kept - 1] == sampled[num_kept - 1]:
                num_kept += 1
            result.tokens = sampled[:num_kept]
            result.num_drafts = num_drafts
            if step.sampling.num_logprobs is not None:
                result.logprobs = [forward.logprobs[r] for r in range(row, row + num_kept)]
            row += 1 + num_drafts
        results.append(result)
    return results
