"""f32 values as blocks of 32, rounded as GGML's reference code rounds them; `dequantize.py` says what they mean.

    Q8_0             d = max|x| / 127                 q = x / d, half away from zero
    Q4_0, Q5_0       d = the largest x / -8, / -16    q = x / d + 8, + 16, half up, 15 or 31 at most
    Q4_1, Q5_1       d = (max - min) / 15, / 31       q = (x - min) / d, half up, 15 or 31 at most

The largest x is the first of those of largest size; its divisor is negative because there is one more level below
zero than above. All is computed in f32, with 1 / d, and d and min are rounded to f16 last.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from segue.weights.dequantize import FORMATS, Bytes, FloatArray
from segue.weights.model_file import TensorType

_SMALLEST: Final = np.finfo(np.float32).tiny
"""A smaller d has no reciprocal in f32, and is 0 in f16: its block becomes zeros."""


def quantize(values: FloatArray, kind: TensorType) -> Bytes:
    """Rows `values` [..., elements] of whole blocks as the bytes [..., bytes] of a type in QUANTISERS.

    Raises OverflowError when a value is not finite, or so large that its scale does not fit f16.
    """
    layout = FORMATS[kind]
    if not np.isfinite(values).all():
        raise OverflowError("a value is not finite")
    with np.errstate(over="ignore"):  # seen where it is stored
        blocks = QUANTISERS[kind](values.reshape(-1, layout.block_elements))
    return blocks.reshape(*values.shape[:-1], -1)


def _q8_0(x: FloatArray) -> Bytes:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    size = np.abs(scaled)
    whole = np.floor(size)
    q = np.copysign(whole + (size - whole >= 0.5), scaled)
    return np.concatenate([_f16(d), q.astype(np.int8).view(np.uint8)], axis=1)


def _q4_0(x: FloatArray) -> Bytes:
    d = _largest(x) / np.float32(-8)
    return np.concatenate([_f16(d), _nibbles(_levels(x * _inverse(d) + np.float32(8.5), 15))], axis=1)


def _q5_0(x: FloatArray) -> Bytes:
    d = _largest(x) / np.float32(-16)
    q = _levels(x * _inverse(d) + np.float32(16.5), 31)
    return np.concatenate([_f16(d), _fifth_bits(q), _nibbles(q)], axis=1)


def _q4_1(x: FloatArray) -> Bytes:
    d, low = _range(x, 15)
    q = _levels((x - low) * _inverse(d) + np.float32(0.5), 15)
    return np.concatenate([_f16(d), _f16(low), _nibbles(q)], axis=1)


def _q5_1(x: FloatArray) -> Bytes:
    d, low = _range(x, 31)
    q = _levels((x - low) * _inverse(d) + np.float32(0.5), 31)
    return np.concatenate([_f16(d), _f16(low), _fifth_bits(q), _nibbles(q)], axis=1)


QUANTISERS: Final[dict[TensorType, Callable[[FloatArray], Bytes]]] = {
    TensorType.Q8_0: _q8_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q4_0: _q4_0,
}
"""[blocks, 32] to [blocks, bytes]."""


def _largest(x: FloatArray) -> FloatArray:
    largest: FloatArray = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    return largest


def _range(x: FloatArray, levels: int) -> tuple[FloatArray, FloatArray]:
    """The scale that covers a block in `levels` equal steps, and its minimum: [blocks, 1] each."""
    low = x.min(axis=1, keepdims=True)
    return (x.max(axis=1, keepdims=True) - low) / np.float32(levels), low


def _inverse(d: FloatArray) -> FloatArray:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=np.abs(d) >= _SMALLEST)


def _levels(x: FloatArray, highest: int) -> Bytes:
    return np.minimum(x, np.float32(highest)).astype(np.uint8)


def _f16(numbers: FloatArray) -> Bytes:
    """[blocks, 1] to [blocks, 2] bytes."""
    stored = numbers.astype("<f2")
    if not np.isfinite(stored).all():
        raise OverflowError("a value is too large")
    return stored.view(np.uint8)


def _nibbles(q: Bytes) -> Bytes:
    """[blocks, 32] numbers to [blocks, 16] bytes of their low bits."""
    return (q[:, :16] & np.uint8(0x0F)) | (q[:, 16:] << np.uint8(4))


def _fifth_bits(q: Bytes) -> Bytes:
    """[blocks, 32] numbers to [blocks, 4] bytes."""
    return np.packbits(q >> 4, axis=1, bitorder="little")
