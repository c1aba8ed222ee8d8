"""A model from its GGUF file, or from all the files that it was split into.

    model-00001-of-00003.gguf    all metadata, the first tensors    split.no 0 | split.count 3 | split.tensors.count
    model-00002-of-00003.gguf    more tensors                       split.no 1 | ...
    model-00003-of-00003.gguf    the last ones                      split.no 2 | ...

Any part stands for the model: the others are found by its name, in its folder. What each says of itself must
agree with its name and with the others, so that parts of different models are not mixed.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from segue.display import show_name, show_path
from segue.errors import ModelFileError
from segue.weights.gguf_file import GGUFFile, read_gguf
from segue.weights.model_file import ModelFile

SPLIT_KEYS: Final = ("split.no", "split.count", "split.tensors.count")
_OWN_KEYS: Final = (*SPLIT_KEYS, "general.alignment")
"""Keys in which the parts of a model may differ."""
_ENDING: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf", re.ASCII)


def load_gguf(path: str | Path) -> ModelFile:
    """Map a model's file, or all of them. Raises ModelFileError for whatever is wrong, naming the file."""
    return model_of(read_parts(path))


def read_parts(path: str | Path) -> list[GGUFFile]:
    """The model's file, or all of them in order. Raises as `load_gguf`."""
    named = read_gguf(path)
    split = _Split.of(named)
    return [named] if split is None else _parts(named, split)


def pinned(path: Path) -> Path:
    """The file itself, whatever links lead to it. A part of a model keeps its name, by which the others are found."""
    return path.parent.resolve() / path.name if _ENDING.search(path.name) else path.resolve()


@dataclass(frozen=True)
class _Split:
    """What a part says of itself."""

    number: int
    """From 0."""
    count: int
    num_tensors: int
    """Of all parts."""

    @classmethod
    def of(cls, file: GGUFFile) -> Self | None:
        """None for a file that is a whole model."""
        if file.metadata.get("split.count") in (None, 0, 1):
            return None
        values = []
        for key in SPLIT_KEYS:
            value = file.metadata.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise file.damaged(f"it is a part of a model, and does not say its {key}")
            values.append(value)
        split = cls(*values)
        if split.number >= split.count:
            raise file.damaged(f"it is {split}")
        return split

    @property
    def ending(self) -> str:
        """Of the part's name."""
        return f"-{self.number + 1:05d}-of-{self.count:05d}.gguf"

    def __str__(self) -> str:
        return f"part {self.number + 1} of {self.count} of a model with {self.num_tensors} tensors"


def _parts(named: GGUFFile, split: _Split) -> list[GGUFFile]:
    """All parts of the model, in order."""
    if not named.path.endswith(split.ending):
        raise named.error(
            f"it is {split}, and its name does not end in {split.ending}, by which the others are found; "
            "give it that name"
        )
    beginning = named.path.removesuffix(split.ending)
    parts = [
        named if number == split.number else _other_part(beginning, replace(split, number=number))
        for number in range(split.count)
    ]
    _refuse_strangers(parts, split)
    return parts


def _other_part(beginning: str, expected: _Split) -> GGUFFile:
    path = beginning + expected.ending
    if not os.path.exists(path):
        raise ModelFileError(f"{show_path(path)}: no such file; it is {expected}, and all parts are needed")
    part = read_gguf(path)
    found = _Split.of(part)
    if found != expected:
        raise part.error(f"it is {found or 'a whole model'}; beside the others it would be {expected}")
    return part


def _refuse_strangers(parts: Sequence[GGUFFile], split: _Split) -> None:
    """Parts that have the right names and numbers and yet are not of one model."""
    first = parts[0]
    owners: dict[str, GGUFFile] = {}
    for part in parts:
        for key, value in part.metadata.items():
            if key not in _OWN_KEYS and first.metadata.get(key) != value:
                raise part.error(
                    f"it is of another model than {show_path(first.path)}: {show_name(key)} differs"
                )
        for name in part.tensors:
            if name in owners:
                raise part.error(
                    f"it has the tensor {show_name(name)}, and so has {show_path(owners[name].path)}"
                )
            owners[name] = part
    if len(owners) != split.num_tensors:
        raise first.error(f"it is {split}, and all parts together have {len(owners)}; download them again")


def model_of(parts: Sequence[GGUFFile]) -> ModelFile:
    """Raises ModelFileError when they do not say what kind of model they are."""
    first = parts[0]
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise first.damaged("it does not say its general.architecture")
    return ModelFile(
        path=first.path,
        size_bytes=sum(part.size_bytes for part in parts),
        architecture=architecture,
        metadata={key: value for key, value in first.metadata.items() if key not in SPLIT_KEYS},
        tensors={name: tensor for part in parts for name, tensor in part.tensors.items()},
    )
