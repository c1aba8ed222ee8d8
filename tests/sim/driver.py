"""Deterministic simulation: everything at once over tiny pools, from one seed, checked at every step.

`Simulation(seed).run(steps)` draws a setup, lets requests arrive, grow, stop, fail and go away at random, and raises
`Violation` at the first thing that is not as it must be. The checks are in `checks.py`, what the answers must be in
`plain.py`.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from segue.contract.reports import EngineOutput, FinishReason
from segue.contract.step import Runtime
from segue.engine.config import EngineConfig, SpeculativeConfig, SpeculativeMethod
from segue.engine.engine import Engine
from segue.engine.submission import Keep, KvScope
from segue.errors import EngineDead
from segue.host.journal import Journal
from segue.host.wire import CALL_TYPES
from segue.runtime.runtime import LocalRuntime
from segue.sample.params import SamplingParams
from segue.speculate.draft_model import DraftModelDrafter
from segue.speculate.drafter import Drafter
from segue.speculate.ngram import NgramDrafter
from tests.engine.calls import add_request
from tests.sim.checks import Checker, Memory, Violation, check_output, check_work, require
from tests.sim.grammar import GrammarParams, SimGuides
from tests.sim.oracle import Failure, OracleDraftExecutor, OracleExecutor, OracleModel
from tests.sim.plain import Answer, PlainSession
from tests.sim.trace import Trace, TracedRuntime

EOS = frozenset({1})
MAX_IDLE_STEPS = 2000
"""No request may go without any news for this many steps, faults and priorities apart."""


@dataclass(frozen=True)
class Setup:
    """What one simulation runs with."""

    config: EngineConfig
    faults: bool
    threaded: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> "Setup":
        block_size = rng.choice((1, 4, 16))
        max_model_len = rng.choice((20, 33, 48, 64))
        least = -(-max_model_len // block_size)
        method: SpeculativeMethod | None = rng.choice((None, "ngram", "draft_model"))
        speculative = None
        if method is not None:
            speculative = SpeculativeConfig(
                method=method,
                num_speculative_tokens=rng.randint(1, 5),
                prompt_lookup_min=rng.randint(1, 2),
                prompt_lookup_max=rng.randint(2, 4),
                model="draft" if method == "draft_model" else None,
                adaptive=rng.random() < 0.3,
            )
        max_num_seqs = rng.randint(1, 8)
        return cls(
            EngineConfig(
                max_model_len=max_model_len,
                num_kv_blocks=rng.choice((least, least + 1, least * 2, least * 3, least * 8)),
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 7, 32, 200)),
                enable_prefix_caching=rng.random() < 0.7,
                async_depth=rng.choice((1, 1, 2, 2, 3, 8)),
                scheduling_policy=rng.choice(("fcfs", "priority")),
                speculative=speculative,
                eos_token_ids=EOS,
                seed=7,
            ),
            faults=rng.random() < 0.3,
        )


@dataclass
class Client:
    """One request as its user sees it: what was sent, what came back, what must come."""

    request_id: str
    plain: PlainSession
    resumable: bool
    chunks: deque[tuple[list[int], SamplingParams | None]] = field(default_factory=deque)
    """Sent and not yet answered."""
    expected: Answer | None = None
    got: Answer | None = None
    idle_steps: int = 0
    input_open: bool = True
    num_interrupts: int = 0
    """Turns that were cut off and whose end has not been reported yet."""
    num_refused: int = 0
    """Chunks that do not fit, of which the engine has not said so yet."""
    was_restarted: bool = False
    """The engine that serves it now is not the one that it was sent to."""

    def begin(self) -> None:
        """Work out the next answer, if one is due."""
        while self.expected is None and self.chunks:
            ids, params = self.chunks.popleft()
            length = len(self.plain.history) + len(ids)
            if length > self.plain.max_model_len - (params is not None) or (
                length == 0 and params is not None
            ):
                self.num_refused += 1
                continue
            self.expected = self.plain.turn(ids, params)
            self.got = None

    @property
    def is_waiting(self) -> bool:
        return self.expected is not None or bool(self.chunks) or self.num_refused > 0


class World:
    """One engine over the oracle, and its users. Every step is checked."""

    def __init__(self, setup: Setup, trace: Trace | None = None) -> None:
        self.setup = setup
        self.trace = trace
        self.model = OracleModel()
        self.engine = self._start_engine()
        self.intake = self.engine.intake
        """Where requests enter, whichever engine runs them."""
        self.clients: dict[str, Client] = {}
        self.num_steps = 0
        self.checker = Checker(self.engine, self._memory())
        self.journal = Journal(setup.config)
        self._num_told = 0

    def _start_engine(self) -> Engine:
        """An engine that knows nothing, over KV memory that holds nothing."""
        config = self.setup.config
        self.target = OracleExecutor(self.model, config.max_model_len)
        self.target.allocate_kv(config.num_kv_blocks, config.block_size)
        self.draft: OracleDraftExecutor | None = None
        self.guides = SimGuides(self.model.vocab_size)
        runtime: Runtime = LocalRuntime(
            self.target, drafter=self._drafter(), guides=self.guides, has_worker=self.setup.threaded
        )
        if self.trace is not None:
            runtime = TracedRuntime(runtime, self.trace)
        return Engine(runtime, config)

    def _memory(self) -> Memory | None:
        return None if self.setup.threaded else Memory(self.target, self.draft)

    def _drafter(self) -> Drafter | None:
        speculative = self.setup.config.speculative
        if speculative is None:
            return None
        if speculative.method == "ngram":
            return NgramDrafter(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
        config = self.setup.config
        self.draft = OracleDraftExecutor(OracleModel(flavour=3), config.max_model_len, target=self.target)
        self.draft.allocate_kv(config.num_kv_blocks, config.block_size)
        return DraftModelDrafter(self.draft)

    def drain(self) -> None:
        """Close all input, let everything finish, and check that every block is free."""
        for client in list(self.clients.values()):
            self.end_input(client)
        for _ in range(20_000):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        require(not self.clients, f"requests never finished: {list(self.clients)}")
        stats = self.engine.stats
        require(stats.num_free_blocks == stats.num_kv_blocks, "blocks leaked")

    # --- what users do ----------------------------------------------------------------------------------------

    def tell(self, method: str, **arguments: Any) -> None:
        """Call the engine, and note it down for the next one."""
        getattr(self.engine, method)(**arguments)
        self.journal.told(CALL_TYPES[method](**arguments))
        self._num_told += 1

    def arrive(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams | None,
        *,
        resumable: bool,
        keep: Keep = "computed",
        priority: int = 0,
        salt: str | None = None,
    ) -> None:
        self.checker.salts[request_id] = salt
        submission = self.intake.submission(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            scope=KvScope(salt),
            resumable=resumable,
            keep=keep,
        )
        self.tell("add_request", submission=submission)
        plain = PlainSession(self.model, EOS, self.setup.config.max_model_len, keep)
        client = Client(request_id, plain, resumable, input_open=resumable)
        self.clients[request_id] = client
        client.chunks.append((prompt, params))
        client.begin()

    def abort(self, client: Client) -> None:
        self.tell("abort_request", request_id=client.request_id)
        del self.clients[client.request_id]

    def send_chunk(self, client: Client, ids: list[int], params: SamplingParams | None) -> None:
        """Also what does not fit: it is refused, and nothing else changes."""
        self.tell(
            "add_chunk",
            request_id=client.request_id,
            token_ids=self.intake.chunk(ids, params),
            params=params,
        )
        client.chunks.append((ids, params))
        client.begin()

    def truncate(self, client: Client, num_dropped: int) -> None:
        """Revise or interrupt: also in the middle of a turn, with steps in flight."""
        known = len(self.engine.requests[client.request_id].timeline.tokens)
        num_tokens = known - min(known, num_dropped)
        self.tell("truncate", request_id=client.request_id, num_tokens=num_tokens)
        in_turn = client.expected is not None
        client.num_interrupts += in_turn
        client.plain.truncate(num_tokens, in_turn)
        client.chunks.clear()
        client.expected = client.got = None

    def fork(self, client: Client, request_id: str, num_dropped: int) -> None:
        """Another request from a point of this one's history."""
        known = len(self.engine.requests[client.request_id].timeline.tokens)
        num_tokens = known - min(known, num_dropped)
        self.tell(
            "fork",
            request_id=client.request_id,
            new_request_id=request_id,
            num_tokens=num_tokens,
            default_seed=self.intake.next_seed(),
        )
        self.checker.salts[request_id] = self.checker.salts[client.request_id]
        plain = client.plain
        fork = PlainSession(plain.model, plain.eos, plain.max_model_len, plain.keep)
        fork.history = (plain.full if client.expected is not None else plain.history)[:num_tokens]
        fork.full = list(fork.history)
        self.clients[request_id] = Client(request_id, fork, resumable=True)

    def end_input(self, client: Client) -> None:
        if client.input_open:
            client.input_open = False
            self.tell("end_input", request_id=client.request_id)

    def reset_prefix_cache(self) -> None:
        self.tell("reset_prefix_cache")

    def restart(self, *, lose_outputs: bool) -> None:
        """The engine ends, with all KV and all that flies; another one goes on from what the journal holds.

        `lose_outputs`: it takes one more step, of which nobody hears.
        """
        if lose_outputs:
            self.engine.step()
        self.close()
        self.engine = self.checker.engine = self._start_engine()
        self.checker.memory = self._memory()
        self.journal.start_over()
        calls = [call for held in self.journal.requests.values() for call in held.calls()]
        for call in (*calls, *self.journal.unconfirmed):
            arguments = {name: getattr(call, name) for name in call.__struct_fields__}
            getattr(self.engine, type(call).__name__)(**arguments)
        for client in self.clients.values():
            client.was_restarted = True

    def close(self) -> None:
        """The engine ends, whatever flies. Nothing is computed after that, and whoever asks is told."""
        self.engine.close()
        self.engine.close()
        require(self.engine.state == "dead", "a closed engine says that it runs")
        calls: list[Callable[[], object]] = [
            self.engine.step,
            lambda: add_request(self.engine, "late", [2], None, resumable=True),
            *(partial(self.engine.end_input, client.request_id) for client in self.clients.values()),
        ]
        for call in calls:
            try:
                call()
            except EngineDead:
                continue
            raise Violation("a closed engine takes a call")
        require(not self.target.violations, "; ".join(self.target.violations))

    # --- what comes back ---------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of the engine, and all checks."""
        self.num_steps += 1
        faulty = self.setup.faults
        self.checker.before_step()
        outputs = self.engine.step()
        self.journal.progress(self._num_told, outputs)
        if self.trace is not None:
            self.trace.add(outputs)
        for violations in (self.target.violations, self.draft.violations if self.draft else []):
            require(not violations, "; ".join(violations))
        for client in self.clients.values():
            client.idle_steps += client.is_waiting
        for output in outputs:
            self._receive(output)
        self.checker.after_step()
        if self.setup.config.scheduling_policy == "fcfs" and not faulty:
            for client in self.clients.values():
                require(client.idle_steps < MAX_IDLE_STEPS, f"{client.request_id} makes no progress")

    def _receive(self, output: EngineOutput) -> None:
        client = self.clients.get(output.request_id)
        require(client is not None, f"output for {output.request_id}, which is gone")
        assert client is not None
        client.idle_steps = 0
        if output.finish_reason is FinishReason.ERROR:
            self._receive_error(client, output)
            return
        if output.finish_reason is FinishReason.ABORT:
            require(client.num_interrupts > 0 and not output.token_ids, f"unexpected output {output}")
            client.num_interrupts -= 1
            return
        if client.expected is not None and (output.token_ids or output.finish_reason is not None):
            client.got = check_output(client.request_id, output, client.expected, client.got)
            if output.finish_reason is not None:
                if not client.resumable and not client.was_restarted:
                    num_output = len(client.expected.token_ids)
                    num_prompt = len(client.plain.full) - num_output
                    check_work(self.setup.config, num_prompt, output, num_output)
                client.expected = None
                client.begin()
        else:
            require(output.finished and not output.token_ids, f"unexpected output {output}")
        if output.finished:
            require(not client.is_waiting, f"{client.request_id} finished with answers due")
            require(not client.input_open, f"{client.request_id} finished with its input open")
            del self.clients[client.request_id]

    def _receive_error(self, client: Client, output: EngineOutput) -> None:
        message = output.error or ""
        require("\n" not in message and bool(message), f"error message {message!r}")
        if not output.finished:
            require(client.num_refused > 0 and not output.token_ids, f"{client.request_id}: {message}")
            client.num_refused -= 1
            return
        injected = any(text in message for text in ("injected", "not finite", "an earlier step"))
        require(self.setup.faults and injected, f"{client.request_id}: {message}")
        del self.clients[client.request_id]


