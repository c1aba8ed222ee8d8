"""The native runtime beside the reference, and its instruction sets beside each other.

Float weights with f32 KV differ by rounding only. Integer weights also have their inputs quantised, 8 bits to a
group of 32: a rounding that falls the other way changes a result by 1/254 of its group's largest element, so
instruction sets agree about as well as they agree with the reference.
"""

import numpy as np
import numpy.typing as npt
import pytest

from segue.contract.step import Sampling, SeqStep
from segue.models.program import Embed, Linear, Logits, Program, RMSNorm
from segue.runtime.native import NativeExecutor
from segue.runtime.reference import ReferenceExecutor
from segue.weights.dequantize import FORMATS, dequantize
from segue.weights.model_file import ModelFile, Tensor, TensorType
from tests.models.programs import with_rope
from tests.native.models import (
    EVERY_OPERATION,
    EXPERTS,
    FLOAT_TYPES,
    QUANTISED_TYPES,
    UNEQUAL_LAYERS,
    Loaded,
    forced_isa,
    make_executor,
)
from tests.weights.make_gguf import random_blocks

FLOAT_BOUND = 2e-5
"""Of the largest logit."""
QUANTISED_BOUND = 0.03
"""Root mean square, of the logits' own. Measured: 0.004 to 0.012."""

IDS = np.random.default_rng(1).integers(0, 300, 80).tolist()

FloatArray = npt.NDArray[np.float32]


def relative_rms(got: FloatArray, expected: FloatArray) -> float:
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_float_weights(kind: str, interleaved: bool, models: dict[str, Loaded], isas: list[str]) -> None:
    program, model = models[kind]
    program = with_rope(program, interleaved=interleaved)
    expected = ReferenceExecutor(program, model).logits(IDS)
    for isa in isas:
        got = make_executor((program, model), isa=isa, kv_dtype="f32").logits(IDS)
        assert np.abs(got - expected).max() < FLOAT_BOUND * np.abs(expected).max(), isa


def test_layers_that_differ(models: dict[str, Loaded], isas: list[str]) -> None:
    """In their heads and their RoPE; also in blocks that were copied."""
    loaded = models[UNEQUAL_LAYERS]
    reference = ReferenceExecutor(*loaded)
    start = SeqStep(start=0, tokens=IDS[:10], blocks=[2, 0])
    rest = SeqStep(
        start=10, tokens=IDS[10:40], blocks=[2, 1, 3, 4, 5], sampling=Sampling(num_logprobs=2),
        prompt_targets=IDS[11:41],
    )  # fmt: skip
    for isa in isas:
        native = make_executor(loaded, isa=isa, threads=3, kv_dtype="f32")
        assert native.kv_bytes_per_token == 4 * (2 * (10 + 16) + 1 * (20 + 32))  # v padded to 16
        results = []
        for executor in (native, reference):
            executor.allocate_kv(6, 8)
            executor.forward([start])
            results.append(executor.forward([rest], [(0, 1)]))
        got, expected = results
        assert got.tokens == expected.tokens
        for a, b in zip(got.prompt_logprobs[0], expected.prompt_logprobs[0], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4), isa


def test_every_operation(models: dict[str, Loaded], isas: list[str]) -> None:
    """With windows that begin in the middle of a tile of keys, and in a later range of them than the first."""
    loaded = models[EVERY_OPERATION]
    ids = np.random.default_rng(2).integers(0, 300, 700).tolist()
    expected = ReferenceExecutor(*loaded).logits(ids)
    for isa in isas:
        got = make_executor(loaded, isa=isa, threads=2, kv_dtype="f32").logits(ids)
        assert np.abs(got - expected).max() < FLOAT_BOUND * np.abs(expected).max(), isa


