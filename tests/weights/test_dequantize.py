"""Dequantisation against the `gguf` package's, on every bit pattern, and by hand."""

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from segue.weights.dequantize import FORMATS, dequantize
from segue.weights.model_file import Tensor, TensorType


def stored(kind: TensorType, *parts: bytes | npt.NDArray[np.generic]) -> Tensor:
    """One row of the parts' bytes."""
    data = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
    width = len(data) // FORMATS[kind].block_bytes * FORMATS[kind].block_elements
    return Tensor("w", (1, width), kind, np.frombuffer(data, np.uint8))


def half(*values: float) -> npt.NDArray[np.float16]:
    return np.array(values, "<f2")


def uint8(*values: int) -> npt.NDArray[np.uint8]:
    return np.array(values, np.uint8)


@pytest.mark.parametrize("kind", TensorType)
def test_equals_ggufs_on_random_bytes(kind: TensorType) -> None:
    """One f16 in 32 is infinite or NaN."""
    layout, rng = FORMATS[kind], np.random.default_rng(kind)
    data = rng.integers(0, 256, (6, 128 * layout.block_bytes), np.uint8)
    tensor = Tensor("w", (6, 128 * layout.block_elements), kind, data.reshape(-1))
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind.value)).astype(np.float32)
    ours = dequantize(tensor)
    assert ours.dtype == np.float32
    assert ours.shape == tensor.shape
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(theirs[~np.isnan(theirs)]))
    assert np.isfinite(ours).any()
    assert kind is TensorType.MXFP4 or np.isnan(ours).any()
    assert not np.shares_memory(ours, data)


@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-24, -65504.0, np.inf, np.nan])
@pytest.mark.parametrize("kind", [kind for kind in TensorType if FORMATS[kind].block_elements > 1])
def test_equals_ggufs_with_extreme_scales(kind: TensorType, scale: float) -> None:
    data = np.random.default_rng(kind).integers(0, 256, (1, 16 * FORMATS[kind].block_bytes), np.uint8)
    blocks = data.reshape(16, -1)
    for at in range(0, blocks.shape[1] - 1, 2):  # wherever the format has its scales
        blocks[at % 16, at : at + 2] = half(scale).view(np.uint8)
    blocks[:, :2] = blocks[:, -2:] = half(scale).view(np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind.value))
    np.testing.assert_array_equal(dequantize(stored(kind, data)), theirs)


def test_every_type_has_a_format() -> None:
    assert set(FORMATS) == set(TensorType)


def test_floats_by_hand() -> None:
    assert dequantize(stored(TensorType.F32, np.array([1.5, -0.1], "<f4"))).tolist() == [
        [1.5, np.float32(-0.1)]
    ]
    assert dequantize(stored(TensorType.F16, half(0.1, -3))).tolist() == [[float(np.float16(0.1)), -3.0]]
    assert dequantize(stored(TensorType.BF16, uint8(0x80, 0x3F, 0x20, 0xC1))).tolist() == [[1.0, -10.0]]


def test_blocks_of_32_by_hand() -> None:
    nibbles = uint8(0xF0, 0x21, *[0x88] * 14)
    fifth = np.array([1 << 0 | 1 << 17 | 1 << 31], "<u4")

    def some(kind: TensorType, *parts: npt.NDArray[np.generic]) -> list[float]:
        values: list[float] = dequantize(stored(kind, *parts))[0, [0, 1, 16, 17, 31]].tolist()
        return values

    assert some(TensorType.Q4_0, half(0.5), nibbles) == [-4.0, -3.5, 3.5, -3.0, 0.0]
    assert some(TensorType.Q4_1, half(0.5, -2), nibbles) == [-2.0, -1.5, 5.5, -1.0, 2.0]
    assert some(TensorType.Q5_0, half(0.5), fifth, nibbles) == [0.0, -7.5, -0.5, 1.0, 4.0]
    assert some(TensorType.Q5_1, half(0.5, -2), fifth, nibbles) == [6.0, -1.5, 5.5, 7.0, 10.0]
    assert some(TensorType.Q8_0, half(0.5), np.arange(-16, 16, dtype=np.int8)) == [-8.0, -7.5, 0.0, 0.5, 7.5]
    assert some(TensorType.IQ4_NL, half(0.5), nibbles) == [-63.5, -52.0, 56.5, -41.5, 0.5]
    assert some(TensorType.MXFP4, uint8(127), nibbles) == [0.0, 0.5, -6.0, 1.0, -0.0]
    assert some(TensorType.MXFP4, uint8(0), nibbles) == [0.0, 2.0**-128, -12 * 2.0**-128, 2.0**-127, 0.0]
    assert some(TensorType.MXFP4, uint8(255), nibbles) == [0.0, 2.0**127, -np.inf, np.inf, 0.0]


