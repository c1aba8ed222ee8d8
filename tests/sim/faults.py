"""Rules of the engine, each with a variant in which it is switched off. The simulation must notice every one.

A fault is planted by replacing the method that holds the rule. Where the rule is a line inside a longer method, the
replacement calls the real one and undoes that line.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from segue.contract.reports import EngineOutput
from segue.contract.step import After, ForwardResult, SeqResult, SeqStep, StepResult
from segue.engine import tables as tables_module
from segue.engine.blocks import BlockPool, block_key, root_key
from segue.engine.config import EngineConfig
from segue.engine.engine import Engine
from segue.engine.request import Chunk, Request, State, Stop, Turn
from segue.engine.scheduler import Part, Scheduler
from segue.engine.tables import Tables
from segue.engine.timeline import Flight, Timeline
from segue.host.journal import HeldRequest, Journal
from segue.runtime import runtime as runtime_module
from segue.runtime.runtime import LocalRuntime
from segue.speculate.draft_model import DraftModelDrafter
from segue.speculate.drafter import DraftRequest, Proposal
from tests.sim.grammar import SimGuide

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Plant] = {}
"""By name, which says what is switched off."""


def fault(plant: Plant) -> Plant:
    FAULTS[plant.__name__] = plant
    return plant


# --- settling -------------------------------------------------------------------------------------------------


@fault
def trim_before_settle_off(patch: pytest.MonkeyPatch) -> None:
    """What was sampled after a stop enters the ledger; the user is told the right thing."""
    trim, settle = Turn.trim, Timeline.settle
    sampled: list[int] = []

    def remember(self: Turn, position: int, ids: Sequence[int]) -> tuple[Sequence[int], Stop | None]:
        sampled[:] = ids
        return trim(self, position, ids)

    def settle_all(
        self: Timeline, flight: Flight, kept: Sequence[int], drafts: Sequence[int], draft_kv: int | None
    ) -> None:
        settle(self, flight, list(sampled) if flight.samples else kept, drafts, draft_kv)

    patch.setattr(Turn, "trim", remember)
    patch.setattr(Timeline, "settle", settle_all)


@fault
def trim_off(patch: pytest.MonkeyPatch) -> None:
    """The turn ends at a stop inside accepted drafts, and the rest of them is handed out."""
    trim = Turn.trim

    def keep_all(self: Turn, position: int, ids: Sequence[int]) -> tuple[Sequence[int], Stop | None]:
        return ids, trim(self, position, ids)[1]

    patch.setattr(Turn, "trim", keep_all)


@fault
def epoch_check_off(patch: pytest.MonkeyPatch) -> None:
    """A result that was planned for an older history is settled into the new one."""

    def settle(self: Engine, parts: list[Part], result: StepResult) -> None:
        for part, seq in zip(parts, result.seqs, strict=True):
            request, flight = part.request, part.flight
            if request.state is State.FINISHED:
                continue
            if flight not in request.timeline.flights:
                request.timeline.flights.appendleft(flight)
            if seq.error is not None:
                self._fail(request, seq.error)
            elif flight.samples:
                self._settle_sampled(request, flight, seq)
            else:
                self._settle_prefill(request, flight, seq)

    patch.setattr(Engine, "_settle", settle)


def _after_settle(patch: pytest.MonkeyPatch, change: Callable[[Timeline, Flight, int], None]) -> None:
    """Run the real `settle`, then `change(timeline, flight, number of ids it added)`."""
    settle = Timeline.settle

    def settle_and_change(
        self: Timeline, flight: Flight, kept: Sequence[int], drafts: Sequence[int], draft_kv: int | None
    ) -> None:
        settle(self, flight, kept, drafts, draft_kv)
        change(self, flight, len(kept))

    patch.setattr(Timeline, "settle", settle_and_change)


@fault
def rejected_draft_counts_as_computed(patch: pytest.MonkeyPatch) -> None:
    def count_one_rejected(timeline: Timeline, flight: Flight, num_kept: int) -> None:
        if flight.samples and num_kept <= flight.max_drafts:
            timeline.kv_len += 1

    _after_settle(patch, count_one_rejected)


@fault
def sampled_id_counts_as_computed(patch: pytest.MonkeyPatch) -> None:
    def count_all(timeline: Timeline, flight: Flight, num_kept: int) -> None:
        timeline.kv_len = max(timeline.kv_len, len(timeline.tokens) if flight.samples else 0)

    _after_settle(patch, count_all)


@fault
def rejection_off(patch: pytest.MonkeyPatch) -> None:
    """One draft that is wrong is kept."""
    verify = runtime_module._verify

    def keep_one_more(steps: Sequence[SeqStep], forward: ForwardResult) -> list[SeqResult]:
        results = verify(steps, forward)
        for step, result in zip(steps, results, strict=True):
            if result.logprobs is None and 0 < len(result.tokens) <= len(step.drafts):
                result.tokens = [*result.tokens, step.drafts[len(result.tokens) - 1]]
        return results

    patch.setattr(runtime_module, "_verify", keep_one_more)


@fault
def copies_of_a_failed_step_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "lose", lambda self, requests, blocks: None)


@fault
def copies_of_lost_copies_count(patch: pytest.MonkeyPatch) -> None:
    """Later steps in flight copied from a block that was not filled, and their copies are taken for good."""

    def lose(self: Engine, blocks: Sequence[int]) -> None:
        self.scheduler.lose(self.requests.values(), set(blocks))

    patch.setattr(Engine, "_lose", lose)


@fault
def error_leaves_blocks(patch: pytest.MonkeyPatch) -> None:
    """A request that failed is forgotten with its blocks."""
    fail = Engine._fail

    def fail_and_keep(self: Engine, request: Request, error: str) -> None:
        request.timeline.tables.blocks = []
        fail(self, request, error)

    patch.setattr(Engine, "_fail", fail_and_keep)


@fault
def epoch_kept_at_cut(patch: pytest.MonkeyPatch) -> None:
    cut = Timeline.cut

    def cut_quietly(self: Timeline, num_tokens: int, kv_len: int) -> None:
        cut(self, num_tokens, kv_len)
        self.epoch -= 1

    patch.setattr(Timeline, "cut", cut_quietly)


# --- turns ----------------------------------------------------------------------------------------------------


@fault
def turn_keeps_its_last_id(patch: pytest.MonkeyPatch) -> None:
    """`keep="computed"` keeps the sampled id whose KV was never computed."""

    def end_turn(self: Request) -> None:
        self.turn = None
        self.prompt_logprobs = None
        self.timeline.cut(len(self.timeline.tokens), len(self.timeline.tokens))

    patch.setattr(Request, "end_turn", end_turn)


@fault
def empty_chunk_computes_nothing(patch: pytest.MonkeyPatch) -> None:
    """A turn that adds no ids begins with all KV there, so there is nothing to sample from."""
    fold = Request.fold

    def fold_and_restore(self: Request, chunk: Chunk, config: EngineConfig) -> None:
        kv_len = self.timeline.kv_len
        fold(self, chunk, config)
        self.timeline.kv_len = min(kv_len, self.timeline.tables.capacity)

    patch.setattr(Request, "fold", fold_and_restore)


@fault
def answers_longer_than_the_model(patch: pytest.MonkeyPatch) -> None:
    """`max_tokens` alone limits an answer."""
    begin = vars(Turn)["begin"].__func__

    def unlimited(cls: type[Turn], params: Any, start: int, config: EngineConfig, seed: int) -> Turn:
        turn: Turn = begin(cls, params, start, config, seed)
        if params.max_tokens is None:
            return turn
        values = {name: getattr(turn, name) for name in Turn.__struct_fields__}
        return Turn(**{**values, "limit": start + params.max_tokens})

    patch.setattr(Turn, "begin", classmethod(unlimited))


# --- the prefix cache -----------------------------------------------------------------------------------------


@fault
def publish_what_flies(patch: pytest.MonkeyPatch) -> None:
    """Blocks are offered as soon as their step is planned."""
    patch.setattr(Timeline, "publishable_len", property(lambda self: min(self.next_start, len(self.tokens))))


@fault
def publish_without_draft_kv(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timeline, "publishable_len", property(lambda self: self.kv_len))


@fault
def stale_keys_after_cut(patch: pytest.MonkeyPatch) -> None:
    """Keys of the ids that were cut off are used for those that replace them."""
    cut = Tables.cut

    def keep_keys(self: Tables, num_tokens: int, kv_len: int) -> None:
        keys = list(self._keys)
        cut(self, num_tokens, kv_len)
        self._keys = keys

    patch.setattr(Tables, "cut", keep_keys)


@fault
def unpublish_before_write_off(patch: pytest.MonkeyPatch) -> None:
    own = Tables.own

    def write_published(self: Tables, position: int) -> Sequence[tuple[int, int]]:
        return own(self, position) if self.shares(position) else ()

    patch.setattr(Tables, "own", write_published)


@fault
def copy_on_write_off(patch: pytest.MonkeyPatch) -> None:
    def write_shared(self: Tables, position: int) -> Sequence[tuple[int, int]]:
        block = self.block_at(position)
        if block is not None:
            self.pool.unpublish(block)
        return ()

    patch.setattr(Tables, "own", write_shared)


@fault
def copy_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A shared block is replaced by one of its own, and its contents stay behind."""
    own = Tables.own

    def replace_only(self: Tables, position: int) -> Sequence[tuple[int, int]]:
        own(self, position)
        return ()

    patch.setattr(Tables, "own", replace_only)


