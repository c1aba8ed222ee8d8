"""What must hold after every step, apart from the driver. Nothing here trusts a sum that the engine keeps itself."""

from dataclasses import dataclass

from segue.contract.reports import EngineOutput
from segue.engine.config import EngineConfig
from segue.engine.engine import Engine
from segue.engine.request import Request, State, Turn
from tests.sim.oracle import ROOT, OracleExecutor, mix
from tests.sim.plain import Answer


class Violation(AssertionError):
    """Something that must never happen."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


@dataclass(frozen=True)
class _Seen:
    """A request as it was before a step."""

    state: State
    key: tuple[int, bool, int]
    num_preemptions: int
    blocks: tuple[int, ...]
    turn: Turn | None


@dataclass(frozen=True)
class Memory:
    """The KV memory of an engine over the oracle."""

    target: OracleExecutor
    draft: OracleExecutor | None


class Checker:
    """Checks one engine around each of its steps."""

    def __init__(self, engine: Engine, memory: Memory | None = None) -> None:
        self.engine = engine
        self.memory = memory
        """What its KV memory holds; None: not to be looked at, since another thread writes it."""
        self.salts: dict[str, str | None] = {}
        """Of every request, as its user gave it."""
        self._key_contents: dict[bytes, tuple[str | None, list[int]]] = {}
        """What each key that was ever seen stands for."""
        self._seen: dict[str, _Seen] = {}
        self._to_be_filled: set[int] = set()
        """By copies in flight; with them, these may be lost."""

    def before_step(self) -> None:
        """Remember how things stand."""
        self._to_be_filled = set(self._copied())
        self._seen = {
            request.id: _Seen(
                request.state,
                self._order(request),
                request.metrics.num_preemptions,
                tuple(request.timeline.tables.blocks),
                request.turn,
            )
            for request in self.engine.requests.values()
        }

    def after_step(self) -> None:
        """Every block, ledger, state and reservation is as it must be."""
        engine = self.engine
        requests = list(engine.requests.values())
        engine.pool.check(request.timeline.tables.blocks for request in requests)
        self._check_running(requests)
        self._check_reserved(requests)
        self._check_turns(requests)
        self._check_evictions(requests)
        for request in requests:
            request.timeline.check()
            self._check_state(request)
            self._check_published(request)
        if self.memory is not None:
            require(engine.stats.num_computed_tokens == self.memory.target.num_computed, "work is miscounted")
            copied = self._copied()
            for request in requests:
                self._check_kv(request, self.memory, copied)

    def _order(self, request: Request) -> tuple[int, bool, int]:
        """By priority where that counts; then answers before input that nobody waits for; then first come."""
        by_priority = self.engine.config.scheduling_policy == "priority"
        return (request.priority if by_priority else 0, request.turn is None, request.arrival)

    def _check_running(self, requests: list[Request]) -> None:
        scheduler = self.engine.scheduler
        running = {request.id for request in requests if request.state is State.RUNNING}
        require(
            len(running) == len(scheduler.running) and running == {r.id for r in scheduler.running},
            "running requests differ from the list of them",
        )
        keys = [self._order(request) for request in scheduler.running]
        require(keys == sorted(keys), "running requests are out of order")
        require(len(running) <= self.engine.config.max_num_seqs, "too many run")

    def _check_reserved(self, requests: list[Request]) -> None:
        """Promised blocks are there, and nobody's promise outlives it."""
        config = self.engine.config
        reserved = sum(
            max(0, config.blocks_for(request.reserve) - len(request.timeline.tables.blocks))
            for request in requests
        )
        require(reserved <= self.engine.pool.num_free, "more is reserved than is free")
        require(reserved == self.engine.scheduler.num_reserved, "a reservation is counted that nobody has")

    def _check_turns(self, requests: list[Request]) -> None:
        """Nobody was admitted past one who waits, and nobody preempted while one after it kept running."""
        waiting, admitted, kept, preempted = [], [], [], []
        for request in requests:
            seen = self._seen.get(request.id)
            key = self._order(request)
            if seen is None or seen.key != key:
                continue
            was_preempted = request.metrics.num_preemptions > seen.num_preemptions
            if seen.state is State.WAITING and request.state is State.WAITING:
                if len(request.timeline.tables.blocks) < len(seen.blocks):
                    continue  # admitted, it may be, and back since a copy for it was lost
                waiting.append(key)
            elif seen.state is State.WAITING and request.state is State.RUNNING:
                admitted.append(key)
            elif seen.state is State.RUNNING and was_preempted:
                preempted.append(key)
            elif seen.state is State.RUNNING and request.state is State.RUNNING:
                kept.append(key)
        if waiting and admitted:
            require(max(admitted) < min(waiting), "a request was admitted past one that waits")
        if kept and preempted:
            require(max(kept) < min(preempted), "a request was preempted while one after it kept running")

    def _check_evictions(self, requests: list[Request]) -> None:
        """Nobody who did not run has lost its blocks without somebody having got some, or a promise of some. Where
        anything ended, that may have given them back already."""
        seen = {request.id: self._seen[request.id] for request in requests if request.id in self._seen}
        if len(seen) < len(self._seen):
            return
        evicted = None
        for request in requests:
            before, blocks = seen.get(request.id), request.timeline.tables.blocks
            if before is None or not set(blocks) <= set(before.blocks):
                return
            if before.turn is not None and request.turn is not before.turn:
                return
            if before.state in (State.WAITING, State.UNREADY) and request.state is not before.state:
                return  # admitted, with some reserved
            if request.metrics.num_preemptions > before.num_preemptions:
                return
            if len(blocks) < len(before.blocks) and not self._to_be_filled.isdisjoint(before.blocks):
                return  # a copy was lost, and who was admitted in this step may be back
            if before.state is not State.RUNNING and before.blocks and not blocks:
                evicted = request
        require(evicted is None, f"{evicted.id if evicted else None} lost its blocks in vain")

    def _check_state(self, request: Request) -> None:
        timeline, config = request.timeline, self.engine.config
        holds = bool(timeline.tables.blocks) and request.state is not State.RUNNING
        require(holds == (request in self.engine.scheduler._holders), f"{request.id} holds blocks in secret")
        require(
            bool(request.reserve) <= (request.state is State.RUNNING),
            f"{request.id} reserves without running",
        )
        require(request.state is not State.IDLE or request.turn is None, f"{request.id} is idle in a turn")
        require(len(timeline.tokens) <= config.max_model_len, f"{request.id} is too long")
        require(
            len(timeline.tables.blocks) <= config.blocks_for(config.max_model_len),
            f"{request.id} has blocks for more than max_model_len",
        )
        require(
            request.turn is None or timeline.kv_len < len(timeline.tokens),
            f"{request.id} computed its last id",
        )

    def _copied(self) -> dict[int, int]:
        """Blocks that a step in flight is to fill: which block has the contents now."""
        copied: dict[int, int] = {}
        for flying in self.engine._in_flight:
            for source, target in flying.step.plan.copies:
                copied[target] = copied.get(source, source)
        return copied

    def _check_kv(self, request: Request, memory: Memory, copied: dict[int, int]) -> None:
        """All KV that a ledger counts is there, or a copy in flight brings it."""
        timeline, size = request.timeline, self.engine.config.block_size
        blocks = [copied.get(block, block) for block in timeline.tables.blocks]
        chain = ROOT
        for position, token in enumerate(timeline.tokens[: max(timeline.kv_len, timeline.draft_kv_len)]):
            chain = mix(chain, token)
            block, right = blocks[position // size], (position, token, chain)
            if position < timeline.kv_len:
                found = memory.target.holds(block, position)
                require(found == right, f"{request.id} counts on KV at position {position} and has {found}")
            if memory.draft is not None and position < timeline.draft_kv_len:
                found = memory.draft.holds(block, position)
                require(found == right, f"{request.id} counts on draft KV at {position} and has {found}")

    def _check_published(self, request: Request) -> None:
        """A published block is complete, and all that hold it have the history that its key stands for."""
        timeline, config = request.timeline, self.engine.config
        size = config.block_size
        complete = timeline.kv_len
        if config.has_draft_model:
            complete = min(complete, timeline.draft_kv_len)
        for index, block in enumerate(timeline.tables.blocks):
            key = self.engine.pool.key_of(block)
            if key is None:
                continue
            require(config.enable_prefix_caching, "a block is published with the prefix cache off")
            end = (index + 1) * size
            if end <= complete:
                require(
                    key == timeline.tables.key(timeline.tokens, index),
                    f"{request.id} holds a block under the key of other ids",
                )
                contents = (self.salts[request.id], timeline.tokens[:end].tolist())
                known = self._key_contents.setdefault(key, contents)
                require(known == contents, "one key for two histories")
            else:
                # After a cut the last block stays published, as what it was, until it is written again.
                is_cut = index == len(timeline.tables.blocks) - 1 and not timeline.flights
                require(is_cut, f"{request.id} shows a block that is not complete")


def check_output(request_id: str, output: EngineOutput, expected: Answer, got: Answer | None) -> Answer:
    """One output continues the answer that must come. Returns what has come by now."""
    if got is None:
        got = Answer([], None if expected.logprobs is None else [])
        require(
            output.prompt_logprobs == expected.prompt_logprobs,
            f"{request_id}: prompt logprobs {output.prompt_logprobs}, not {expected.prompt_logprobs}",
        )
    got.token_ids.extend(output.token_ids)
    num_tokens = len(got.token_ids)
    wanted = expected.token_ids[:num_tokens]
    require(got.token_ids == wanted, f"{request_id}: tokens {got.token_ids}, not {expected.token_ids}")
    if got.logprobs is not None:
        got.logprobs.extend(output.logprobs or ())
        require(
            expected.logprobs is not None and got.logprobs == expected.logprobs[:num_tokens],
            "logprobs differ",
        )
    else:
        require(output.logprobs is None, f"{request_id}: logprobs that nobody asked for")
    if output.finish_reason is not None:
        require(num_tokens == len(expected.token_ids), f"{request_id}: stopped after {got.token_ids}")
        ending = (output.finish_reason, output.stop_reason)
        require(ending == (expected.finish_reason, expected.stop_reason), f"{request_id}: ended by {ending}")
        metrics = output.metrics
        require(
            metrics is not None and metrics.num_accepted_tokens <= metrics.num_draft_tokens, "bad metrics"
        )
    return got


def check_work(
    config: EngineConfig, num_prompt_tokens: int, output: EngineOutput, num_output_tokens: int
) -> None:
    """A request that was never preempted has computed each token once, but for drafts and what flew at its end."""
    metrics = output.metrics
    require(metrics is not None, f"{output.request_id} ended without metrics")
    assert metrics is not None
    num_cached = metrics.num_cached_tokens
    require(
        num_cached % config.block_size == 0 and num_cached < num_prompt_tokens,
        f"{output.request_id}: {num_cached} cached tokens",
    )
    if metrics.num_preemptions:
        return
    needed = num_prompt_tokens - num_cached + num_output_tokens - 1
    needed += metrics.num_draft_tokens - metrics.num_accepted_tokens
    # Accepted drafts after a stop were computed for nothing.
    wasted = metrics.num_computed_tokens - needed
    require(
        0 <= wasted <= config.num_speculative_tokens,
        f"{output.request_id} has computed {metrics.num_computed_tokens} tokens and needed {needed}",
    )
