"""Builds GGUF files byte by byte, wrong ones included."""

import struct
from collections.abc import Sequence

U32 = 4
STRING = 8
ARRAY = 9


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def entry(key: str | bytes, value_type: int, payload: bytes) -> bytes:
    return string(key) + u32(value_type) + payload


def array(element_type: int, count: int, payload: bytes) -> bytes:
    return u32(element_type) + u64(count) + payload


def tensor(name: str, dimensions: Sequence[int], tensor_type: int, offset: int) -> bytes:
    """Dimensions as GGUF stores them, innermost first."""
    return (
        string(name)
        + u32(len(dimensions))
        + b"".join(u64(size) for size in dimensions)
        + u32(tensor_type)
        + u64(offset)
    )


ARCHITECTURE = entry("general.architecture", STRING, string("llama"))


def gguf(
    entries: Sequence[bytes] = (ARCHITECTURE,),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    num_tensors: int | None = None,
    num_entries: int | None = None,
    alignment: int = 32,
) -> bytes:
    header = magic + version
    header += u64(len(tensors) if num_tensors is None else num_tensors)
    header += u64(len(entries) if num_entries is None else num_entries)
    header += b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data