def test_partly_rotated_heads(models: dict[str, Loaded], isas: list[str]) -> None:
    program, model = models["F32"]
    program = with_rope(program, dim=6, factors=(1.0, 2.0, 4.0))
    expected = ReferenceExecutor(program, model).logits(IDS)
    for isa in isas:
        got = make_executor((program, model), isa=isa, kv_dtype="f32").logits(IDS)
        assert np.abs(got - expected).max() < FLOAT_BOUND * np.abs(expected).max(), isa


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
def test_quantised_weights(kind: str, models: dict[str, Loaded], isas: list[str]) -> None:
    expected = ReferenceExecutor(*models[kind]).logits(IDS)
    for isa in isas:
        got = make_executor(models[kind], isa=isa).logits(IDS)
        assert relative_rms(got, expected) < QUANTISED_BOUND, isa


def test_quantised_experts(models: dict[str, Loaded], isas: list[str]) -> None:
    """Where two scores are nearly equal, a rounding may choose the other expert: of the 80 rows, one is such a row."""
    expected = ReferenceExecutor(*models[EXPERTS]).logits(IDS)
    for isa in isas:
        got = make_executor(models[EXPERTS], isa=isa).logits(IDS)
        errors = [relative_rms(*rows) for rows in zip(got, expected, strict=True)]
        assert np.quantile(errors, 0.9) < QUANTISED_BOUND, isa


@pytest.mark.parametrize(("isa", "other"), [("avx512_amx", "avx512"), ("avx2_vnni", "avx2")])
def test_integer_instructions_give_the_same_bits(
    isa: str, other: str, models: dict[str, Loaded], isas: list[str]
) -> None:
    """Where only the exact integer sums are computed with other instructions."""
    if isa not in isas:
        pytest.skip(f"this CPU has no {isa}")
    for kind in QUANTISED_TYPES:
        got = make_executor(models[kind], isa=isa).logits(IDS)
        assert np.array_equal(got, make_executor(models[kind], isa=other).logits(IDS)), kind


def exact_inputs(rows: int, width: int, rng: np.random.Generator) -> FloatArray:
    """Integers whose groups of 32 have a largest magnitude of 127: quantising them loses nothing."""
    x = rng.integers(-127, 128, (rows, width)).astype(np.float32)
    x[:, ::32] = 127
    return x


def as_tensor(name: str, values: FloatArray) -> Tensor:
    return Tensor(name, values.shape, TensorType.F32, values.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
@pytest.mark.parametrize(("outputs", "blocks"), [(16, 1), (33, 2), (48, 50), (5, 3)])
def test_packed_integer_weights_lose_nothing(kind: str, outputs: int, blocks: int, isas: list[str]) -> None:
    """embedding → one linear layer → norm → identity, with inputs that quantise exactly and any codes."""
    stored = TensorType[kind]
    inputs = FORMATS[stored].block_elements * min(blocks, 1600 // FORMATS[stored].block_elements)
    rng = np.random.default_rng(inputs + outputs)
    x = exact_inputs(70, inputs, rng)
    weight = Tensor("w", (outputs, inputs), stored, random_blocks(stored, outputs, inputs, rng).reshape(-1))
    tensors = [
        as_tensor("embed", x),
        weight,
        as_tensor("norm", np.ones(outputs, np.float32)),
        as_tensor(
            "output", np.concatenate([np.eye(outputs), np.zeros((70 - outputs, outputs))]).astype(np.float32)
        ),
    ]
    program = Program(
        ops=(
            Embed("embed", "x"),
            Linear("x", ("w",), "y"),
            RMSNorm("y", "norm", "normed", 1e-6),
            Logits("normed", "output"),
        ),
        widths={"x": inputs, "y": outputs, "normed": outputs},
        vocab_size=70,
        max_model_len=128,
    )
    model = ModelFile("", 0, "test", {}, {tensor.name: tensor for tensor in tensors})
    product = x.astype(np.float64) @ dequantize(weight).astype(np.float64).T
    expected = product / np.sqrt(np.mean(product**2, axis=1, keepdims=True) + 1e-6)
    for isa in isas:
        with forced_isa(isa):
            executor = NativeExecutor(program, model, threads=1)
        for rows in (1, 5, 70):
            got = executor.logits(list(range(rows)))[:, :outputs]
            np.testing.assert_allclose(got, expected[:rows], rtol=0, atol=1e-4, err_msg=isa)
