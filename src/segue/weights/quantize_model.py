"""A model's file in fewer bits, which parts of it and how far.

matrices                     the type that is asked for
the output matrix            Q8_0, because every logit is one of its rows; so the embedding where they are one
norms, vectors, routers      as they are: they are small, and much depends on them
rows of no whole blocks      as they are
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final

from segue.display import show_name, show_path
from segue.errors import ModelFileError
from segue.weights.dequantize import FORMATS, Bytes, dequantize
from segue.weights.gguf import SPLIT_KEYS, model_of, read_parts
from segue.weights.gguf_writer import Progress, TensorToWrite, u32_entry, write_gguf
from segue.weights.model_file import ModelFile, Tensor, TensorType
from segue.weights.quantize import quantize

_SOURCES: Final = (TensorType.F32, TensorType.F16, TensorType.BF16)
_KEPT: Final = ("norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight")
_OUTPUT: Final = "output.weight"
_EMBEDDING: Final = "token_embd.weight"
_PIECE: Final = 1 << 18
"""Elements, or bytes of what stays, that are written at once: whole blocks of every type."""

_FILE_TYPES: Final[Mapping[TensorType, int]] = {
    TensorType.Q4_0: 2,
    TensorType.Q4_1: 3,
    TensorType.Q8_0: 7,
    TensorType.Q5_0: 8,
    TensorType.Q5_1: 9,
}
"""llama.cpp's numbers for what most of a file is in."""
_QUANTIZATION_VERSION: Final = 2
_REPLACED: Final = ("general.file_type", "general.quantization_version", "general.alignment", *SPLIT_KEYS)


def quantize_model(
    source: Path, target: Path, kind: TensorType, *, replace: bool = False, progress: Progress | None = None
) -> tuple[int, int]:
    """Write the model of `source` to `target`, its matrices in `kind`. Returns the bytes of both.

    Raises ModelFileError when the source is no model with matrices of floats, and what `write_gguf` raises.
    """
    parts = read_parts(source)
    model = model_of(parts)
    entries: list[bytes | memoryview] = [
        entry for key, entry in parts[0].entries.items() if key not in _REPLACED
    ]
    entries.append(u32_entry("general.file_type", _FILE_TYPES[kind]))
    entries.append(u32_entry("general.quantization_version", _QUANTIZATION_VERSION))
    tied = _OUTPUT not in model.tensors
    tensors = [
        _converted(model, tensor, quantized_type(tensor, kind, tied=tied))
        for tensor in model.tensors.values()
    ]
    if all(made.type == tensor.type for made, tensor in zip(tensors, model.tensors.values(), strict=True)):
        raise ModelFileError(f"{show_path(model.path)} has no matrices of {_names(_SOURCES)} to quantize")
    return model.size_bytes, write_gguf(target, entries, tensors, replace=replace, progress=progress)


def quantized_type(tensor: Tensor, kind: TensorType, *, tied: bool) -> TensorType:
    """What a tensor becomes where the model's matrices become `kind`. tied: the embedding is the output matrix."""
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight") and not tensor.name.endswith(_KEPT)
    if not is_matrix or tensor.shape[-1] % FORMATS[kind].block_elements:
        return tensor.type
    return TensorType.Q8_0 if tensor.name == (_EMBEDDING if tied else _OUTPUT) else kind


def _converted(model: ModelFile, tensor: Tensor, kind: TensorType) -> TensorToWrite:
    if kind is tensor.type:
        return TensorToWrite(tensor.name, tensor.shape, kind, tensor.data.nbytes, _stored(tensor))
    if tensor.type not in _SOURCES:
        raise ModelFileError(
            f"{show_path(model.path)}: the tensor {show_name(tensor.name)} is {tensor.type.name} already and would "
            f"be rounded twice; quantize the file of {_names(_SOURCES)} that it was made of"
        )
    layout = FORMATS[kind]
    size_bytes = prod(tensor.shape) // layout.block_elements * layout.block_bytes
    return TensorToWrite(tensor.name, tensor.shape, kind, size_bytes, _quantized(model, tensor, kind))


def _stored(tensor: Tensor) -> Iterator[Bytes]:
    for start in range(0, tensor.data.nbytes, _PIECE):
        yield tensor.data[start : start + _PIECE]


def _quantized(model: ModelFile, tensor: Tensor, kind: TensorType) -> Iterator[Bytes]:
    """Piece by piece, so that memory does not grow with the model."""
    width = FORMATS[kind].block_elements
    step = _PIECE * FORMATS[tensor.type].block_bytes
    for start in range(0, tensor.data.nbytes, step):
        data = tensor.data[start : start + step]
        shape = (data.nbytes // FORMATS[tensor.type].block_bytes // width, width)
        try:
            yield quantize(dequantize(Tensor(tensor.name, shape, tensor.type, data)), kind)
        except OverflowError as error:
            raise ModelFileError(
                f"{show_path(model.path)}: the tensor {show_name(tensor.name)} cannot be {kind.name}: {error}"
            ) from None


def _names(kinds: Iterable[TensorType]) -> str:
    return ", ".join(kind.name for kind in kinds)
