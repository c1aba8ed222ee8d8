"""An engine of `EngineArgs`, with what the text side needs of its model.

model name ──resolve──▶ file ──▶ ModelFile ──▶ Program ──▶ Executor ──▶ Engine
                                    └────────▶ Tokenizer ──────────┘ (ids that end an answer)

What is not needed is not imported: the parts of an engine whose own process has them, a runtime that is not asked for.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, assert_never

import msgspec

from segue.args import EngineArgs
from segue.engine.config import EngineConfig, SpeculativeConfig
from segue.errors import CapacityError, ParameterError
from segue.host.client import EngineClient
from segue.weights.model_file import ModelFile

if TYPE_CHECKING:
    from segue.contract.step import Executor
    from segue.speculate.drafter import Drafter
    from segue.tokens import Tokenizer

DEFAULT_MAX_MODEL_LEN = 8192
KV_SEQUENCES = 4
"""By default the KV cache holds this many sequences of full length."""
KV_MEMORY_SHARE = 0.25
"""... but takes no more than this share of the memory that is free."""


class LoadedModel(msgspec.Struct, frozen=True):
    """An engine, and what the text side needs of its model."""

    engine: EngineClient
    tokenizer: "Tokenizer"
    config: EngineConfig
    file: ModelFile


def load(args: EngineArgs) -> LoadedModel:
    """The model's engine, in this process or in its own, and its text side.

    Raises ModelFileError, ParameterError, CapacityError, and EngineDead when its process ends.
    """
    args = _within_cpus(args)
    if not args.engine_process:
        return build(args)
    from segue.host.process import EngineProcess
    from segue.tokens import Tokenizer
    from segue.weights.gguf import load_gguf

    # A child that is started again must not resolve a name or a link anew: it may lead elsewhere by then.
    args = _with_files(args)
    file = load_gguf(Path(args.model))
    tokenizer = Tokenizer.from_model(file)
    engine = EngineProcess(args, max_restarts=args.max_engine_restarts)
    return LoadedModel(engine, tokenizer, engine.config, file)


def build(args: EngineArgs) -> LoadedModel:
    """The model's engine in this process. Raises ModelFileError, ParameterError, CapacityError."""
    from segue.engine.engine import Engine
    from segue.runtime.runtime import LocalRuntime
    from segue.sample.guide import GrammarGuides
    from segue.tokens import Tokenizer
    from segue.weights.gguf import load_gguf
    from segue.weights.hub import resolve_model

    file = load_gguf(resolve_model(args.model))
    tokenizer = Tokenizer.from_model(file)
    executor = _executor(args, file)
    draft_executor = _draft_executor(args, file)
    executors = [executor] if draft_executor is None else [executor, draft_executor]
    config = _engine_config(args, executors, tokenizer.eos_token_ids)
    for each in executors:
        each.allocate_kv(config.num_kv_blocks, config.block_size)
    drafter = _drafter(config.speculative, draft_executor)
    runtime = LocalRuntime(
        executor, drafter=drafter, guides=GrammarGuides(tokenizer), has_worker=config.async_depth > 1
    )
    engine = Engine(runtime, config)
    return LoadedModel(engine, tokenizer, config, file)


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


def _within_cpus(args: EngineArgs) -> EngineArgs:
    """The same with no more threads than CPUs: more would only wait for each other."""
    from segue.runtime.native import available_cpus

    cpus = available_cpus()
    if args.runtime != "native" or args.threads is None or args.threads <= cpus:
        return args
    warnings.warn(
        f"threads={args.threads}: this process may use {cpus} CPU{'s' * (cpus > 1)}, so threads={cpus}",
        stacklevel=4,  # where the LLM is made
    )
    return msgspec.structs.replace(args, threads=cpus)


def _with_files(args: EngineArgs) -> EngineArgs:
    """The same with the files that the models' names lead to now. Raises ModelFileError."""
    from segue.weights.gguf import pinned
    from segue.weights.hub import resolve_model

    def file_of(name: str) -> str:
        return str(pinned(resolve_model(name)))

    speculative = SpeculativeConfig.of(args.speculative_config)
    if speculative is not None and speculative.model is not None:
        speculative = msgspec.structs.replace(speculative, model=file_of(speculative.model))
    return msgspec.structs.replace(args, model=file_of(args.model), speculative_config=speculative)


def _executor(args: EngineArgs, file: ModelFile) -> "Executor":
    from segue.models import build_program

    program = build_program(file, args.max_model_len or DEFAULT_MAX_MODEL_LEN)
    match args.runtime:
        case "native":
            from segue.runtime.native import NativeExecutor

            kv_dtype: Literal["f16", "f32"] = "f32" if args.kv_cache_dtype == "f32" else "f16"
            return NativeExecutor(program, file, threads=args.threads, kv_dtype=kv_dtype)
        case "reference":
            from segue.runtime.reference import ReferenceExecutor

            return ReferenceExecutor(program, file)
        case _:
            assert_never(args.runtime)


def _draft_executor(args: EngineArgs, target: ModelFile) -> "Executor | None":
    """The draft model's, if there is one. Its ids must mean what the target's mean."""
    from segue.weights.gguf import load_gguf
    from segue.weights.hub import resolve_model

    config = SpeculativeConfig.of(args.speculative_config)
    if config is None or config.model is None:
        return None
    file = load_gguf(resolve_model(config.model))
    key = "tokenizer.ggml.tokens"
    if list(_strings(file, key)) != list(_strings(target, key)):
        raise ParameterError("speculative_config.model", config.model, "has not the model's vocabulary")
    return _executor(args, file)


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


def _engine_config(
    args: EngineArgs, executors: Sequence["Executor"], eos_token_ids: frozenset[int]
) -> EngineConfig:
    longest = executors[0].max_model_len
    max_num_seqs, max_num_batched_tokens = args.step_limits()
    max_model_len = args.max_model_len or min(longest, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > longest:
        raise ParameterError("max_model_len", max_model_len, f"the model was made for {longest} tokens")
    kv_bytes_per_token = sum(executor.kv_bytes_per_token for executor in executors)
    return EngineConfig(
        max_model_len=max_model_len,
        model_context=longest,
        num_kv_blocks=args.num_kv_blocks
        or _fit_kv_blocks(args.block_size, max_model_len, kv_bytes_per_token, max_num_seqs),
        block_size=args.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=args.enable_prefix_caching,
        async_depth=2 if args.async_scheduling else 1,
        scheduling_policy=args.scheduling_policy,
        speculative=SpeculativeConfig.of(args.speculative_config),
        eos_token_ids=eos_token_ids,
        seed=args.seed,
    )


def _fit_kv_blocks(block_size: int, max_model_len: int, kv_bytes_per_token: int, max_num_seqs: int) -> int:
    """The rule of `num_kv_blocks`."""
    one_request = -(-max_model_len // block_size)
    wanted = one_request * min(KV_SEQUENCES, max_num_seqs)
    block_bytes = kv_bytes_per_token * block_size
    free_bytes = free_memory_bytes()
    needed_bytes = one_request * block_bytes
    if needed_bytes > free_bytes:
        raise CapacityError(
            f"one request of max_model_len={max_model_len} needs {needed_bytes / 1e6:,.0f} MB of KV "
            f"cache, {free_bytes / 1e6:,.0f} MB of memory are free: lower max_model_len"
        )
    return max(one_request, min(wanted, int(KV_MEMORY_SHARE * free_bytes) // block_bytes))


def _strings(file: ModelFile, key: str) -> Sequence[object]:
    value = file.metadata.get(key)
    return value if isinstance(value, Sequence) else ()
