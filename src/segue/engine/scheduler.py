"""Which requests compute what in the next step, and who gives up blocks for whom.

There are no phases. A step gives every running request the tokens it is behind by, within the budget: decodes
first (one token each, then drafts from what is left), then chunks of prefills in order, then newly admitted
requests. The order is `Scheduler.key`; whoever must give up blocks is the last in it.

Three rules keep requests from taking each other's blocks:
* a request is admitted when its whole sequence through its first decode step fits beside what is reserved;
* what an admitted prefill has not allocated yet stays reserved for it (`Request.reserve`);
* a decode that finds no block takes them from requests that do not run, then from the last one running.
"""

import heapq
from bisect import insort
from collections.abc import Iterable, Sequence, Set

import msgspec

from segue.contract.step import After, SeqStep, StepPlan
from segue.engine.blocks import BlockPool
from segue.engine.config import EngineConfig
from segue.engine.request import Request, State
from segue.engine.timeline import Flight

Key = tuple[int, bool, int]


class Part(msgspec.Struct, frozen=True, gc=False):
    """Whose part of a step it is, for settling."""

    request: Request
    flight: Flight


class PlannedStep(msgspec.Struct):
    plan: StepPlan
    parts: list[Part]


class _OpenStep:
    """A step that is being planned."""

    __slots__ = ("copies", "number", "parts", "preempted", "seqs", "spare_drafts", "tokens_left")

    def __init__(self, number: int, budget: int) -> None:
        self.number = number
        self.tokens_left = budget
        self.spare_drafts = 0
        self.seqs: list[SeqStep] = []
        self.parts: list[Part] = []
        self.copies: list[tuple[int, int]] = []
        self.preempted = False


