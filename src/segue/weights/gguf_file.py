"""Reads one GGUF file (versions 2 and 3, little endian). What it holds of a model is for `gguf.py` to say.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    "GGUF" | version u32 | tensor count u64 | key count u64
    for each key:     key string | value type u32 | value
    for each tensor:  name string | dimension count u32 | dimensions u64…, innermost first
                      | type u32 | offset u64
    padding to `general.alignment`
    tensor data; each offset counts from here

A string is a u64 length and that many bytes of UTF-8; an array is an element type u32, a length u64 and
its elements.

The file is mapped, not read: tensors are views, and only the header is decoded. Nothing a header says
is believed before it is compared with the size of the file, so a damaged file costs no more time or
memory than a good one of its size.
"""

import mmap
import os
import stat
import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from segue.display import show_name, show_path
from segue.errors import ModelFileError
from segue.weights.dequantize import FORMATS
from segue.weights.model_file import Tensor, TensorType

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMENSIONS: Final = 4
MAX_ARRAY_LENGTH: Final = 1 << 22
"""Far above any vocabulary. An array of small integers grows eightfold when it becomes a list."""


class ValueType(IntEnum):
    """Types of metadata values, with GGUF's numbers."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: Final = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}

OTHER_TYPES: Final = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
"""Types that exist and are not supported, so that a message can name them."""

_LENGTH: Final = SCALARS[ValueType.UINT64]
"""What precedes a string."""
_SMALLEST_ENTRY: Final = 8 + 4 + 1
"""Bytes of the shortest key with its value."""
_SMALLEST_TENSOR_INFO: Final = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class GGUFFile:
    """A file, mapped: a model, or a part of one."""

    path: str
    size_bytes: int
    metadata: dict[str, object]
    entries: dict[str, memoryview]
    """The metadata as stored: key, type and value."""
    tensors: dict[str, Tensor]

    def error(self, why: str) -> ModelFileError:
        return ModelFileError(f"{show_path(self.path)}: {why}")

    def damaged(self, why: str) -> ModelFileError:
        return ModelFileError(f"{show_path(self.path)} is damaged: {why}; download it again")


def read_gguf(path: str | Path) -> GGUFFile:
    """Map a GGUF file. Raises ModelFileError for whatever is wrong with it, naming the file."""
    name = os.fspath(path)
    return _Parser(name, _map(name)).file()


def _map(name: str) -> mmap.mmap:
    """The file's bytes. Raises ModelFileError when there is no file to map."""
    shown = show_path(name)
    try:
        status = os.stat(name)
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{shown} is a directory; a model is one .gguf file")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{shown} is not a regular file; a model is one .gguf file")
        if status.st_size == 0:
            raise ModelFileError(f"{shown} is empty; download it again")
        with open(name, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{shown}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{shown} cannot be read: {error.strerror}") from None
    except ValueError:
        # The path holds a zero byte, or the file became empty between the two calls.
        raise ModelFileError(f"{shown} cannot be read") from None


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    """From the start of the tensor data."""
    size_bytes: int


class _Parser:
    """A cursor over a mapped file."""

    def __init__(self, name: str, buffer: mmap.mmap) -> None:
        self._name = name
        self._buffer = buffer
        self._size = len(buffer)
        self._pos = 0

    def file(self) -> GGUFFile:
        num_tensors, num_entries = self._fixed_header()
        metadata, entries = self._metadata(num_entries)
        infos = self._tensor_infos(num_tensors)
        tensors = self._tensors(infos, self._alignment(metadata))
        return GGUFFile(self._name, self._size, metadata, entries, tensors)

    # Errors

    def _error(self, why: str) -> ModelFileError:
        return ModelFileError(f"{show_path(self._name)}: {why}")

    def _damaged(self, why: str) -> ModelFileError:
        return ModelFileError(f"{show_path(self._name)} is damaged: {why}; download it again")

    def _truncated(self, what: str) -> ModelFileError:
        return self._damaged(f"it ends inside {what}")

    # The header, in the order of the file

    def _fixed_header(self) -> tuple[int, int]:
        """The counts of tensors and of keys."""
        magic = self._buffer[: len(MAGIC)]
        if magic != MAGIC:
            raise self._error(f"not a GGUF file (it starts with {magic!r})")
        self._pos = len(MAGIC)
        version = self._u32("its version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise self._error("a big-endian GGUF file; only little-endian files are supported")
            raise self._error(f"GGUF version {version} is not supported; versions 2 and 3 are")
        num_tensors = self._u64("its tensor count")
        num_entries = self._u64("its key count")
        self._check_count(num_entries, _SMALLEST_ENTRY, "metadata keys")
        self._check_count(num_tensors, _SMALLEST_TENSOR_INFO, "tensors")
        return num_tensors, num_entries

    def _metadata(self, num_entries: int) -> tuple[dict[str, object], dict[str, memoryview]]:
        metadata: dict[str, object] = {}
        entries: dict[str, memoryview] = {}
        stored = memoryview(self._buffer)
        for index in range(num_entries):
            start = self._pos
            key = self._string(f"metadata key {index}")
            if not key:
                raise self._damaged(f"metadata key {index} is empty")
            if key in metadata:
                raise self._damaged(f"the key {show_name(key)} is there twice")
            metadata[key] = self._value(key)
            entries[key] = stored[start : self._pos]
        return metadata, entries

    def _value(self, key: str) -> object:
        what = f"the value of {show_name(key)}"
        match self._value_type(what):
            case ValueType.STRING:
                return self._string(what)
            case ValueType.ARRAY:
                return self._array(what)
            case ValueType.BOOL:
                return self._bools(1, what)[0]
            case scalar:
                return self._scalar(SCALARS[scalar], what)

    def _array(self, what: str) -> list[object]:
        element = self._value_type(what)
        count = self._u64(what)
        if count > MAX_ARRAY_LENGTH:
            raise self._damaged(f"{what} has {count} elements, more than {MAX_ARRAY_LENGTH}")
        match element:
            case ValueType.STRING:
                return list(self._strings(count, what))
            case ValueType.ARRAY:
                raise self._damaged(f"{what} is an array of arrays")
            case ValueType.BOOL:
                return list(self._bools(count, what))
            case scalar:
                layout = SCALARS[scalar]
                start = self._advance(count * layout.size, what)
                elements: list[object] = np.frombuffer(
                    self._buffer, np.dtype(layout.format), count, start
                ).tolist()
                return elements

    def _tensor_infos(self, num_tensors: int) -> list[_TensorInfo]:
        infos: dict[str, _TensorInfo] = {}
        for index in range(num_tensors):
            name = self._string(f"the name of tensor {index}")
            if name in infos:
                raise self._damaged(f"the tensor {show_name(name)} is there twice")
            infos[name] = self._tensor_info(name)
        return list(infos.values())

    def _tensor_info(self, name: str) -> _TensorInfo:
        what = f"the description of tensor {show_name(name)}"
        num_dimensions = self._u32(what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"the tensor {show_name(name)} has {num_dimensions} dimensions")
        shape = tuple(self._u64(what) for _ in range(num_dimensions))[::-1]
        type_number = self._u32(what)
        offset = self._u64(what)
        tensor_type = self._tensor_type(name, type_number)
        stored = FORMATS[tensor_type]
        if min(shape) < 1:
            raise self._damaged(f"the tensor {show_name(name)} has the shape {shape}")
        if shape[-1] % stored.block_elements:
            raise self._damaged(
                f"the rows of tensor {show_name(name)} have {shape[-1]} elements, "
                f"no multiple of {tensor_type.name}'s {stored.block_elements}"
            )
        size_bytes = prod(shape) // stored.block_elements * stored.block_bytes
        return _TensorInfo(name, shape, tensor_type, offset, size_bytes)

    def _tensor_type(self, name: str, number: int) -> TensorType:
        try:
            return TensorType(number)
        except ValueError:
            known = ", ".join(tensor_type.name for tensor_type in TensorType)
            if number in OTHER_TYPES:
                raise self._error(
                    f"the tensor {show_name(name)} is {OTHER_TYPES[number]}, which is not supported; "
                    f"use a file of {known}"
                ) from None
            raise self._error(
                f"the tensor {show_name(name)} has the unknown type {number}; supported are {known}"
            ) from None

    def _tensors(self, infos: list[_TensorInfo], alignment: int) -> dict[str, Tensor]:
        """Views of the tensors' bytes, checked to lie in the file, aligned and apart."""
        data_start = -(-self._pos // alignment) * alignment
        for info in infos:
            if info.offset % alignment:
                raise self._damaged(
                    f"the tensor {show_name(info.name)} starts at {info.offset}, "
                    f"no multiple of the alignment {alignment}"
                )
            end = data_start + info.offset + info.size_bytes
            if end > self._size:
                raise self._damaged(
                    f"the tensor {show_name(info.name)} ends at byte {end}, the file at {self._size}"
                )
        in_file_order = sorted(infos, key=lambda info: info.offset)
        for info, following in pairwise(in_file_order):
            if info.offset + info.size_bytes > following.offset:
                raise self._damaged(
                    f"the tensors {show_name(info.name)} and {show_name(following.name)} overlap"
                )
        whole = np.frombuffer(self._buffer, np.uint8)
        return {
            info.name: Tensor(info.name, info.shape, info.type, whole[start : start + info.size_bytes])
            for info in infos
            for start in (data_start + info.offset,)
        }

    def _alignment(self, metadata: dict[str, object]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int):
            raise self._damaged("general.alignment is not an integer")
        if alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment}, no power of two")
        return alignment

    # Leaves

    def _check_count(self, count: int, smallest: int, what: str) -> None:
        if count * smallest > self._size - self._pos:
            raise self._damaged(f"it claims {count} {what}, more than fit in {self._size} bytes")

    def _advance(self, size: int, what: str) -> int:
        """Move over `size` bytes and return where they start."""
        start = self._pos
        if size > self._size - start:
            raise self._truncated(what)
        self._pos = start + size
        return start

    def _scalar(self, layout: struct.Struct, what: str) -> object:
        scalar: object = layout.unpack_from(self._buffer, self._advance(layout.size, what))[0]
        return scalar

    def _u32(self, what: str) -> int:
        return int.from_bytes(self._bytes(4, what), "little")

    def _u64(self, what: str) -> int:
        return int.from_bytes(self._bytes(8, what), "little")

    def _bytes(self, size: int, what: str) -> bytes:
        start = self._advance(size, what)
        return self._buffer[start : start + size]

    def _value_type(self, what: str) -> ValueType:
        number = self._u32(what)
        try:
            return ValueType(number)
        except ValueError:
            raise self._damaged(f"{what} has the unknown type {number}") from None

    def _bools(self, count: int, what: str) -> list[bool]:
        raw = self._bytes(count, what)
        if raw.strip(b"\x00\x01"):
            raise self._damaged(f"{what} is neither true nor false")
        return [byte == 1 for byte in raw]

    def _string(self, what: str) -> str:
        return self._strings(1, what)[0]

    def _strings(self, count: int, what: str) -> list[str]:
        """`count` strings. A vocabulary has a hundred thousand of them, so this loop is bare."""
        self._check_count(count, _LENGTH.size, f"strings in {what}")
        buffer, size, pos = self._buffer, self._size, self._pos
        length_at = _LENGTH.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + length_at(buffer, pos)[0]
                if pos > size:
                    raise self._truncated(what)
                append(buffer[start:pos].decode())
        except struct.error:
            raise self._truncated(what) from None
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is not valid UTF-8") from None
        self._pos = pos
        return strings