class Simulation(World):
    """A world in which everything happens at random, from one seed."""

    def __init__(self, seed: int, setup: Setup | None = None, trace: Trace | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        super().__init__(Setup.draw(self.rng) if setup is None else setup, trace)
        self._num_requests = 0

    def run(self, num_steps: int) -> None:
        """Run, then let everything end, and see that nothing is left."""
        try:
            for _ in range(num_steps):
                self._events()
                self.step()
            if self.rng.random() < 0.1:
                self.close()
            else:
                self.drain()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        finally:
            self.engine.close()

    def _events(self) -> None:
        rng = self.rng
        if rng.random() < 0.25 and len(self.clients) < 12:
            self._arrive()
        if self.clients and rng.random() < 0.25:
            client = rng.choice(list(self.clients.values()))
            for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
                if client.request_id in self.clients:
                    self._act(client)
        if rng.random() < 0.5:
            self._disturb_copies()
        if rng.random() < 0.01:
            self.reset_prefix_cache()
        if rng.random() < 0.004:
            self.restart(lose_outputs=rng.random() < 0.5)
        if self.setup.faults and rng.random() < 0.02:
            if rng.random() < 0.5:
                self._fail_a_step()
            else:
                self._fail_a_sequence()

    def _act(self, client: Client) -> None:
        """One thing that its user does, often in the middle of another."""
        rng = self.rng
        event = rng.random()
        if event < 0.07:
            self.abort(client)
        elif client.resumable and client.input_open:
            if event < 0.14:
                self.end_input(client)
            elif event < 0.29:
                self.truncate(client, rng.choice((0, 0, 1, 2, 5, 20)))
            elif event < 0.55 and len(self.clients) < 12:
                self._fork(client)
            else:
                for _ in range(rng.choice((1, 1, 1, 2, 3))):
                    self._send_chunk(client)

    def _disturb_copies(self) -> None:
        """Those whose tables name what a copy in flight is to fill are cut, forked, go on or go away; then the copy's
        step may fail."""
        rng = self.rng
        targets = {target for flying in self.engine._in_flight for _, target in flying.step.plan.copies}
        for client in list(self.clients.values()):
            request = self.engine.requests.get(client.request_id)
            if request is None or targets.isdisjoint(request.timeline.tables.blocks):
                continue
            if client.input_open:
                self.truncate(client, rng.choice((0, 0, 1, 2)))
                for _ in range(rng.choice((0, 0, 1, 2))):
                    self._fork(client)
            if rng.random() < 0.2:
                self.abort(client)
        if targets and self.setup.faults and rng.random() < 0.5:
            self._fail_a_step()

    def _fail_a_step(self) -> None:
        """The oldest one in flight, or the next."""
        executors = [self.target] if self.draft is None else [self.target, self.draft]
        self.rng.choice(executors).fail_next = self.rng.choice(list(Failure))

    def _fail_a_sequence(self) -> None:
        """The rest of its step is whole."""
        rng = self.rng
        match rng.choice(("logits", "refusal", "grammar", "draft")):
            case "logits":
                self.target.nan_next = rng.randrange(8)
            case "refusal":
                self.target.refuse_next = rng.randrange(8)
            case "grammar":
                self.guides.fail_next = True
            case "draft":
                if self.draft is not None:
                    self.draft.nan_next = rng.randrange(8)

    def _next_id(self) -> str:
        self._num_requests += 1
        return f"r{self._num_requests}"

    def _arrive(self) -> None:
        rng = self.rng
        request_id = self._next_id()
        resumable = rng.random() < 0.4
        keep: Keep = rng.choice(("computed", "all"))
        prompt = self._prompt(rng.randint(1, self.setup.config.max_model_len - 1))
        params = None if resumable and rng.random() < 0.3 else self._params(resumable)
        priority = rng.randint(0, 2)
        salt = rng.choice((None, None, "salt"))
        self.arrive(request_id, prompt, params, resumable=resumable, keep=keep, priority=priority, salt=salt)

    def _fork(self, client: Client) -> None:
        """Often both go on at once, so that they write next to what they share."""
        rng = self.rng
        request_id = self._next_id()
        self.fork(client, request_id, rng.choice((0, 0, 1, 3)))
        if rng.random() < 0.5:
            self._send_chunk(client)
            self._send_chunk(self.clients[request_id])

    def _prompt(self, length: int) -> list[int]:
        """A few families of prompts, so that prefixes are shared and n-grams repeat."""
        rng = self.rng
        family = rng.randint(0, 2)
        ids = [(i * (family + 1)) % 9 + 2 for i in range(length)]
        if rng.random() < 0.5:
            ids[rng.randrange(length)] = rng.randint(2, 31)
        return ids

    def _params(self, resumable: bool) -> SamplingParams:
        rng = self.rng
        max_tokens = rng.choice((1, 2, 3, 8, 20, None))
        min_tokens = rng.choice((0, 0, 0, 1, 2, 5))
        kind = GrammarParams if rng.random() < 0.2 else SamplingParams
        return kind(
            max_tokens=max_tokens,
            min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
            temperature=rng.choice((0.0, 0.0, 1.0)),
            seed=rng.randint(0, 3),
            frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
            logit_bias=rng.choice((None, None, {5: 1.0})),
            stop_token_ids=rng.choice((None, [3], [8, 9])),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=None if resumable else rng.choice((None, None, None, 1)),
        )

    def _send_chunk(self, client: Client) -> None:
        length = self.rng.choice((0, 1, 1, 2, 5, 9))
        ids = self._prompt(length) if length else []
        params = None if self.rng.random() < 0.3 else self._params(resumable=True)
        self.send_chunk(client, ids, params)


def run_seed(seed: int, num_steps: int) -> int:
    """Run one seed; the number of engine steps it took. Raises Violation with the seed in its message."""
    simulation = Simulation(seed)
    try:
        simulation.run(num_steps)
    except Violation as violation:
        raise Violation(
            f"seed {seed}, step {simulation.num_steps}: {violation} ({simulation.setup})"
        ) from violation
    return simulation.num_steps
