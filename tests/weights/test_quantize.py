"""Quantisation against the `gguf` package's, bit by bit, and where it ends."""

import gguf
import numpy as np
import pytest

from segue.weights.dequantize import FloatArray, dequantize
from segue.weights.model_file import Tensor, TensorType
from segue.weights.quantize import QUANTISERS, quantize

LEVELS = {
    TensorType.Q8_0: 254, TensorType.Q5_1: 31, TensorType.Q5_0: 31, TensorType.Q4_1: 15, TensorType.Q4_0: 15
}  # fmt: skip


def rows() -> FloatArray:
    """Rows of several sizes; halves and ties, constants, zeros, one large value, the smallest of f16."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 96), np.float32) * np.float32(10) ** rng.integers(-3, 4, (400, 1))
    x[::7] = np.round(x[::7] * 2) / 2
    x[5], x[6], x[7, 40:] = 0, -1.5, 0
    x[8, 3] = -6e4
    x[9] = rng.choice(np.array([-1, 1], np.float32), 96)
    x[10] *= np.float32(2**-24)
    return x.astype(np.float32)


@pytest.mark.parametrize("kind", QUANTISERS)
def test_equals_ggufs(kind: TensorType) -> None:
    x = rows()
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType(kind.value))
    np.testing.assert_array_equal(quantize(x, kind), theirs)


@pytest.mark.parametrize("kind", QUANTISERS)
def test_an_error_is_a_step_at_most(kind: TensorType) -> None:
    """Half a step where the scale is exact; the level that is missing above zero is a whole one away."""
    x = np.random.default_rng(1).uniform(-1, 1, (64, 256)).astype(np.float32)
    back = dequantize(Tensor("w", x.shape, kind, quantize(x, kind).reshape(-1)))
    assert np.abs(back - x).max() < 2.2 / LEVELS[kind] * (1 if kind.name.endswith("_0") else 0.55) * (
        1 + 1e-3
    )


@pytest.mark.parametrize("kind", QUANTISERS)
@pytest.mark.parametrize("value", [1e-45, -1e-45, 1e-38, -1e-38])
def test_what_is_too_small_is_zero(kind: TensorType, value: float) -> None:
    x = np.full((1, 32), value, np.float32)
    x[0, :7] = 0
    assert dequantize(Tensor("w", x.shape, kind, quantize(x, kind).reshape(-1))).tolist() == [[0.0] * 32]


@pytest.mark.parametrize("kind", QUANTISERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_what_does_not_fit_is_an_error(kind: TensorType, value: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 40] = value
    with pytest.raises(OverflowError, match=r"a value is (not finite|too large)"):
        quantize(x, kind)


@pytest.mark.parametrize("kind", [TensorType.Q4_1, TensorType.Q5_1])
def test_a_minimum_that_does_not_fit_is_an_error(kind: TensorType) -> None:
    with pytest.raises(OverflowError, match="a value is too large"):
        quantize(np.full((1, 32), -1e5, np.float32), kind)