@fault
def salt_ignored(patch: pytest.MonkeyPatch) -> None:
    root = root_key
    patch.setattr(tables_module, "root_key", lambda salt: root(None))


@fault
def parent_key_ignored(patch: pytest.MonkeyPatch) -> None:
    """A block's key is a hash of its own ids alone."""
    key = block_key
    patch.setattr(tables_module, "block_key", lambda parent, ids: key(b"parent", ids))


@fault
def eviction_keeps_the_key(patch: pytest.MonkeyPatch) -> None:
    def evict(self: BlockPool) -> int:
        block = next(iter(self._cached_free))
        del self._cached_free[block]
        return block

    patch.setattr(BlockPool, "_evict", evict)


@fault
def full_prompt_hit_computes_nothing(patch: pytest.MonkeyPatch) -> None:
    def all_blocks(self: Scheduler, request: Request) -> list[int]:
        if not self.config.enable_prefix_caching or request.prompt_logprobs is not None:
            return []
        return request.timeline.tables.find(request.timeline.tokens, request.target)

    patch.setattr(Scheduler, "_cached_blocks", all_blocks)


@fault
def scored_prompts_use_the_cache(patch: pytest.MonkeyPatch) -> None:
    """`prompt_logprobs` are missing where the prefix was not computed."""
    cached = Scheduler._cached_blocks

    def cached_anyway(self: Scheduler, request: Request) -> list[int]:
        scores, request.prompt_logprobs = request.prompt_logprobs, None
        hits = cached(self, request)
        request.prompt_logprobs = scores
        return hits

    patch.setattr(Scheduler, "_cached_blocks", cached_anyway)


