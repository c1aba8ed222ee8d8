"""Tensors as f32 matrices: the formats of GGML, bit by bit.

Quantised rows are blocks of 32 consecutive elements, each with scales of its own:

    Q4_0   d f16 | 16 bytes: elements 0-15 in the low nibbles, 16-31 in the high     x = d · (q - 8)
    Q4_1   d f16 | m f16 | 16 bytes, likewise                                        x = d · q + m
    Q8_0   d f16 | 32 of int8                                                        x = d · q
"""

from typing import assert_never

import numpy as np
import numpy.typing as npt

from segue.weights.model_file import Tensor, TensorType

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def dequantize(tensor: Tensor) -> FloatArray:
    """The tensor's values, f32, in its shape. A copy. Every step is exact or rounds once to f32."""
    match tensor.type:
        case TensorType.F32:
            values = tensor.data.view("<f4").astype(np.float32)
        case TensorType.F16:
            values = tensor.data.view("<f2").astype(np.float32)
        case TensorType.BF16:
            values = (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case TensorType.Q4_0:
            blocks = tensor.data.reshape(-1, 18)
            values = _f16(blocks[:, 0:2]) * (_nibbles(blocks[:, 2:]) - np.float32(8))
        case TensorType.Q4_1:
            blocks = tensor.data.reshape(-1, 20)
            values = _f16(blocks[:, 0:2]) * _nibbles(blocks[:, 4:]) + _f16(blocks[:, 2:4])
        case TensorType.Q8_0:
            blocks = tensor.data.reshape(-1, 34)
            values = _f16(blocks[:, 0:2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
        case _:
            assert_never(tensor.type)
    return values.reshape(tensor.shape)


def _f16(pairs: Bytes) -> FloatArray:
    """[blocks, 2] bytes → [blocks, 1] f32."""
    return np.ascontiguousarray(pairs).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> FloatArray:
    """[blocks, 16] bytes → [blocks, 32] numbers 0 to 15."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
