"""Tiny models of every kind, and executors for them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from segue.errors import ParameterError
from segue.models import build_program
from segue.models.program import Program, Rope
from segue.runtime.native import ISA_VARIABLE, NativeExecutor
from segue.weights.dequantize import FORMATS, dequantize
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile, TensorType
from tests.weights.make_gguf import quantised, tiny_llama

FAMILIES = Path(__file__).parent.parent / "golden" / "families"

ISAS = ("avx512_amx", "avx512", "avx2_vnni", "avx2", "portable")
FLOAT_TYPES = ("F32", "F16", "BF16")
QUANTISED_TYPES = tuple(kind.name for kind in TensorType if kind.name not in FLOAT_TYPES)
UNEQUAL_LAYERS = "F32, layers that differ in their heads"
EVERY_OPERATION = "F32, every operation"
EXPERTS = "Q8_0, experts"

Loaded = tuple[Program, ModelFile]


def load(path: Path) -> Loaded:
    model = load_gguf(path)
    return build_program(model), model


def make_model(path: Path, kind: str) -> Loaded:
    """A model of tensor type `kind`. Widths leave tails everywhere the type allows it."""
    if kind in FLOAT_TYPES:
        return load(
            tiny_llama(
                path, tensor_type=kind, hidden=60, heads=6, kv_heads=2, head_dim=10, ffn=70, context=2048
            )
        )
    block = FORMATS[TensorType[kind]].block_elements
    return load(
        tiny_llama(
            path,
            tensor_type=kind,
            hidden=96 if block == 32 else 256,
            heads=6 if block == 32 else 8,
            kv_heads=2,
            head_dim=32,
            ffn=160 if block == 32 else 512,
            vocab=331,
            context=2048,
            rope_freqs=True,
        )
    )


def with_unequal_layers(loaded: Loaded) -> Loaded:
    """`make_model`'s of floats, where the second layer has half the heads, twice as large, and another RoPE."""
    program, model = loaded
    first, second = program.attentions
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == (6, 2, 10)
    rope = Rope(theta=1e6, dim=16, interleaved=False)
    other = replace(second, num_heads=3, num_kv_heads=1, head_dim=20, rope=rope)
    return replace(program, ops=tuple(other if op is second else op for op in program.ops)), model


def quantised_experts() -> Loaded:
    """The golden Mixtral with its matrices in Q8_0, but for the routers."""
    program, model = load(FAMILIES / "mixtral.gguf")
    tensors = {
        name: tensor
        if len(tensor.shape) == 1 or "gate_inp" in name
        else replace(
            tensor, type=TensorType.Q8_0, data=quantised(dequantize(tensor), TensorType.Q8_0).reshape(-1)
        )
        for name, tensor in model.tensors.items()
    }
    return program, replace(model, tensors=tensors)


@contextmanager
def forced_isa(isa: str | None) -> Iterator[None]:
    """`isa` as a user would force it; None: what the CPU has."""
    before = os.environ.pop(ISA_VARIABLE, None)
    if isa is not None:
        os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        os.environ.pop(ISA_VARIABLE, None)
        if before is not None:
            os.environ[ISA_VARIABLE] = before


def make_executor(
    loaded: Loaded,
    *,
    isa: str | None = None,
    threads: int = 1,
    kv_dtype: Literal["f16", "f32"] = "f16",
) -> NativeExecutor:
    with forced_isa(isa):
        return NativeExecutor(*loaded, threads=threads, kv_dtype=kv_dtype)


def has_isa(loaded: Loaded, isa: str) -> bool:
    try:
        make_executor(loaded, isa=isa)
    except ParameterError:
        return False
    return True
