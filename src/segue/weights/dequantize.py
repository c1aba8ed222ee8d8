"""Tensors as f32 matrices: the formats of GGML, bit by bit.

A row is whole blocks of consecutive elements. `d`, `dmin` and `m` are f16, `q` is what an element stores, and
"b x n / w" is n elements of b bits in pieces of w bytes: a piece's lowest bits are its first w elements, the
next bits the w elements after them, so that a nibble's neighbours lie in other bytes.

    32 elements a block
    Q4_0     d | q 4x32/16                                           x = d (q - 8)
    Q4_1     d | m | q 4x32/16                                       x = d q + m
    Q5_0     d | high bit of q 1x32/1 | low bits 4x32/16             x = d (q - 16)
    Q5_1     d | m | high bit of q 1x32/1 | low bits 4x32/16         x = d q + m
    Q8_0     d | q int8                                              x = d q
    IQ4_NL   d | q 4x32/16                                           x = d CODES[q]
    MXFP4    e uint8 | q 4x32/16                                     x = 2^(e - 128) FP4_DOUBLED[q]

    256 elements a block, with a scale s (and minimum m) for each 16 or 32 of them
    Q2_K     s m 16 bytes: nibbles | q 2x256/32 | d | dmin           x = d s q - dmin m           16
    Q3_K     high bit of q 1x256/32 | low bits 2x256/32 | s | d      x = d (s - 32) (q - 4)       16
             s, 6 bits: low bits 4x16/8 | high bits 2x16/4
    Q4_K     d | dmin | s m | q 4x256/32                             x = d s q - dmin m           32
    Q5_K     d | dmin | s m | high bit 1x256/32 | low bits 4x256/32  x = d s q - dmin m           32
             s m, 6 bits, bytes a b c of 4: s 0-3 and m 0-3 are the low 6 bits of a and b; s 4-7 and m 4-7 have
             their low bits in c's low and high nibbles, their high bits in the two that are left of a and b
    Q6_K     low bits of q 4x256/64 | high bits 2x256/32 | s int8 | d    x = d s (q - 32)         16
    IQ4_XS   d | high bits of s 2x8/1 | low bits of s 4x8/1 | q 4x256/16     x = d (s - 32) CODES[q]  32

Products are exact in f32 (11 bits of an f16, at most 7 of a scale and 6 of an element), so a value is exact where
nothing is added and rounded once where a minimum is, as GGML's own C code has it. MXFP4 has no NaN: e = 255
is 2^127, whose larger products are infinite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from segue.weights.model_file import Tensor, TensorType

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

CODES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""The levels of IQ4_NL and IQ4_XS."""
FP4_DOUBLED: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of an FP4 number (E2M1)."""


@dataclass(frozen=True)
class Format:
    """How a type stores its elements."""

    block_elements: int
    block_bytes: int
    values: Callable[[Bytes], FloatArray]
    """[blocks, block_bytes] to [blocks, block_elements]."""


def dequantize(tensor: Tensor) -> FloatArray:
    """The tensor's values, f32, in its shape. A copy."""
    stored = FORMATS[tensor.type]
    with np.errstate(invalid="ignore", over="ignore"):  # a scale may be NaN or infinite, and is what it is
        values = stored.values(tensor.data.reshape(-1, stored.block_bytes))
    return values.reshape(tensor.shape)


def _f32(blocks: Bytes) -> FloatArray:
    return _numbers(blocks, "<f4")


def _f16(blocks: Bytes) -> FloatArray:
    return _numbers(blocks, "<f2")


def _bf16(blocks: Bytes) -> FloatArray:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> FloatArray:
    return _f16(blocks[:, :2]) * (_bits(4, blocks[:, 2:], 16) - 8)


