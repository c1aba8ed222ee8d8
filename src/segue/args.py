"""How a user says what to run and how: `EngineArgs`. `segue.host.build` makes an engine of it."""

from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import msgspec

from segue.engine.config import SchedulingPolicy, SpeculativeConfig, check_positive
from segue.errors import ParameterError

KVCacheDtype = Literal["auto", "f16", "f32"]
RuntimeName = Literal["native", "reference"]

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512


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
    """What to run and how; vLLM's names. A bad value raises `ParameterError` here or when the engine is built."""

    model: str
    """An alias such as "smollm2", or the path of a GGUF file."""
    threads: int | None = None
    """How many threads compute, at most one for each CPU. Never changes the answer. None: all CPUs.

    CPUs are those that the process may use; `load` warns of more than that, and takes no more."""
    max_model_len: int | None = None
    """The longest a request may become, prompt and answer, in tokens. None: the model's, at most 8,192."""
    max_num_seqs: int | None = None
    """The most requests in one step. None: 256, or `max_num_batched_tokens` if that is less."""
    max_num_batched_tokens: int | None = None
    """The most tokens in one step. None: 512, or `max_num_seqs` if that is more."""
    block_size: int = 16
    """Tokens in a block of the KV cache."""
    num_kv_blocks: int | None = None
    """Blocks of the KV cache, for all requests. None: what memory allows.

    Room for `min(4, max_num_seqs)` requests of `max_model_len`, but no more than a quarter of the free memory, and no
    less than one such request."""
    enable_prefix_caching: bool = True
    """Compute what prompts share once."""
    async_scheduling: bool = False
    """Plan a step while the one before it runs."""
    speculative_config: SpeculativeConfig | dict[str, object] | None = None
    """How drafts are proposed, such as {"method": "ngram", "num_speculative_tokens": 4}. Never changes the answer.
    None: no drafts."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Who goes first: who came first, or the requests with the lowest `priority`."""
    seed: int = 0
    """For requests that bring none."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """How keys and values are kept; auto: f16, or f32 with the reference runtime."""
    runtime: RuntimeName = "native"
    """What computes; reference: NumPy, f32, slow, to check the native one."""
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
                check_positive(name, getattr(self, name))
        check_positive("block_size", self.block_size)
        for name in ("enable_prefix_caching", "async_scheduling", "engine_process"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "must be True or False")
        _check_one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        _check_one_of("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _check_one_of("runtime", self.runtime, get_args(RuntimeName))
        is_zero = type(self.max_engine_restarts) is int and self.max_engine_restarts == 0
        if self.max_engine_restarts is not None and not is_zero:
            check_positive("max_engine_restarts", self.max_engine_restarts)
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

    def step_limits(self) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens`; what is not given follows what is."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if tokens is None:
            tokens = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seqs or 1)
        return min(DEFAULT_MAX_NUM_SEQS, tokens) if seqs is None else seqs, tokens


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


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ParameterError(name, value, f"unknown; known are {', '.join(known)}")
