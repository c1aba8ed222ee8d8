"""Dequantisation against the `gguf` package's."""

import gguf
import numpy as np
import pytest

from segue.weights.dequantize import dequantize
from segue.weights.model_file import Tensor, TensorType


@pytest.mark.parametrize("kind", TensorType)
def test_equals_ggufs(kind: TensorType) -> None:
    values = np.random.default_rng(kind).standard_normal((6, 96), np.float32)
    values[1] *= 1e-3
    theirs = gguf.GGMLQuantizationType(kind.value)
    stored = gguf.quants.quantize(values, theirs)
    tensor = Tensor("w", values.shape, kind, stored.reshape(-1).view(np.uint8))
    result = dequantize(tensor)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, gguf.quants.dequantize(stored, theirs).astype(np.float32))
    assert not np.shares_memory(result, stored)


def test_blocks_by_hand() -> None:
    half = np.frombuffer(np.array([0.5, -2.0], "<f2").tobytes(), np.uint8)
    nibbles = np.array([0xF0, 0x21, *[0x88] * 14], np.uint8)
    q4_0 = dequantize(Tensor("w", (1, 32), TensorType.Q4_0, np.concatenate([half[:2], nibbles])))[0]
    assert q4_0[[0, 1, 16, 17, 31]].tolist() == [-4.0, -3.5, 3.5, -3.0, 0.0]
    q4_1 = dequantize(Tensor("w", (1, 32), TensorType.Q4_1, np.concatenate([half, nibbles])))[0]
    assert q4_1[[0, 1, 16, 17, 31]].tolist() == [-2.0, -1.5, 5.5, -1.0, 2.0]
    signed = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    q8_0 = dequantize(Tensor("w", (1, 32), TensorType.Q8_0, np.concatenate([half[:2], signed])))[0]
    assert q8_0[[0, 31]].tolist() == [-8.0, 7.5]
