"""How a user says what to run and how: `EngineArgs`, resolved once into an engine with a model.

model name ──resolve──▶ file ──▶ ModelFile ──▶ Program ──▶ Executor ──▶ Engine
                                    └────────▶ Tokenizer ──────────┘ (ids that end an answer)
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, assert_never, get_args

import msgspec

from segue.engine.config import EngineConfig, SchedulingPolicy, SpeculativeConfig
from segue.errors import CapacityError, ParameterError

if TYPE_CHECKING:
    from segue.contract.step import Executor
    from segue.host.client import EngineClient
    from segue.speculate.drafter import Drafter
    from segue.tokens import Tokenizer
    from segue.weights.model_file import ModelFile

KVCacheDtype = Literal["auto", "f16", "f32"]
RuntimeName = Literal["native", "reference"]

DEFAULT_MAX_MODEL_LEN = 8192
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
KV_SEQUENCES = 4
"""By default the KV cache holds this many sequences of full length."""
KV_MEMORY_SHARE = 0.25
"""... but takes no more than this share of the memory that is free."""


class EngineOptions(TypedDict, total=False):
    """`EngineArgs` without the model, as keywords of `LLM`."""

    threads: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int
    num_kv_blocks: int | None
    enable_prefix_caching: bool
    async_scheduling: bool
    speculative_config: SpeculativeConfig | dict[str, object] | None
    scheduling_policy: SchedulingPolicy
    seed: int
    kv_cache_dtype: KVCacheDtype
    runtime: RuntimeName
    engine_process: bool
    max_engine_restarts: int | None


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and how; vLLM's names. A bad value raises `ParameterError` here or in `build`."""

    model: str
    """An alias such as "smollm2", or the path of a GGUF file."""
    threads: int | None = None
    """None: all the CPUs that the process may use. `load` warns of more than that, and takes no more."""
    max_model_len: int | None = None
    """The longest a request may become, in tokens. None: the model's, at most 8,192."""
    max_num_seqs: int | None = None
    """The most requests in one step. None: 256, or `max_num_batched_tokens` if that is less."""
    max_num_batched_tokens: int | None = None
    """The most tokens in one step. None: 512, or `max_num_seqs` if that is more."""
    block_size: int = 16
    num_kv_blocks: int | None = None
    """None: room for `min(4, max_num_seqs)` requests of `max_model_len`, but no more than a quarter of the
    free memory, and no less than one such request."""
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    """Plan a step while the one before it runs."""
    speculative_config: SpeculativeConfig | dict[str, object] | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    seed: int = 0
    """For requests that bring none."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto: f16 with the native runtime, f32 with the reference runtime."""
    runtime: RuntimeName = "native"
    """reference: NumPy, f32, slow; to check the native one."""
    engine_process: bool = False
    """Run the engine in a process of its own, which the caller's work cannot slow down. The answers are the same."""
    max_engine_restarts: int | None = 5
    """When that process ends, it is started again and every answer goes on with the same bits: so many times in a row
    without anything said in between. 0: all open requests raise EngineDead at once. None: it is never given up; after
    5 times the open requests fail, new ones raise EngineDead, and it is tried again with growing pauses."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ParameterError("model", self.model, _MODEL)
        for name in ("threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        _check_positive("block_size", self.block_size)
        for name in ("enable_prefix_caching", "async_scheduling", "engine_process"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "must be True or False")
        _check_one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        _check_one_of("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _check_one_of("runtime", self.runtime, get_args(RuntimeName))
        if self.max_engine_restarts is not None and (
            type(self.max_engine_restarts) is not int or self.max_engine_restarts
        ):
            _check_positive("max_engine_restarts", self.max_engine_restarts)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ParameterError("seed", self.seed, "must be an integer")
        if self.runtime == "reference" and self.kv_cache_dtype == "f16":
            raise ParameterError("kv_cache_dtype", "f16", "the reference runtime has f32 only")
        SpeculativeConfig.of(self.speculative_config)

    @classmethod
    def of(cls, model: str | Path, options: EngineOptions) -> "EngineArgs":
        """Raises ParameterError for an option that does not exist."""
        if not isinstance(model, str | Path):
            raise ParameterError("model", model, _MODEL)
        known: dict[str, Any] = {}
        for name, value in options.items():
            if name in cls.__struct_fields__:
                known[name] = value
            else:
                _check_foreign_option(name, value)
        return cls(model=str(model), **known)

    def load(self) -> "LoadedModel":
        """The model's engine, in this process or in its own, and its text side.

        Raises ModelFileError, ParameterError, CapacityError, and EngineDead when its process ends.
        """
        limited = self._within_cpus()
        if not limited.engine_process:
            return limited.build()
        from segue.host.process import EngineProcess
        from segue.tokens import Tokenizer
        from segue.weights.gguf import load_gguf

        # A child that is started again must not resolve a name or a link anew: it may lead elsewhere by then.
        args = limited._with_files()
        file = load_gguf(Path(args.model))
        tokenizer = Tokenizer.from_model(file)
        engine = EngineProcess(args, max_restarts=self.max_engine_restarts)
        return LoadedModel(engine, tokenizer, engine.config, file)

    def _within_cpus(self) -> "EngineArgs":
        """The same with no more threads than CPUs: more would only wait for each other."""
        from segue.runtime.native import available_cpus

        cpus = available_cpus()
        if self.runtime != "native" or self.threads is None or self.threads <= cpus:
            return self
        warnings.warn(
            f"threads={self.threads}: this process may use {cpus} CPU{'s' * (cpus > 1)}, so threads={cpus}",
            stacklevel=4,  # where the LLM is made
        )
        return msgspec.structs.replace(self, threads=cpus)

    def _with_files(self) -> "EngineArgs":
        """The same with the files that the models' names lead to now. Raises ModelFileError."""
        from segue.weights.hub import resolve_model

        def file_of(name: str) -> str:
            return str(resolve_model(name).resolve())

        speculative = SpeculativeConfig.of(self.speculative_config)
        if speculative is not None and speculative.model is not None:
            speculative = msgspec.structs.replace(speculative, model=file_of(speculative.model))
        return msgspec.structs.replace(self, model=file_of(self.model), speculative_config=speculative)

    def build(self) -> "LoadedModel":
        """The model's engine in this process. Raises ModelFileError, ParameterError, CapacityError."""
        from segue.engine.engine import Engine
        from segue.runtime.runtime import LocalRuntime
        from segue.sample.guide import GrammarGuides
        from segue.tokens import Tokenizer
        from segue.weights.gguf import load_gguf
        from segue.weights.hub import resolve_model

        file = load_gguf(resolve_model(self.model))
        tokenizer = Tokenizer.from_model(file)
        executor = self._executor(file)
        draft_executor = self._draft_executor(file)
        executors = [executor] if draft_executor is None else [executor, draft_executor]
        config = self._engine_config(executors, tokenizer.eos_token_ids)
        for each in executors:
            each.allocate_kv(config.num_kv_blocks, config.block_size)
        drafter = _drafter(config.speculative, draft_executor)
        engine = Engine(LocalRuntime(executor, drafter=drafter, guides=GrammarGuides(tokenizer)), config)
        return LoadedModel(engine, tokenizer, config, file)

    def _executor(self, file: "ModelFile") -> "Executor":
        from segue.models import build_program

        program = build_program(file)
        match self.runtime:
            case "native":
                from segue.runtime.native import NativeExecutor

                kv_dtype: Literal["f16", "f32"] = "f32" if self.kv_cache_dtype == "f32" else "f16"
                return NativeExecutor(program, file, threads=self.threads, kv_dtype=kv_dtype)
            case "reference":
                from segue.runtime.reference import ReferenceExecutor

                return ReferenceExecutor(program, file)
            case _:
                assert_never(self.runtime)

    def _draft_executor(self, target: "ModelFile") -> "Executor | None":
        """The draft model's, if there is one. Its ids must mean what the target's mean."""
        from segue.weights.gguf import load_gguf
        from segue.weights.hub import resolve_model

        config = SpeculativeConfig.of(self.speculative_config)
        if config is None or config.model is None:
            return None
        file = load_gguf(resolve_model(config.model))
        key = "tokenizer.ggml.tokens"
        if list(_strings(file, key)) != list(_strings(target, key)):
            raise ParameterError("speculative_config.model", config.model, "has not the model's vocabulary")
        return self._executor(file)

    def _engine_config(self, executors: Sequence["Executor"], eos_token_ids: frozenset[int]) -> EngineConfig:
        longest = executors[0].max_model_len
        max_num_seqs, max_num_batched_tokens = self._step_limits()
        max_model_len = self.max_model_len or min(longest, DEFAULT_MAX_MODEL_LEN)
        if max_model_len > longest:
            raise ParameterError("max_model_len", max_model_len, f"the model was made for {longest} tokens")
        kv_bytes_per_token = sum(executor.kv_bytes_per_token for executor in executors)
        return EngineConfig(
            max_model_len=max_model_len,
            model_context=longest,
            num_kv_blocks=self.num_kv_blocks
            or self._fit_kv_blocks(max_model_len, kv_bytes_per_token, max_num_seqs),
            block_size=self.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            async_depth=2 if self.async_scheduling else 1,
            scheduling_policy=self.scheduling_policy,
            speculative=SpeculativeConfig.of(self.speculative_config),
            eos_token_ids=eos_token_ids,
            seed=self.seed,
        )

    def _step_limits(self) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens`; what is not given follows what is."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if tokens is None:
            tokens = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seqs or 1)
        return min(DEFAULT_MAX_NUM_SEQS, tokens) if seqs is None else seqs, tokens

    def _fit_kv_blocks(self, max_model_len: int, kv_bytes_per_token: int, max_num_seqs: int) -> int:
        """The rule of `num_kv_blocks`."""
        one_request = -(-max_model_len // self.block_size)
        wanted = one_request * min(KV_SEQUENCES, max_num_seqs)
        block_bytes = kv_bytes_per_token * self.block_size
        free_bytes = free_memory_bytes()
        needed_bytes = one_request * block_bytes
        if needed_bytes > free_bytes:
            raise CapacityError(
                f"one request of max_model_len={max_model_len} needs {needed_bytes / 1e6:,.0f} MB of KV "
                f"cache, {free_bytes / 1e6:,.0f} MB of memory are free: lower max_model_len"
            )
        return max(one_request, min(wanted, int(KV_MEMORY_SHARE * free_bytes) // block_bytes))


_MODEL = 'must be a name such as "smollm2", or the path of a GGUF file'
_FOREIGN_OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "dtype": (("auto",), "the file says what its weights are; kv_cache_dtype is for the KV cache"),
    "quantization": ((None, "gguf"), "the file says how its weights are quantised"),
    "load_format": (("auto", "gguf"), "models are GGUF files"),
    "tokenizer": ((None,), "the model file has the tokenizer"),
    "tokenizer_mode": (("auto",), "the model file has the tokenizer"),
    "skip_tokenizer_init": ((False,), "the tokenizer is always there"),
    "trust_remote_code": ((True, False), "a model file has no code"),
    "revision": ((None,), "a model is a file"),
    "download_dir": ((None,), "SEGUE_HOME says where models are"),
    "tensor_parallel_size": ((1,), "one machine's CPUs compute a model; threads says how many"),
    "pipeline_parallel_size": ((1,), "one machine's CPUs compute a model; threads says how many"),
    "data_parallel_size": ((1,), "one LLM is one engine; make several for more"),
    "distributed_executor_backend": ((None,), "one machine computes a model; see engine_process"),
    "device": (("auto", "cpu"), "models run on the CPU"),
    "gpu_memory_utilization": ((None,), "there is no GPU; num_kv_blocks says how large the KV cache is"),
    "swap_space": ((None, 0), "nothing is swapped; num_kv_blocks says how large the KV cache is"),
    "cpu_offload_gb": ((0,), "all weights are in the CPU's memory"),
    "enforce_eager": ((True, False), "there are no graphs to capture"),
    "enable_chunked_prefill": ((None, True), "long prompts are always computed in chunks"),
    "enable_lora": ((False,), "there are no adapters"),
    "disable_log_stats": ((True, False), "an LLM logs nothing"),
    "task": (("auto", "generate"), "models generate text"),
    "runner": (("auto", "generate"), "models generate text"),
}
"""vLLM's options that Segue has not: the values that ask for nothing, and what Segue does."""


def _check_foreign_option(name: str, value: object) -> None:
    """Raises ParameterError unless the option asks for nothing."""
    if name not in _FOREIGN_OPTIONS:
        known = ", ".join(field for field in EngineArgs.__struct_fields__ if field != "model")
        raise ParameterError(name, value, f"no such option; known are {known}")
    idle, why = _FOREIGN_OPTIONS[name]
    if not any(type(value) is type(each) and value == each for each in idle):
        raise ParameterError(name, value, f"is not for Segue: {why}")


class LoadedModel(msgspec.Struct, frozen=True):
    """An engine, and what the text side needs of its model."""

    engine: "EngineClient"
    tokenizer: "Tokenizer"
    config: EngineConfig
    file: "ModelFile"


def _drafter(config: SpeculativeConfig | None, draft_executor: "Executor | None") -> "Drafter | None":
    if config is None:
        return None
    match config.method:
        case "ngram":
            from segue.speculate.ngram import NgramDrafter

            return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        case "draft_model":
            from segue.speculate.draft_model import DraftModelDrafter

            assert draft_executor is not None, "the config names a model"
            return DraftModelDrafter(draft_executor)
        case _:
            assert_never(config.method)


def _strings(file: "ModelFile", key: str) -> Sequence[object]:
    value = file.metadata.get(key)
    return value if isinstance(value, Sequence) else ()


def free_memory_bytes() -> int:
    """Memory that the process may still take: the machine's, or its control group's if that is less."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
    except OSError:
        return free
    return free if limit.strip() == "max" else min(free, max(0, int(limit) - int(used)))


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ParameterError(name, value, "must be a positive integer below 2^31")


def _is_zero(value: object) -> bool:
    return type(value) is int and value == 0


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ParameterError(name, value, f"unknown; known are {', '.join(known)}")
