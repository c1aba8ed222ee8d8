"""What a model file holds, whatever its format: metadata and tensors, not yet interpreted."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class TensorType(IntEnum):
    """Storage of a tensor's elements, with GGML's numbers. `dequantize.py` says what each one means."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39


@dataclass(frozen=True)
class Tensor:
    """A tensor as stored. `shape` is row-major, outermost first: a linear layer's is (outputs, inputs)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    data: npt.NDArray[np.uint8]
    """Its bytes, 1-D, a view of the mapped file."""


@dataclass(frozen=True)
class ModelFile:
    """A model file, mapped. Metadata values are int, float, bool, str or lists of them."""

    path: str
    size_bytes: int
    architecture: str
    metadata: Mapping[str, object]
    tensors: Mapping[str, Tensor]
