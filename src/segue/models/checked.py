"""What a family file reads from a `ModelFile`: each value and each tensor checked as it is taken."""

import math

from segue.display import show_name, show_path, show_value
from segue.errors import ModelFileError
from segue.weights.model_file import ModelFile, Tensor, TensorType

FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)


class CheckedModel:
    """A model file under questioning. Every method raises ModelFileError when the answer is unusable."""

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        self._taken: set[str] = set()

    def error(self, why: str) -> ModelFileError:
        return ModelFileError(f"{show_path(self._model.path)}: {why}")

    def has_value(self, key: str) -> bool:
        return key in self._model.metadata

    def value(self, key: str) -> object:
        """The value as stored; None when the key is missing."""
        return self._model.metadata.get(key)

    def integer(self, key: str, *, low: int, high: int, default: int | None = None) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key} is not an integer")
        if not low <= value <= high:
            raise self.error(f"{key}={value} is not in [{low}, {high}]")
        return value

    def positive(self, key: str, *, below: float = math.inf, default: float | None = None) -> float:
        """A finite number in (0, below)."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key} is not a number")
        if not 0 < value < below:
            raise self.error(f"{key}={value} is not in (0, {below:g})")
        return float(value)

    def string(self, key: str, *, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} is not a string")
        return value

    def only(self, key: str, supported: tuple[object, ...]) -> None:
        """Refuse a value that is not one of these; a missing key is fine."""
        if self.has_value(key) and self.value(key) not in supported:
            raise self.error(f"{key}={show_value(self.value(key))} is not supported")

    def _required(self, key: str, default: object | None) -> object:
        value = self._model.metadata.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing from its metadata")
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self._model.tensors

    def tensor(self, name: str) -> Tensor:
        if name not in self._model.tensors:
            raise self.error(f"the tensor {show_name(name)} is missing")
        self._taken.add(name)
        return self._model.tensors[name]

    def matrix(self, name: str, outputs: int, inputs: int) -> str:
        """The name of a weight matrix of this shape."""
        self._check_shape(self.tensor(name), (outputs, inputs))
        return name

    def matrices(self, name: str, count: int, outputs: int, inputs: int) -> str:
        """The name of `count` weight matrices of this shape, in one tensor."""
        self._check_shape(self.tensor(name), (count, outputs, inputs))
        return name

    def vector(self, name: str, width: int) -> str:
        """The name of a vector of floats."""
        tensor = self.tensor(name)
        self._check_shape(tensor, (width,))
        if tensor.type not in FLOATS:
            raise self.error(f"the tensor {show_name(name)} is {tensor.type.name}, it must be of floats")
        return name

    def _check_shape(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise self.error(
                f"the tensor {show_name(tensor.name)} has the shape {tensor.shape}, its metadata says {shape}"
            )

    def refuse_other_tensors(self) -> None:
        """A tensor nobody took (a bias, an adapter) would be missing from the answer."""
        for name in self._model.tensors:
            if name not in self._taken:
                raise self.error(
                    f"the tensor {show_name(name)} is not part of the {self._model.architecture} models "
                    "that are supported"
                )
