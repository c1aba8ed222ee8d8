"""`segue inspect`: what a model file holds."""

from collections.abc import Sequence

import msgspec

from segue.cli.table import format_table
from segue.hub import resolve_model
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile

_LONGEST_VALUE = 80


def inspect(name: str, *, as_json: bool) -> None:
    """Prints metadata and tensors."""
    file = load_gguf(resolve_model(name))
    print(_as_json(file) if as_json else _as_text(file))


def _as_text(file: ModelFile) -> str:
    metadata = format_table(
        ("key", "value"),
        [(_printable(key), _shortened(value)) for key, value in file.metadata.items()],
        right=frozenset(),
    )
    tensors = format_table(
        ("tensor", "type", "shape", "bytes"),
        [
            (
                _printable(tensor.name),
                tensor.type.name,
                "x".join(map(str, tensor.shape)),
                f"{tensor.data.nbytes:,}",
            )
            for tensor in file.tensors.values()
        ],
        right=frozenset({3}),
    )
    num_elements = sum(_num_elements(tensor.shape) for tensor in file.tensors.values())
    summary = (
        f"{_printable(file.path)}: {file.architecture}, {num_elements / 1e6:,.1f} M elements in "
        f"{len(file.tensors)} tensors, {file.size_bytes:,} bytes"
    )
    return f"{summary}\n\n{metadata}\n\n{tensors}"


def _as_json(file: ModelFile) -> str:
    record = {
        "path": file.path,
        "architecture": file.architecture,
        "size_bytes": file.size_bytes,
        "metadata": {
            key: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for key, value in file.metadata.items()
        },
        "tensors": [
            {
                "name": tensor.name,
                "type": tensor.type.name,
                "shape": tensor.shape,
                "bytes": tensor.data.nbytes,
            }
            for tensor in file.tensors.values()
        ],
    }
    return msgspec.json.encode(record).decode()


def _shortened(value: object) -> str:
    """A value in one line: lists by their length, long strings by their beginning."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        beginning = ", ".join(_shortened(entry) for entry in value[:4])
        return f"[{beginning}{', ...' if len(value) > 4 else ''}] ({len(value):,})"
    text = _printable(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text):,} characters)"


def _printable(text: str) -> str:
    """A file's text can hold anything, such as codes that steer a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
