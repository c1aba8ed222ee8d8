"""One loaded model, the engines built over it, and a runtime that notes what the engine made it do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, assert_never

import msgspec

from segue.args import EngineArgs, KVCacheDtype, RuntimeName
from segue.contract.step import Executor, Runtime, Sampling, StepHandle, StepPlan
from segue.engine.config import EngineConfig, SpeculativeConfig
from segue.engine.engine import Engine
from segue.host.client import EngineClient
from segue.models import build_program
from segue.runtime.runtime import LocalRuntime
from segue.sample.guide import GrammarGuides
from segue.speculate.draft_model import DraftModelDrafter
from segue.speculate.drafter import Drafter
from segue.speculate.ngram import NgramDrafter
from segue.tokens import Tokenizer
from segue.verify.cases import Case
from segue.verify.modes import Setup
from segue.weights.gguf import load_gguf
from segue.weights.hub import resolve_model
from segue.weights.model_file import ModelFile

NUM_DRAFTS = 4
WRONG_TOKENS = 40
"""Room for wrong texts, which become more tokens than right ones."""
AMPLE = 6
"""An ample pool holds this many times what all requests come to: both sides of forks, and what is cached."""

_POOL_SIZES = 4
"""How many sizes of a tight pool are considered."""

WrapExecutor = Callable[[Executor], Executor]


class WatchedRuntime:
    """A `Runtime` that notes what it is asked to do and passes it on."""

    def __init__(self, runtime: Runtime, budget: int) -> None:
        self._runtime = runtime
        self._budget = budget
        self.max_requests_in_step = 0
        self.num_split_prompts = 0
        self.num_planned_ahead = 0
        self.draft_lengths: set[int] = set()

    @property
    def vocab_size(self) -> int:
        return self._runtime.vocab_size

    def is_ready(self, sampling: Sampling, *, wait_s: float = 0.0) -> bool:
        return self._runtime.is_ready(sampling, wait_s=wait_s)

    def submit(self, plan: StepPlan) -> StepHandle:
        self.max_requests_in_step = max(self.max_requests_in_step, len(plan.seqs))
        num_tokens = 0
        for seq in plan.seqs:
            num_tokens += len(seq.tokens) + len(seq.drafts) if seq.after is None else 1 + seq.max_drafts
            self.num_planned_ahead += seq.after is not None
            if seq.sampling is not None:
                self.draft_lengths.add(seq.propose)
        if num_tokens == self._budget:
            self.num_split_prompts += any(seq.sampling is None for seq in plan.seqs)
        return self._runtime.submit(plan)

    def close(self) -> None:
        self._runtime.close()


class Bench(msgspec.Struct):
    """An engine for one run."""

    client: EngineClient
    watched: WatchedRuntime | None
    """None: the engine is in a process of its own."""
    threads: int


class Workbench:
    """Builds engines. The model is loaded once, and its weights are packed anew only for another number of threads."""

    def __init__(
        self,
        model: str | Path,
        *,
        draft: str | Path | None = None,
        runtime: RuntimeName = "native",
        kv_cache_dtype: KVCacheDtype = "auto",
        wrap: WrapExecutor | None = None,
    ) -> None:
        """`draft`: the drafter's model, by default the model itself. `wrap` is for tests: it may change what the
        executor says. Raises ModelFileError."""
        self._path = resolve_model(str(model))
        self._draft_path = self._path if draft is None else resolve_model(str(draft))
        self.file = load_gguf(self._path)
        self._draft_file = self.file if draft is None else load_gguf(self._draft_path)
        self.tokenizer = Tokenizer.from_model(self.file)
        self._runtime = runtime
        self._kv_cache_dtype = kv_cache_dtype
        self._wrap: WrapExecutor = wrap or (lambda executor: executor)
        self._executors: dict[str, tuple[int, Executor]] = {}
        """By role: the number of threads, and the executor."""
        self.max_model_len = build_program(self.file).max_model_len

    def describe(self) -> str:
        """What the plain run's bits depend on beside the model: runtime, instruction set, KV type."""
        match self._runtime:
            case "native":
                from segue.runtime.native import NativeExecutor

                executor = self._executor("target", self.file, 1)
                isa = f", {executor.isa}" if isinstance(executor, NativeExecutor) else ""
                return f"native{isa}, KV {'f32' if self._kv_cache_dtype == 'f32' else 'f16'}"
            case "reference":
                return "reference, KV f32"
            case _:
                assert_never(self._runtime)

    def open(self, setup: Setup, cases: Sequence[Case]) -> Bench:
        """An engine for these requests. Its `close` leaves the model loaded."""
        max_model_len = min(self.max_model_len, max(case.num_tokens for case in cases) + _spare_tokens(setup))
        num_kv_blocks = self._num_kv_blocks(setup, cases, max_model_len)
        if setup.own_process:
            return self._open_process(setup, max_model_len, num_kv_blocks)
        config = EngineConfig(
            max_model_len=max_model_len,
            num_kv_blocks=num_kv_blocks,
            block_size=setup.block_size,
            max_num_seqs=min(setup.max_num_seqs, setup.max_num_batched_tokens),
            max_num_batched_tokens=setup.max_num_batched_tokens,
            enable_prefix_caching=setup.enable_prefix_caching,
            async_depth=setup.async_depth,
            speculative=self._speculative(setup),
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        executor = self._executor("target", self.file, setup.threads)
        executor.allocate_kv(config.num_kv_blocks, config.block_size)
        watched = WatchedRuntime(
            LocalRuntime(
                executor,
                drafter=self._drafter(setup, config),
                guides=GrammarGuides(self.tokenizer),
                has_worker=config.async_depth > 1,
            ),
            config.max_num_batched_tokens,
        )
        return Bench(Engine(watched, config), watched, _threads_of(executor))

    def _open_process(self, setup: Setup, max_model_len: int, num_kv_blocks: int) -> Bench:
        from segue.host.process import EngineProcess

        args = EngineArgs(
            model=str(self._path),
            threads=setup.threads,
            max_model_len=max_model_len,
            max_num_seqs=min(setup.max_num_seqs, setup.max_num_batched_tokens),
            max_num_batched_tokens=setup.max_num_batched_tokens,
            block_size=setup.block_size,
            num_kv_blocks=num_kv_blocks,
            enable_prefix_caching=setup.enable_prefix_caching,
            async_scheduling=setup.async_depth == 2,
            speculative_config=self._speculative(setup),
            kv_cache_dtype=self._kv_cache_dtype,
            runtime=self._runtime,
            engine_process=True,
        )
        return Bench(EngineProcess(args), None, setup.threads)

    def _num_kv_blocks(self, setup: Setup, cases: Sequence[Case], max_model_len: int) -> int:
        longest = -(-max_model_len // setup.block_size)
        match setup.pool:
            case "ample":
                # Counted in blocks: each request may leave its last one nearly empty.
                return longest + AMPLE * sum(
                    -(-(case.num_tokens + _spare_tokens(setup)) // setup.block_size) for case in cases
                )
            case "tight":
                return _tight_pool(setup, cases, longest)
            case _:
                assert_never(setup.pool)

    def _speculative(self, setup: Setup) -> SpeculativeConfig | None:
        if setup.speculation == "none":
            return None
        return SpeculativeConfig(
            method=setup.speculation,
            num_speculative_tokens=NUM_DRAFTS,
            prompt_lookup_min=1,
            model=str(self._draft_path) if setup.speculation == "draft_model" else None,
            adaptive=setup.adaptive,
        )

    def _drafter(self, setup: Setup, config: EngineConfig) -> Drafter | None:
        match setup.speculation:
            case "none":
                return None
            case "ngram":
                return NgramDrafter(1, 5)
            case "draft_model":
                executor = self._executor("drafter", self._draft_file, setup.threads)
                executor.allocate_kv(config.num_kv_blocks, config.block_size)
                return DraftModelDrafter(executor)
            case _:
                assert_never(setup.speculation)

    def _executor(self, role: str, file: ModelFile, threads: int) -> Executor:
        kept = self._executors.get(role)
        if kept is not None and kept[0] == threads:
            return kept[1]
        # The old one's memory goes before the new one's comes.
        self._executors.pop(role, None)
        del kept
        executor = self._new_executor(file, threads)
        if role == "target":
            executor = self._wrap(executor)
        self._executors[role] = (threads, executor)
        return executor

    def _new_executor(self, file: ModelFile, threads: int) -> Executor:
        program = build_program(file)
        match self._runtime:
            case "native":
                from segue.runtime.native import NativeExecutor

                kv_dtype: Literal["f16", "f32"] = "f32" if self._kv_cache_dtype == "f32" else "f16"
                return NativeExecutor(program, file, threads=threads, kv_dtype=kv_dtype)
            case "reference":
                from segue.runtime.reference import ReferenceExecutor

                return ReferenceExecutor(program, file)
            case _:
                assert_never(self._runtime)

    def close(self) -> None:
        """Give back the model's memory."""
        self._executors.clear()


def _threads_of(executor: Executor) -> int:
    """How many threads compute; executors without threads of their own have one."""
    threads = getattr(executor, "threads", 1)
    assert isinstance(threads, int)
    return threads


def _tight_pool(setup: Setup, cases: Sequence[Case], longest: int) -> int:
    """Few more blocks than the longest request needs: of several such pools, the one in which the requests that are
    admitted first lack the most blocks later."""

    def blocks_for(num_tokens: int) -> int:
        return -(-num_tokens // setup.block_size)

    def lack(pool: int) -> int:
        admitted = final = 0
        for case in cases[: setup.max_num_seqs]:
            admitted += blocks_for(len(case.token_ids) + _margin(setup))
            if admitted > pool:
                break
            final += blocks_for(case.num_tokens - 1)
        return final - pool

    return max(range(longest, longest + _POOL_SIZES), key=lack)


def _spare_tokens(setup: Setup) -> int:
    """Room of a request beyond its prompt and answer."""
    return _margin(setup) + (WRONG_TOKENS if setup.revised else 0)


def _margin(setup: Setup) -> int:
    """What the scheduler reserves for drafts."""
    match setup.speculation:
        case "none":
            return 0
        case "ngram":
            return 1 + NUM_DRAFTS
        case "draft_model":
            return 1 + 2 * NUM_DRAFTS
        case _:
            assert_never(setup.speculation)
