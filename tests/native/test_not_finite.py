"""A NaN or an infinity in a file is the error of what touches it, on every kernel class, and of nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from segue.contract.step import NOT_FINITE, Executor, ForwardResult, Sampling, SeqStep
from segue.models import build_program
from segue.models.program import Program
from segue.runtime.reference import ReferenceExecutor
from segue.weights.dequantize import FORMATS
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile, TensorType
from tests.models.programs import rope_of, with_rope
from tests.native.models import EXPERTS, FLOAT_TYPES, QUANTISED_TYPES, Loaded, make_executor
from tests.weights.make_gguf import SCALES, tiny_llama

KINDS = tuple(kind for kind in QUANTISED_TYPES + FLOAT_TYPES if kind != "MXFP4")
"""Without the type that has no NaN."""
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
SEQUENCES = ([1, 2, 3], [9, 7, 5, 4], [30, 31])
DRAWN = (Sampling(num_logprobs=5), Sampling(temperature=0.9, seed=3, num_logprobs=2), None)


def bits_of(type_: TensorType, value: float) -> bytes:
    if type_ is TensorType.F32:
        return np.float32(value).tobytes()
    if type_ is TensorType.BF16:
        return (np.float32(value).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return np.float16(value).tobytes()


def spoilt(model: ModelFile, name: str, row: int, value: float) -> ModelFile:
    """A copy of the model with `value` in one float of the tensor's row: an element, or a block's scale or minimum."""
    tensor = model.tensors[name]
    block_bytes = FORMATS[tensor.type].block_bytes
    offsets = SCALES.get(tensor.type, (0,))
    data = tensor.data.copy()
    rows = tensor.shape[0] if len(tensor.shape) == 2 else 1
    row_bytes = len(data) // rows
    bits = np.frombuffer(bits_of(tensor.type, value), np.uint8)
    block = row % (row_bytes // block_bytes)
    at = row * row_bytes + block * block_bytes + offsets[row % len(offsets)]
    data[at : at + len(bits)] = bits
    return replace(model, tensors={**model.tensors, name: replace(tensor, data=data)})


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """Models whose embedding is not their output matrix as well."""
    folder = tmp_path_factory.mktemp("untied")
    loaded = {}
    for kind in KINDS:
        wide = FORMATS[TensorType[kind]].block_elements == 256
        model = load_gguf(
            tiny_llama(
                folder / f"{kind}.gguf",
                tensor_type=kind,
                tied=False,
                layers=2,
                rope_freqs=True,
                hidden=256 if wide else 64,
                ffn=256 if wide else 96,
            )
        )
        loaded[kind] = (build_program(model), model)
    return loaded


def forward(executor: Executor, wanted: tuple[int, ...] = (0, 1, 2)) -> ForwardResult:
    executor.allocate_kv(8, 16)
    return executor.forward(
        [
            SeqStep(
                start=0,
                tokens=SEQUENCES[i],
                blocks=[i],
                sampling=DRAWN[i],
                prompt_targets=SEQUENCES[i] if i == 2 else (),
                num_prompt_logprobs=3,
            )
            for i in wanted
        ]
    )


def native_executors(loaded: Loaded, isas: list[str]) -> Iterator[tuple[str, Executor]]:
    kv_dtypes: tuple[Literal["f16", "f32"], ...] = ("f16", "f32")
    for isa in isas:
        for kv_dtype in kv_dtypes:
            yield f"{isa}, {kv_dtype}", make_executor(loaded, isa=isa, threads=2, kv_dtype=kv_dtype)


def all_executors(loaded: Loaded, isas: list[str]) -> Iterator[tuple[str, Executor]]:
    yield "reference", ReferenceExecutor(*loaded)
    yield from native_executors(loaded, isas)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", BAD)
def test_router(models: dict[str, Loaded], isas: list[str], bad: str) -> None:
    """Of an expert that may not be among those with the largest scores."""
    program, model = models[EXPERTS]
    for row in range(5):
        loaded = program, spoilt(model, "blk.1.ffn_gate_inp.weight", row, BAD[bad])
        for name, executor in all_executors(loaded, isas):
            assert set(forward(executor).errors) == {0, 1, 2}, (name, row)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor(untied: dict[str, Loaded], isas: list[str], kind: str, bad: str) -> None:
    """What all sequences compute with spoils all of them."""
    program, model = untied[kind]
    for n, (name, tensor) in enumerate(sorted(model.tensors.items())):
        if name == "token_embd.weight":
            continue
        if name == "rope_freqs.weight":  # an infinite factor only means that a pair is not rotated
            continue
        row = (n * 13 + 5) % tensor.shape[0] if len(tensor.shape) == 2 else 0
        loaded = (program, spoilt(model, name, row, BAD[bad]))
        for label, executor in all_executors(loaded, isas if n % 4 == 0 else isas[-1:]):
            result = forward(executor)
            assert result.errors == dict.fromkeys(range(3), NOT_FINITE), (name, label)
            assert (result.tokens, result.logprobs, result.prompt_logprobs) == ([], {}, {})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_an_id_that_one_sequence_has(untied: dict[str, Loaded], isas: list[str], kind: str, bad: str) -> None:
    """A row of the embedding spoils the sequence with that id; the others have the bits that they have alone."""
    program, model = untied[kind]
    loaded = (program, spoilt(model, "token_embd.weight", 7, BAD[bad]))
    for (label, executor), (_, clean) in zip(
        all_executors(loaded, isas), all_executors((program, model), isas), strict=True
    ):
        result = forward(executor)
        assert result.errors == {1: NOT_FINITE}, label
        alone = forward(clean, (0, 2))
        assert result.tokens == alone.tokens, label
        assert result.logprobs == alone.logprobs, label
        assert result.prompt_logprobs == {2: alone.prompt_logprobs[1]}, label
        # Its KV is full of NaN. Whoever gets the blocks next never sees that.
        again = SeqStep(start=0, tokens=SEQUENCES[0], blocks=[1], sampling=DRAWN[0])
        assert executor.forward([again]).logprobs == {0: alone.logprobs[0]}, label


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_error_outlives_the_step(untied: dict[str, Loaded], isas: list[str]) -> None:
    """A chunk of a prompt that nothing is drawn from says nothing; what is drawn after it does."""
    program, model = untied["Q4_0"]
    loaded = (program, spoilt(model, "token_embd.weight", 7, np.nan))
    for label, executor in all_executors(loaded, isas):
        executor.allocate_kv(1, 16)
        assert executor.forward([SeqStep(start=0, tokens=[1, 7, 2], blocks=[0])]).errors == {}
        later = SeqStep(start=3, tokens=[5, 6], blocks=[0], sampling=Sampling())
        assert executor.forward([later]).errors == {0: NOT_FINITE}, label


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rotation(untied: dict[str, Loaded], isas: list[str]) -> None:
    program, model = untied["Q4_0"]
    factors = (np.nan, *rope_of(program).factors[1:])
    for label, executor in all_executors((with_rope(program, factors=factors), model), isas):
        assert forward(executor).errors == dict.fromkeys(range(3), NOT_FINITE), label


def scaled(model: ModelFile, scale: dict[str, float]) -> ModelFile:
    """A copy of an F32 model with some tensors multiplied."""
    tensors = dict(model.tensors)
    for name, factor in scale.items():
        values: npt.NDArray[np.float32] = tensors[name].data.view(np.float32) * np.float32(factor)
        tensors[name] = replace(tensors[name], data=values.view(np.uint8))
    return replace(model, tensors=tensors)


def scaled_row(model: ModelFile, name: str, row: int, factor: float) -> ModelFile:
    """A copy of an F32 model with one row of a matrix multiplied."""
    tensor = model.tensors[name]
    values = tensor.data.copy().view(np.float32).reshape(tensor.shape)
    values[row] *= np.float32(factor)
    data = values.reshape(-1).view(np.uint8)
    return replace(model, tensors={**model.tensors, name: replace(tensor, data=data)})


def test_keys_beyond_f16(untied: dict[str, Loaded], isas: list[str]) -> None:
    """A key that f16 cannot hold is an error. Stored as an infinity, it would score -inf: a key that nobody sees.

    One element of the last layer's keys is large and is not rotated; its queries are as much smaller.
    """
    program, model = untied["F32"]
    large = scaled_row(model, "blk.1.attn_k.weight", 0, 2.0**16)
    for row in (0, program.attentions[-1].head_dim):  # of the two query heads that share the KV head
        large = scaled_row(large, "blk.1.attn_q.weight", row, 2.0**-16)
    loaded = (with_rope(program, factors=(1e30, *rope_of(program).factors[1:])), large)
    (_, reference), *executors = all_executors(loaded, isas)
    num_errors = []
    for seed in range(30):
        tokens = np.random.default_rng(seed).integers(0, 300, 3).tolist()
        step = SeqStep(start=0, tokens=tokens, blocks=[0], sampling=Sampling(num_logprobs=1))
        reference.allocate_kv(1, 16)
        expected = reference.forward([step]).logprobs[0].logprob
        for label, executor in executors:
            executor.allocate_kv(1, 16)
            result = executor.forward([step])
            if result.errors:
                assert (result.errors, label[-3:]) == ({0: NOT_FINITE}, "f16")
            else:
                assert result.logprobs[0].logprob == pytest.approx(expected, abs=0.01), (label, seed)
            num_errors.append(len(result.errors))
    assert 0 < sum(num_errors) < len(num_errors) / 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_squares_that_overflow(untied: dict[str, Loaded], isas: list[str]) -> None:
    """Activations of 1e20 are finite; the mean of their squares is not, and a norm of zero would look like a result."""
    program, model = untied["F32"]
    loaded = (program, scaled(model, {"token_embd.weight": 1e22}))
    for label, executor in all_executors(loaded, isas):
        assert forward(executor).errors == dict.fromkeys(range(3), NOT_FINITE), label


@pytest.mark.parametrize("scale", [1e-30, 1e-37, 1e-38, 1e-44, 0.0])
def test_tiny_activations(untied: dict[str, Loaded], isas: list[str], scale: float) -> None:
    """Down to nothing: finite, and the same whatever shares the step."""
    program, model = untied["Q8_0"]
    norms = {name: scale for name in model.tensors if name.endswith("norm.weight")}
    loaded: tuple[Program, ModelFile] = (program, scaled(model, norms))
    for label, executor in native_executors(loaded, isas):
        together = forward(executor)
        assert together.errors == {}, label
        assert together.tokens[0] == forward(executor, (0,)).tokens[0], label


def test_one_place_at_a_time_in_a_quantised_row(tmp_path: Path, isas: list[str]) -> None:
    """Whichever lane of a vector of activations is bad, the group's scale says so."""
    model = load_gguf(tiny_llama(tmp_path / "m.gguf", tensor_type="Q8_0", hidden=64, heads=2, kv_heads=2))
    norm = model.tensors["output_norm.weight"]
    program = build_program(model)
    for isa in isas:
        for place in range(64):
            weights = norm.data.view(np.float32).copy()
            weights[place] = (np.nan, np.inf, -np.inf)[place % 3]
            tensors = {**model.tensors, norm.name: replace(norm, data=weights.view(np.uint8))}
            executor = make_executor((program, replace(model, tensors=tensors)), isa=isa)
            executor.allocate_kv(1, 16)
            step = SeqStep(start=0, tokens=[1, 2], blocks=[0], sampling=Sampling())
            assert executor.forward([step]).errors == {0: NOT_FINITE}, (isa, place)