@fault
def reset_forgets_held_keys(patch: pytest.MonkeyPatch) -> None:
    """A reset empties the index, and held blocks still think that they are in it."""

    def reset(self: BlockPool) -> None:
        for block in self._cached_free:
            self._keys[block] = None
        self._by_key.clear()
        self._free.extend(self._cached_free)
        self._cached_free.clear()

    patch.setattr(BlockPool, "reset_cache", reset)


# --- blocks ---------------------------------------------------------------------------------------------------


@fault
def reservations_ignored_by_decodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_num_available", lambda self, request: self.pool.num_free)


@fault
def reservations_ignored_in_admission(patch: pytest.MonkeyPatch) -> None:
    fit = Scheduler._fit

    def fit_alone(self: Scheduler, request: Request) -> bool:
        others, self._reserving = self._reserving, {}
        fits = fit(self, request)
        self._reserving = {**others, **self._reserving}
        return fits

    patch.setattr(Scheduler, "_fit", fit_alone)


@fault
def reservations_outlive_requests(patch: pytest.MonkeyPatch) -> None:
    clear = Scheduler._clear_reserve

    def keep(self: Scheduler, request: Request) -> None:
        clear(self, request)
        self._reserving[request] = None
        request.reserve = self.config.max_model_len if request.state is State.RUNNING else 0

    patch.setattr(Scheduler, "_clear_reserve", keep)


