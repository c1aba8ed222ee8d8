"""Model families: from a model file's metadata to a `Program`. Knows nothing about how it is computed."""

from collections.abc import Callable

from segue.display import show_name, show_path
from segue.errors import ModelFileError
from segue.models import gemma3, llama, qwen2, qwen3
from segue.models.program import Program
from segue.weights.model_file import ModelFile

_FAMILIES: dict[str, Callable[[ModelFile], Program]] = {
    "gemma3": gemma3.build,
    "llama": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


def build_program(model: ModelFile) -> Program:
    """The operations of the model in the file.

    Raises ModelFileError when its architecture is unknown, or its tensors and metadata contradict
    each other or ask for something that is not supported.
    """
    build = _FAMILIES.get(model.architecture)
    if build is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelFileError(
            f"{show_path(model.path)}: the architecture {show_name(model.architecture)} is not supported; "
            f"known: {known}"
        )
    return build(model)
