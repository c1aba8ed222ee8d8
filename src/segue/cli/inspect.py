"""`segue inspect`: what a model file holds."""

from collections.abc import Sequence

from segue.cli.output import print_json
from segue.cli.table import format_table
from segue.display import escape
from segue.weights.gguf import load_gguf
from segue.weights.hub import resolve_model
from segue.weights.model_file import ModelFile

_LONGEST_VALUE = 80


def inspect(name: str, *, as_json: bool) -> None:
    """Prints metadata and tensors."""
    file = load_gguf(resolve_model(name))
    if as_json:
        print_json(_record(file))
    else:
        print(_as_text(file))


def _as_text(file: ModelFile) -> str:
    metadata = format_table(
        ("key", "value"),
        [(escape(key), _shortened(value)) for key, value in file.metadata.items()],
        right=frozenset(),
    )
    tensors = format_table(
        ("tensor", "type", "shape", "bytes"),
        [
            (
                escape(tensor.name),
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
        f"{escape(file.path)}: {escape(file.architecture)}, {num_elements / 1e6:,.1f} M elements in "
        f"{len(file.tensors)} tensors, {file.size_bytes:,} bytes"
    )
    return f"{summary}\n\n{metadata}\n\n{tensors}"


def _record(file: ModelFile) -> dict[str, object]:
    return {
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


def _shortened(value: object) -> str:
    """A value in one line: lists by their length, long strings by their beginning."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        beginning = ", ".join(_shortened(entry) for entry in value[:4])
        return f"[{beginning}{', ...' if len(value) > 4 else ''}] ({len(value):,})"
    text = escape(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text):,} characters)"


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