@fault
def preempted_blocks_leak(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def preempt_and_keep(self: Scheduler, victim: Request) -> None:
        self.pool.acquire(victim.timeline.tables.blocks)
        preempt(self, victim)

    patch.setattr(Scheduler, "_preempt", preempt_and_keep)


@fault
def slack_ignored_in_allocation(patch: pytest.MonkeyPatch) -> None:
    """Blocks are allocated as if no draft in flight were kept."""
    patch.setattr(Timeline, "slack", property(lambda self: 0))


@fault
def drafts_beyond_the_limit(patch: pytest.MonkeyPatch) -> None:
    """As many drafts are asked for at the end of an answer as anywhere."""
    propose = Scheduler._num_to_propose

    def unlimited(self: Scheduler, request: Request, end: int, room: int) -> int:
        return propose(self, request, end, 10**9) and self.config.num_speculative_tokens

    patch.setattr(Scheduler, "_num_to_propose", unlimited)


@fault
def blocks_cut_in_place(patch: pytest.MonkeyPatch) -> None:
    """A step in flight sees the block table of a history that came after it was planned."""
    cut = Tables.cut

    def cut_in_place(self: Tables, num_tokens: int, kv_len: int) -> None:
        table = self.blocks
        cut(self, num_tokens, kv_len)
        table[:] = self.blocks
        self.blocks = table

    patch.setattr(Tables, "cut", cut_in_place)


@fault
def tokens_cut_in_place(patch: pytest.MonkeyPatch) -> None:
    """A step in flight sees a history that came after it was planned."""
    cut = Timeline.cut

    def cut_in_place(self: Timeline, num_tokens: int, kv_len: int) -> None:
        ids = self.tokens
        cut(self, num_tokens, kv_len)
        ids[:] = self.tokens
        self.tokens = ids

    patch.setattr(Timeline, "cut", cut_in_place)


@fault
def idle_sessions_give_way_in_vain(patch: pytest.MonkeyPatch) -> None:
    """What is not enough for the first that waits is taken all the same."""
    fit = Scheduler._fit

    def fit_or_take(self: Scheduler, request: Request) -> bool:
        fits = fit(self, request)
        if not fits:
            for holder in [each for each in self._holders if each is not request]:
                self._preempt(holder)
        return fits

    patch.setattr(Scheduler, "_fit", fit_or_take)


@fault
def part_without_input(patch: pytest.MonkeyPatch) -> None:
    """Who is admitted gets a part, also when all that is left flies already."""
    plan = Scheduler._plan_prefill
    admit = Scheduler._admit

    def plan_always(self: Scheduler, step: Any) -> None:
        before = set(self.running)
        admit(self, step)
        planned = {part.request for part in step.parts}
        for request in [each for each in self.running if each not in before and each not in planned]:
            plan(self, request, step)

    patch.setattr(Scheduler, "_admit", plan_always)


# --- forks ----------------------------------------------------------------------------------------------------


@fault
def fork_shares_what_is_being_written(patch: pytest.MonkeyPatch) -> None:
    """A running request's last block is shared while its next step already flies."""
    fork = Timeline.fork
    patch.setattr(
        Timeline,
        "fork",
        lambda self, num_tokens, *, whole_blocks: fork(self, num_tokens, whole_blocks=False),
    )


@fault
def fork_has_no_references(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a fork are free as soon as its source ends."""
    acquire = BlockPool.acquire

    def acquire_hits(self: BlockPool, blocks: Sequence[int]) -> None:
        if any(self._references[block] == 0 for block in blocks) or not blocks:
            acquire(self, blocks)

    patch.setattr(BlockPool, "acquire", acquire_hits)


# --- order ----------------------------------------------------------------------------------------------------


@fault
def order_reversed(patch: pytest.MonkeyPatch) -> None:
    key = Scheduler.key
    patch.setattr(Scheduler, "key", lambda self, request: (*key(self, request)[:-1], -request.arrival))


@fault
def priority_reversed(patch: pytest.MonkeyPatch) -> None:
    key = Scheduler.key
    patch.setattr(Scheduler, "key", lambda self, request: (-key(self, request)[0], *key(self, request)[1:]))


@fault
def oldest_is_preempted(patch: pytest.MonkeyPatch) -> None:
    def first(self: Scheduler, request: Request) -> Request:
        return self._next_holder(request, self._what_stays_held(request)) or self.running[0]

    patch.setattr(Scheduler, "_next_victim", first)


@fault
def small_requests_overtake(patch: pytest.MonkeyPatch) -> None:
    """When the first that waits does not fit, the shortest that does is admitted."""
    first = Scheduler._first_waiting

    def shortest(self: Scheduler) -> Request | None:
        if first(self) is None:
            return None
        waiting = [
            (len(entry[-1].timeline.tokens), i)
            for i, entry in enumerate(self._waiting)
            if entry[-1].state is State.WAITING and entry[0] == self.key(entry[-1])
        ]
        at = min(waiting)[1]
        self._waiting[0], self._waiting[at] = self._waiting[at], self._waiting[0]
        return self._waiting[0][-1]

    patch.setattr(Scheduler, "_first_waiting", shortest)


# --- the runtime ----------------------------------------------------------------------------------------------


@fault
def history_misses_what_flies(patch: pytest.MonkeyPatch) -> None:
    """Penalties under async scheduling see only the ids that were settled when the step was planned."""
    history = LocalRuntime._history
    patch.setattr(LocalRuntime, "_history", lambda self, seq, first, after: history(self, seq, first, None))


def _change_resolved(
    patch: pytest.MonkeyPatch, change: Callable[[LocalRuntime, SeqStep, SeqStep], dict[str, Any]]
) -> None:
    """Run the real `_resolve`; for a part with a reference, replace the fields that `change` gives."""
    resolve = LocalRuntime._resolve

    def resolve_and_change(self: LocalRuntime, seq: SeqStep) -> SeqStep | SeqResult:
        step = resolve(self, seq)
        if seq.after is None or isinstance(step, SeqResult):
            return step
        values = {name: getattr(step, name) for name in SeqStep.__struct_fields__}
        return SeqStep(**{**values, **change(self, seq, step)})

    patch.setattr(LocalRuntime, "_resolve", resolve_and_change)


@fault
def kept_drafts_do_not_move_the_start(patch: pytest.MonkeyPatch) -> None:
    _change_resolved(patch, lambda runtime, seq, step: {"start": seq.start})


@fault
def number_of_drafts_unlimited(patch: pytest.MonkeyPatch) -> None:
    """All that was proposed is verified, whatever there are blocks for."""

    def all_drafts(runtime: LocalRuntime, seq: SeqStep, step: SeqStep) -> dict[str, Any]:
        assert isinstance(seq.after, After)
        parent = runtime._parent(seq.after)
        assert parent is not None
        return {"drafts": parent.result.drafts}

    _change_resolved(patch, all_drafts)


@fault
def first_sampled_id_is_the_input(patch: pytest.MonkeyPatch) -> None:
    """A reference is resolved to the first id that a step with drafts gave, not to the last."""

    def first_id(runtime: LocalRuntime, seq: SeqStep, step: SeqStep) -> dict[str, Any]:
        assert isinstance(seq.after, After)
        parent = runtime._parent(seq.after)
        assert parent is not None
        return {"tokens": parent.result.tokens[:1]}

    _change_resolved(patch, first_id)


def _change_masks(patch: pytest.MonkeyPatch, change: Callable[[SeqStep], dict[str, Any]]) -> None:
    """Run the real `_guide` on a step that is not quite the right one, and take only its masks."""
    guide = LocalRuntime._guide

    def guide_changed(self: LocalRuntime, seq: SeqStep, step: SeqStep) -> SeqStep:
        if step.sampling is None or step.sampling.grammar is None:
            return step
        values = {name: getattr(step, name) for name in SeqStep.__struct_fields__}
        masks = guide(self, seq, SeqStep(**{**values, **change(step)})).masks
        return SeqStep(
            **{**values, "masks": [masks[min(row, len(masks) - 1)] for row in range(1 + len(step.drafts))]}
        )

    patch.setattr(LocalRuntime, "_guide", guide_changed)


@fault
def masks_ignore_drafts(patch: pytest.MonkeyPatch) -> None:
    """All rows of a step may draw what the first may."""
    _change_masks(patch, lambda step: {"drafts": ()})


@fault
def masks_miss_the_newest_id(patch: pytest.MonkeyPatch) -> None:
    masks = SimGuide.masks

    def older(self: SimGuide, known: int, ids: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        return masks(self, known, ids[:-1], drafts)

    patch.setattr(SimGuide, "masks", older)


@fault
def guides_go_on_from_where_they_were(patch: pytest.MonkeyPatch) -> None:
    """What a guide was told counts although the answer has become shorter since: after a preemption."""
    masks = SimGuide.masks

    def from_the_end(self: SimGuide, known: int, ids: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        return masks(self, self.num_ids, ids, drafts)

    patch.setattr(SimGuide, "masks", from_the_end)


@fault
def min_tokens_do_not_count_with_a_grammar(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("segue.runtime.runtime.without", lambda mask, ids: mask)


@fault
def samples_before_the_grammar_is_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalRuntime, "is_ready", lambda self, sampling, wait_s=0.0: True)


# --- another engine -------------------------------------------------------------------------------------------


@fault
def answer_begins_anew_in_the_next_engine(patch: pytest.MonkeyPatch) -> None:
    """What was said before counts as prompt: for limits, penalties and grammars."""
    chunk = Engine._chunk
    patch.setattr(Engine, "_chunk", lambda self, ids, params, num_output_tokens=0: chunk(self, ids, params))


@fault
def journal_keeps_the_last_id_of_a_turn(patch: pytest.MonkeyPatch) -> None:
    take = HeldRequest.take

    def take_all(self: HeldRequest, output: EngineOutput, config: EngineConfig) -> None:
        submission = self.submission
        self.submission = msgspec.structs.replace(submission, keep="all")
        take(self, output, config)
        self.submission = submission

    patch.setattr(HeldRequest, "take", take_all)


@fault
def journal_forgets_what_is_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "unconfirmed", property(lambda self: []))


# --- the draft model ------------------------------------------------------------------------------------------


@fault
def draft_kv_not_clamped_at_cut(patch: pytest.MonkeyPatch) -> None:
    cut = Timeline.cut

    def keep_draft_kv(self: Timeline, num_tokens: int, kv_len: int) -> None:
        draft_kv_len = self.draft_kv_len
        cut(self, num_tokens, kv_len)
        self.draft_kv_len = min(draft_kv_len, len(self.tokens))

    patch.setattr(Timeline, "cut", keep_draft_kv)


@fault
def draft_kv_counts_the_last_proposal(patch: pytest.MonkeyPatch) -> None:
    """The KV of the last id that the draft model proposed counts, though nobody has computed it."""
    propose = DraftModelDrafter.propose

    def count_all(
        self: DraftModelDrafter, requests: Sequence[DraftRequest], copies: Sequence[tuple[int, int]]
    ) -> list[Proposal]:
        return [
            Proposal(proposal.drafts, (proposal.draft_kv_len or 0) + len(proposal.drafts))
            if proposal.drafts
            else proposal
            for proposal in propose(self, requests, copies)
        ]

    patch.setattr(DraftModelDrafter, "propose", count_all)


@fault
def draft_kv_misses_copies(patch: pytest.MonkeyPatch) -> None:
    """The target's KV is copied on write and the draft model's is not."""
    propose = LocalRuntime._propose

    def without_copies(self: LocalRuntime, drafter: Any, plan: Any, outcomes: Any) -> None:
        values = {name: getattr(plan, name) for name in type(plan).__struct_fields__}
        propose(self, drafter, type(plan)(**{**values, "copies": ()}), outcomes)

    patch.setattr(LocalRuntime, "_propose", without_copies)