def _q4_1(blocks: Bytes) -> FloatArray:
    return _f16(blocks[:, :2]) * _bits(4, blocks[:, 4:], 16) + _f16(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> FloatArray:
    q = _bits(4, blocks[:, 6:], 16) + 16 * _bits(1, blocks[:, 2:6], 1)
    return _f16(blocks[:, :2]) * (q - 16)


def _q5_1(blocks: Bytes) -> FloatArray:
    q = _bits(4, blocks[:, 8:], 16) + 16 * _bits(1, blocks[:, 4:8], 1)
    return _f16(blocks[:, :2]) * q + _f16(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> FloatArray:
    return _f16(blocks[:, :2]) * _numbers(blocks[:, 2:], "i1")


def _iq4_nl(blocks: Bytes) -> FloatArray:
    return _f16(blocks[:, :2]) * _looked_up(CODES, blocks[:, 2:])


def _mxfp4(blocks: Bytes) -> FloatArray:
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scale * _looked_up(FP4_DOUBLED, blocks[:, 1:])


def _q2_k(blocks: Bytes) -> FloatArray:
    scales, minima = blocks[:, :16] & 0x0F, blocks[:, :16] >> 4
    q = _bits(2, blocks[:, 16:80], 32)
    return _scaled(q, _f16(blocks[:, 80:82]) * scales, _f16(blocks[:, 82:84]) * minima)


def _q3_k(blocks: Bytes) -> FloatArray:
    q = _bits(2, blocks[:, 32:96], 32) + 4 * _bits(1, blocks[:, :32], 32)
    scales = _bits(4, blocks[:, 96:104], 8) + 16 * _bits(2, blocks[:, 104:108], 4)
    return _scaled(q - 4, _f16(blocks[:, 108:]) * (scales - 32))


def _q4_k(blocks: Bytes) -> FloatArray:
    q = _bits(4, blocks[:, 16:], 32)
    return _scaled(q, *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> FloatArray:
    q = _bits(4, blocks[:, 48:], 32) + 16 * _bits(1, blocks[:, 16:48], 32)
    return _scaled(q, *_scales_and_minima(blocks))


def _scales_and_minima(blocks: Bytes) -> tuple[FloatArray, FloatArray]:
    """d s and dmin m of Q4_K and Q5_K, whose blocks begin alike: [blocks, 8] each."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([a & 0x3F, ((a >> 6) << 4) | (c & 0x0F)], axis=1)
    minima = np.concatenate([b & 0x3F, ((b >> 6) << 4) | (c >> 4)], axis=1)
    return _f16(blocks[:, :2]) * scales, _f16(blocks[:, 2:4]) * minima


def _q6_k(blocks: Bytes) -> FloatArray:
    q = _bits(4, blocks[:, :128], 64) + 16 * _bits(2, blocks[:, 128:192], 32)
    return _scaled(q - 32, _f16(blocks[:, 208:]) * _numbers(blocks[:, 192:208], "i1"))


def _iq4_xs(blocks: Bytes) -> FloatArray:
    scales = _bits(4, blocks[:, 4:8], 1) + 16 * _bits(2, blocks[:, 2:4], 1)
    return _scaled(_looked_up(CODES, blocks[:, 8:]), _f16(blocks[:, :2]) * (scales - 32))


def _numbers(stored: Bytes, kind: str) -> FloatArray:
    """[blocks, bytes] as numbers of a NumPy type, in f32."""
    return np.ascontiguousarray(stored).view(kind).astype(np.float32)


def _bits(width: int, packed: Bytes, piece: int) -> FloatArray:
    """[blocks, bytes] to [blocks, bytes * 8 / width] numbers of `width` bits, "in pieces of" `piece` bytes."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    pieces = packed.reshape(len(packed), -1, 1, piece)
    return ((pieces >> shifts) & ((1 << width) - 1)).reshape(len(packed), -1).astype(np.float32)


def _looked_up(levels: FloatArray, nibbles: Bytes) -> FloatArray:
    return levels[_bits(4, nibbles, 16).astype(np.intp)]


def _scaled(q: FloatArray, scales: FloatArray, minima: FloatArray | None = None) -> FloatArray:
    """q [blocks, elements] times its group's scale, less its minimum: [blocks, groups] each."""
    values = scales[:, :, None] * q.reshape(*scales.shape, -1)
    if minima is not None:
        values -= minima[:, :, None]
    return values.reshape(q.shape)


FORMATS: Final[dict[TensorType, Format]] = {
    TensorType.F32: Format(1, 4, _f32),
    TensorType.F16: Format(1, 2, _f16),
    TensorType.BF16: Format(1, 2, _bf16),
    TensorType.Q4_0: Format(32, 2 + 16, _q4_0),
    TensorType.Q4_1: Format(32, 2 + 2 + 16, _q4_1),
    TensorType.Q5_0: Format(32, 2 + 4 + 16, _q5_0),
    TensorType.Q5_1: Format(32, 2 + 2 + 4 + 16, _q5_1),
    TensorType.Q8_0: Format(32, 2 + 32, _q8_0),
    TensorType.Q2_K: Format(256, 16 + 64 + 2 + 2, _q2_k),
    TensorType.Q3_K: Format(256, 32 + 64 + 12 + 2, _q3_k),
    TensorType.Q4_K: Format(256, 2 + 2 + 12 + 128, _q4_k),
    TensorType.Q5_K: Format(256, 2 + 2 + 12 + 32 + 128, _q5_k),
    TensorType.Q6_K: Format(256, 128 + 64 + 16 + 2, _q6_k),
    TensorType.IQ4_NL: Format(32, 2 + 16, _iq4_nl),
    TensorType.IQ4_XS: Format(256, 2 + 2 + 4 + 128, _iq4_xs),
    TensorType.MXFP4: Format(32, 1 + 16, _mxfp4),
}
"""Every type that can be read. Sizes of tensors in a file are computed from here, too."""