class Scheduler:
    """Owns the order of requests and, with the pool, their blocks."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.running: list[Request] = []
        """In order."""
        self.num_preemptions = 0
        self._waiting: list[tuple[Key, int, Request]] = []
        """A heap. Entries of requests that wait no longer are dropped when they come up, or when they are many."""
        self._num_stale = 0
        """About how many of its entries are such."""
        self._num_pushed = 0
        self._holders: dict[Request, None] = {}
        """Not running, holding blocks; in the order in which they stopped."""
        self._reserving: dict[Request, None] = {}
        """Running with a reservation."""
        speculates = config.num_speculative_tokens > 0
        lookahead = config.num_speculative_tokens if config.has_draft_model else 0
        self.margin = 1 + config.num_speculative_tokens + lookahead if speculates else 0
        """Tokens beyond its known ones through which a request must fit to be admitted."""
        self._has_draft_model = config.has_draft_model
        self._max_drafts = config.num_speculative_tokens

    # --- states -----------------------------------------------------------------------------------------------

    def key(self, request: Request) -> Key:
        """The order of requests: a lower key goes first and keeps its blocks longer.

        Input that nobody waits for yet (a turn that is still being spoken) comes after all that is to be answered.
        """
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        return (priority, request.turn is None, request.arrival)

    def enqueue(self, request: Request) -> None:
        """It has work: wait for admission."""
        self._leave(request)
        request.state = State.WAITING
        if request.timeline.tables.blocks:
            self._holders[request] = None
        if self._num_stale > len(self._waiting) // 2:
            self._waiting = [entry for entry in self._waiting if self._is_current(entry)]
            heapq.heapify(self._waiting)
            self._num_stale = 0
        self._num_pushed += 1
        heapq.heappush(self._waiting, (self.key(request), self._num_pushed, request))

    def hold(self, request: Request) -> None:
        """It has work that cannot begin yet; `enqueue` follows."""
        self._leave(request)
        request.state = State.UNREADY
        if request.timeline.tables.blocks:
            self._holders[request] = None

    def park(self, request: Request) -> None:
        """It has no work: keep its blocks as long as nobody needs them."""
        self._leave(request)
        request.state = State.IDLE
        if request.timeline.tables.blocks:
            self._holders[request] = None

    def finish(self, request: Request) -> None:
        """It is over: release all it holds."""
        self._leave(request)
        request.state = State.FINISHED
        request.drop_kv()

    def lose(self, requests: Iterable[Request], blocks: Set[int]) -> None:
        """What these blocks were to hold has not come: cut it from every ledger that counts on it.

        Tables name a block from when the step that fills it is planned. One that does not count on the contents has got
        the block later, for something that it computes itself.
        """
        for request in requests:
            timeline = request.timeline
            kept = timeline.tables.resumable(timeline.kv_len, without=blocks)
            if kept == timeline.kv_len:
                continue
            timeline.cut(len(timeline.tokens), kept)
            if request.state is State.RUNNING:
                self.enqueue(request)  # what was reserved is for a shorter way
            elif not timeline.tables.blocks:
                del self._holders[request]

    def _leave(self, request: Request) -> None:
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._clear_reserve(request)
        else:
            self._holders.pop(request, None)
            self._num_stale += request.state is State.WAITING

    def _is_current(self, entry: tuple[Key, int, Request]) -> bool:
        key, _, request = entry
        return request.state is State.WAITING and key == self.key(request)

    def _preempt(self, victim: Request) -> None:
        """Take all its blocks. A running request waits again and is recomputed; others stay what they are."""
        victim.drop_kv()
        if victim.state is State.RUNNING:
            victim.metrics.num_preemptions += 1
            self.num_preemptions += 1
            self.enqueue(victim)
        else:
            del self._holders[victim]

    def _clear_reserve(self, request: Request) -> None:
        request.reserve = 0
        self._reserving.pop(request, None)

    # --- blocks -----------------------------------------------------------------------------------------------

    @property
    def num_reserved(self) -> int:
        """Blocks that running prefills were promised and have not allocated."""
        return sum(request.timeline.tables.missing(request.reserve) for request in self._reserving)

    def _num_available(self, request: Request) -> int:
        """Blocks that this request may allocate now."""
        others = self.num_reserved if self._reserving else 0
        if request.reserve:
            others -= request.timeline.tables.missing(request.reserve)
        return self.pool.num_free - others

    def _make_room(self, request: Request, num_tokens: int, step: _OpenStep) -> bool:
        """See that a running request can have blocks for so many tokens. False: it had to go itself."""
        while self._num_lacking(request, num_tokens) > 0:
            victim = self._next_victim(request)
            self._preempt(victim)
            step.preempted = True
            if victim is request:
                return False
        return True

    def _num_lacking(self, request: Request, num_tokens: int) -> int:
        """How many more blocks must become available to a running request for so many tokens."""
        timeline, tables = request.timeline, request.timeline.tables
        wanted = tables.missing(num_tokens) + tables.shares(timeline.next_start)
        return wanted - self._num_available(request)

    def _next_victim(self, request: Request) -> Request:
        """Who gives up its blocks for a running request."""
        holder = self._next_holder(request, self._what_stays_held(request)) if self._holders else None
        return self.running[-1] if holder is None else holder

    def _what_stays_held(self, request: Request, hits: Sequence[int] = ()) -> set[int]:
        """Blocks with which others that do not run help nobody if they give them up: this request or one that runs
        holds them as well. Not among them is what this one writes next, which it must not share."""
        timeline = request.timeline
        stays = set(timeline.tables.blocks).union(hits)
        next_block = timeline.tables.block_at(timeline.next_start)
        if next_block is not None:
            stays.remove(next_block)
        return stays.union(*(each.timeline.tables.blocks for each in self.running if each is not request))

    def _next_holder(self, request: Request, stays: set[int]) -> Request | None:
        """Who gives up its blocks first, of those that hold some without running: the longest idle, else the last one
        waiting. Nobody does in vain."""
        waiting: Request | None = None
        for holder in self._holders:
            if holder is request or stays.issuperset(holder.timeline.tables.blocks):
                continue
            if holder.state is State.IDLE:
                return holder
            if waiting is None or self.key(holder) > self.key(waiting):
                waiting = holder
        return waiting

    # --- the step ---------------------------------------------------------------------------------------------

    def schedule(self, number: int) -> PlannedStep | None:
        """Plan the step with this number; None when no request has anything to compute now."""
        step = _OpenStep(number, self.config.max_num_batched_tokens)
        decodes, prefills = self._split_running()
        self._share_budget(step, len(decodes), bool(prefills) or bool(self._waiting))
        for request in decodes:
            if request.state is State.RUNNING:
                self._plan_decode(request, step)
        for request in prefills:
            if request.state is State.RUNNING and step.tokens_left > 0:
                self._plan_prefill(request, step)
        if not step.preempted:
            self._admit(step)
        if not step.seqs:
            return None
        return PlannedStep(StepPlan(step=number, seqs=step.seqs, copies=step.copies), step.parts)

    def _split_running(self) -> tuple[list[Request], list[Request]]:
        """Who has one token to compute and who has more."""
        decodes, prefills = [], []
        for request in self.running:
            timeline, turn = request.timeline, request.turn
            if timeline.unknown_input is not None:
                # The part is needed unless the flight before it must end the turn.
                assert turn is not None
                start = timeline.next_start
                if start + 2 <= turn.limit and start + timeline.slack < self.config.max_model_len:
                    decodes.append(request)
                continue
            missing = request.target - timeline.next_start
            if missing == 1 and turn is not None:
                decodes.append(request)
            elif missing > 0:
                prefills.append(request)
        return decodes, prefills

    def _share_budget(self, step: _OpenStep, num_decodes: int, prefills_wait: bool) -> None:
        """Drafts are a bet; work that is certain gets at least half of what the decodes leave."""
        rest = step.tokens_left - num_decodes
        assert rest >= 0, "max_num_seqs ≤ max_num_batched_tokens"
        step.spare_drafts = rest // 2 if prefills_wait else rest

    def _plan_decode(self, request: Request, step: _OpenStep) -> None:
        """One input, and drafts as far as budget, blocks and limits allow."""
        timeline, tables, turn = request.timeline, request.timeline.tables, request.turn
        assert turn is not None
        start, slack = timeline.next_start, timeline.slack
        source = timeline.unknown_input
        num_drafts = propose = 0
        if self.margin:
            offered = len(timeline.drafts) if source is None else source.propose
            room = self.config.max_model_len - start - slack - 1
            num_drafts = max(0, min(offered, step.spare_drafts, turn.limit - start - 2, room))
            propose = self._num_to_propose(request, start + 1, room - num_drafts)
        end = start + slack + 1
        reach = end + num_drafts + (propose if self._has_draft_model else 0)
        if reach > tables.capacity or not tables.is_own(start):
            if self._num_lacking(request, reach) > 0:
                # Bets shrink before anybody is preempted for them.
                reachable = tables.reachable(start, self._num_available(request))
                num_drafts = max(0, min(num_drafts, reachable - end))
                if self._has_draft_model:
                    propose = 0  # its KV for them would take blocks too
                reach = end + num_drafts
                if not self._make_room(request, reach, step):
                    return
            step.copies.extend(tables.own(start))
            tables.reach(reach)
        if request.reserve and (source is not None or len(timeline.tokens) != request.admitted_len):
            self._clear_reserve(request)
        step.spare_drafts -= num_drafts
        self._add_part(request, step, num_tokens=1, num_drafts=num_drafts, propose=propose)

    def _plan_prefill(self, request: Request, step: _OpenStep) -> None:
        """The next chunk of known tokens; the last one of a turn samples. Its blocks are reserved."""
        timeline, turn = request.timeline, request.turn
        start = timeline.next_start
        num_tokens = min(request.target - start, step.tokens_left)
        samples = turn is not None and start + num_tokens == request.target
        end = start + num_tokens
        propose = 0
        if samples and self.margin:
            propose = self._num_to_propose(request, end, self.config.max_model_len - end)
        lookahead = max(propose, int(samples)) if self._has_draft_model else 0
        step.copies.extend(timeline.tables.own(start))
        timeline.tables.reach(end + lookahead)
        self._add_part(request, step, num_tokens=num_tokens, propose=propose)

    def _num_to_propose(self, request: Request, end: int, room: int) -> int:
        """How many drafts to ask for, to follow the id sampled at position `end` or later."""
        assert request.turn is not None
        wanted = self._max_drafts
        if request.adaptive is not None:
            wanted = request.adaptive.num_drafts(end, len(self.running))
        return max(0, min(wanted, request.turn.limit - end - 2, room))

    def _add_part(
        self, request: Request, step: _OpenStep, *, num_tokens: int, propose: int, num_drafts: int = 0
    ) -> None:
        """Write what a request computes next into the step and into its timeline."""
        timeline, turn = request.timeline, request.turn
        assert num_tokens > 0, "a part has an input"
        start = timeline.next_start
        end = start + num_tokens
        samples = timeline.unknown_input is not None or (turn is not None and end == len(timeline.tokens))
        runs_draft_model = self._has_draft_model and (propose > 0 or num_tokens > 1 or not samples)
        draft_kv = timeline.draft_kv_len
        if self._has_draft_model and timeline.flights:
            draft_kv = max(draft_kv, timeline.flights[-1].draft_kv_end)
        flight = Flight(
            step.number,
            len(step.parts),
            timeline.epoch,
            start,
            num_tokens,
            num_drafts,
            samples,
            propose,
            end + samples if runs_draft_model else draft_kv,
            draft_kv if runs_draft_model else None,
        )
        step.seqs.append(self._seq_step(request, flight))
        step.parts.append(Part(request, flight))
        step.tokens_left -= num_tokens + num_drafts
        timeline.fly(flight)

    def _seq_step(self, request: Request, flight: Flight) -> SeqStep:
        """What the runtime is told of a part that is about to fly."""
        timeline, turn = request.timeline, request.turn
        source = timeline.unknown_input
        start, end = flight.start, flight.start + flight.num_tokens
        sampling = turn.sampling if turn is not None and flight.samples else None
        needs_history = flight.propose > 0 or flight.draft_kv_start is not None
        needs_history = needs_history or (sampling is not None and sampling.needs_history)
        targets: Sequence[int] = ()
        if request.prompt_logprobs is not None:
            targets = timeline.tokens[start + 1 : min(end + 1, request.num_prompt_tokens)]
        is_known = source is None
        return SeqStep(
            start=start,
            tokens=timeline.tokens[start:end] if is_known else (),
            blocks=timeline.tables.blocks,
            drafts=timeline.drafts[: flight.max_drafts] if is_known else (),
            after=None if source is None else After(source.step, source.index),
            max_drafts=0 if is_known else flight.max_drafts,
            sampling=sampling,
            propose=flight.propose,
            history=timeline.tokens if needs_history else None,
            history_len=len(timeline.tokens) if flight.samples else end,
            draft_start=flight.draft_kv_start,
            prompt_targets=targets,
            num_prompt_logprobs=(turn.num_prompt_logprobs or 0) if targets and turn else 0,
        )

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self, step: _OpenStep) -> None:
        """Let in waiting requests, in order, while the first of them fits."""
        while step.tokens_left > 0 and len(self.running) < self.config.max_num_seqs:
            request = self._first_waiting()
            if request is None or not self._fit(request):
                return
            heapq.heappop(self._waiting)
            self._holders.pop(request, None)
            request.state = State.RUNNING
            insort(self.running, request, key=self.key)
            if request.timeline.next_start < request.target:  # else all that is left flies already
                self._plan_prefill(request, step)

    def _first_waiting(self) -> Request | None:
        while self._waiting:
            if self._is_current(self._waiting[0]):
                return self._waiting[0][-1]
            heapq.heappop(self._waiting)
            self._num_stale = max(0, self._num_stale - 1)
        return None

    def _fit(self, request: Request) -> bool:
        """Admit this one if it fits: attach its prefix hits and reserve the rest. Idle KV gives way, if that helps."""
        timeline, tables = request.timeline, request.timeline.tables
        reserve = min(len(timeline.tokens) + self.margin, self.config.max_model_len)
        hits = [] if tables.blocks else self._cached_blocks(request)
        num_new = tables.missing(reserve) - len(hits)

        def num_lacking() -> int:
            free = self.pool.num_free - self.pool.count_cached_free(hits) - self.num_reserved
            return num_new + tables.shares(timeline.next_start) - free

        if num_lacking() > 0:
            held = sum(
                len(holder.timeline.tables.blocks) for holder in self._holders if holder is not request
            )
            if (
                num_lacking() > held
            ):  # most often there is nothing to take, and that is seen without a look at blocks
                return False
            stays = self._what_stays_held(request, hits)
            if not self._would_fit(request, num_new, stays):
                return False
            while num_lacking() > 0:
                victim = self._next_holder(request, stays)
                assert victim is not None, "it would fit"
                self._preempt(victim)
        if hits:
            timeline.adopt(hits)
        if request.admitted_len is None:
            request.metrics.num_cached_tokens = timeline.kv_len
        request.admitted_len = len(timeline.tokens)
        request.reserve = reserve
        self._reserving[request] = None
        return True

    def _would_fit(self, request: Request, num_new: int, stays: set[int]) -> bool:
        """Whether so many new blocks are there when all that neither runs nor is this request gives up its own."""
        timeline = request.timeline
        # The block that it writes next stays its own, or somebody who runs has it, and it needs a copy.
        num_next = timeline.tables.block_at(timeline.next_start) is not None
        return num_new + num_next <= self.pool.num_blocks - len(stays) - self.num_reserved

    def _cached_blocks(self, request: Request) -> list[int]:
        """The longest cached prefix that leaves a token to compute. Scored prompts are computed whole."""
        if not self.config.enable_prefix_caching or request.prompt_logprobs is not None:
            return []
        return request.timeline.tables.find(request.timeline.tokens, request.target - 1)