def test_q2_k_by_hand() -> None:
    """Element 33: the second pair of bits of byte 1, in group 2; element 128: the lowest of byte 32, in group 8."""
    scales, q = np.zeros(16, np.uint8), np.zeros(64, np.uint8)
    scales[[2, 8]] = 0x53, 0xF1
    q[1], q[32] = 2 << 2, 3
    values = dequantize(stored(TensorType.Q2_K, scales, q, half(0.5, 0.25)))[0]
    assert values[[0, 32, 33, 128, 129]].tolist() == [0.0, -1.25, 1.75, -2.25, -3.75]


def test_q3_k_by_hand() -> None:
    """A scale is 32 less than stored, an element 4 less. Group 9: high nibble of byte 1, third pair of byte 8 + 1."""
    high, q, scales = np.zeros(32, np.uint8), np.zeros(64, np.uint8), np.zeros(12, np.uint8)
    scales[1], scales[8 + 1] = 0x50, 2 << 4  # 5 + 16 * 2 - 32 = 5
    high[16], q[32 + 16] = 1 << 4, 3  # element 144 is 7 - 4 = 3
    values = dequantize(stored(TensorType.Q3_K, high, q, scales, half(0.5)))[0]
    assert values[[0, 143, 144, 145]].tolist() == [64.0, 64.0, 7.5, -10.0]


@pytest.mark.parametrize("kind", [TensorType.Q4_K, TensorType.Q5_K])
def test_q4_k_and_q5_k_by_hand(kind: TensorType) -> None:
    """Group 1's scale and minimum lie in one byte each, group 5's in two."""
    scales, q = np.zeros(12, np.uint8), np.zeros(128, np.uint8)
    scales[1], scales[5] = 0x80 | 3, 0x40 | 61  # group 1: 3 and 61; high bits of group 5: 2 and 1
    scales[9] = 0x97  # group 5: low bits 7 and 9
    q[0], q[64] = 0xE0, 0x50  # elements 32 and 160
    fifth = b""
    if kind is TensorType.Q5_K:
        fifth = bytes([1 << 5, *[0] * 31])  # of element 160
    values = dequantize(stored(kind, half(0.5, 0.25), scales, fifth, q))[0]
    more = 16 if fifth else 0
    assert values[[0, 32, 33]].tolist() == [0.0, 0.5 * 3 * 14 - 0.25 * 61, -0.25 * 61]
    assert values[[160, 161]].tolist() == [0.5 * 39 * (5 + more) - 0.25 * 25, -0.25 * 25]


def test_q6_k_by_hand() -> None:
    """Element 195: low bits in the high nibble of byte 64 + 3, high bits the third pair of byte 32 + 3, group 12."""
    low, high, scales = np.zeros(128, np.uint8), np.zeros(64, np.uint8), np.zeros(16, np.int8)
    low[64 + 3], high[32 + 3], scales[12] = 0x90, 3 << 4, -7
    values = dequantize(stored(TensorType.Q6_K, low, high, scales, half(0.5)))[0]
    assert values[[0, 195, 196]].tolist() == [0.0, 0.5 * -7 * (9 + 48 - 32), 0.5 * -7 * -32]


def test_iq4_xs_by_hand() -> None:
    """Group 3: high bits the fourth pair of scales_h, low bits the high nibble of byte 1."""
    q = np.zeros(128, np.uint8)
    q[48] = 0xF0  # elements 96 and 112
    values = dequantize(stored(TensorType.IQ4_XS, half(0.5), uint8(2 << 6, 0), uint8(0, 0x50, 0, 0), q))[0]
    assert values[[0, 96, 112]].tolist() == [0.5 * -32 * -127, 0.5 * 5 * -127, 0.5 * 5 * 113]
