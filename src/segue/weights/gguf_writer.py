"""Writes a GGUF file (version 3) as `gguf_file.py` reads it: whole and under its name, or not at all."""

import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from segue.display import show_path
from segue.errors import FailedError, UsageError
from segue.weights.dequantize import Bytes
from segue.weights.gguf_file import DEFAULT_ALIGNMENT, MAGIC, VERSIONS, ValueType
from segue.weights.model_file import TensorType

Progress = Callable[[int, int], None]
"""Called now and then with the bytes written so far and the bytes in all."""

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorToWrite:
    """Its bytes are made piece by piece while it is written."""

    name: str
    shape: tuple[int, ...]
    """Outermost first."""
    type: TensorType
    size_bytes: int
    pieces: Iterable[Bytes]


def u32_entry(key: str, value: int) -> bytes:
    """A key with its value, as stored."""
    return _string(key) + _U32.pack(ValueType.UINT32) + _U32.pack(value)


def write_gguf(
    path: Path,
    entries: Sequence[bytes | memoryview],
    tensors: Sequence[TensorToWrite],
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the file and return its size in bytes. `entries` are as stored, and do not set an alignment.

    Raises UsageError when `path` exists and is not to be replaced, or its folder does not, FailedError when the
    disk has no room or cannot be written, and what making the pieces raises. There is a file only when all is written.
    """
    header = _header(entries, tensors)
    total = len(header) + sum(_padded(tensor.size_bytes) for tensor in tensors)
    _check_target(path, total, replace=replace)
    with _whole_or_not_at_all(path) as file:
        file.write(header)
        done = len(header)
        for tensor in tensors:
            start = done
            for piece in tensor.pieces:
                file.write(piece.data)
                done += piece.nbytes
                if progress is not None:
                    progress(done, total)
            assert done - start == tensor.size_bytes
            done += file.write(bytes(-done % DEFAULT_ALIGNMENT))
    return total


def _header(entries: Sequence[bytes | memoryview], tensors: Sequence[TensorToWrite]) -> bytes:
    header = bytearray(MAGIC + _U32.pack(VERSIONS[-1]) + _U64.pack(len(tensors)) + _U64.pack(len(entries)))
    for entry in entries:
        header += entry
    offset = 0
    for tensor in tensors:
        header += _string(tensor.name) + _U32.pack(len(tensor.shape))
        header += b"".join(map(_U64.pack, reversed(tensor.shape)))
        header += _U32.pack(tensor.type) + _U64.pack(offset)
        offset += _padded(tensor.size_bytes)
    return bytes(header) + bytes(-len(header) % DEFAULT_ALIGNMENT)


def _string(text: str) -> bytes:
    raw = text.encode()
    return _U64.pack(len(raw)) + raw


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _check_target(path: Path, size_bytes: int, *, replace: bool) -> None:
    shown = show_path(path)
    if path.is_dir():
        raise UsageError(f"{shown} is a directory; name the file to write")
    if path.exists() and not replace:
        raise UsageError(f"{shown} exists; --force replaces it")
    if not path.parent.is_dir():
        raise UsageError(f"{show_path(path.parent)}: no such folder")
    free = shutil.disk_usage(path.parent).free
    if free < size_bytes:
        raise FailedError(
            f"{show_path(path.parent)} has {free / 1e6:,.0f} MB free, {shown} needs {size_bytes / 1e6:,.0f} MB"
        )


@contextmanager
def _whole_or_not_at_all(path: Path) -> Iterator[IO[bytes]]:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        try:
            with open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            raise FailedError(f"{show_path(path)} cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
