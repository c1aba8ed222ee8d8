"""Model families: from a model file's metadata to a `Program`. Knows nothing about how it is computed."""

from collections.abc import Callable

from segue.display import show_name, show_path
from segue.errors import ModelFileError
from segue.models import gemma2, gemma3, gpt2, granite, llama, olmo2, phi3, qwen2, qwen3, smollm3
from segue.models.decoder import Decoder
from segue.models.program import Program
from segue.weights.model_file import ModelFile

_FAMILIES: dict[str, Callable[[Decoder], Program]] = {
    "gemma2": gemma2.build,
    "gemma3": gemma3.build,
    "gpt2": gpt2.build,
    "granite": granite.build,
    "llama": llama.build,
    "olmo2": olmo2.build,
    "phi3": phi3.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3moe": qwen3.build,
    "smollm3": smollm3.build,
}


def build_program(model: ModelFile, max_model_len: int | None = None) -> Program:
    """The operations of the model in the file, for sequences of up to `max_model_len` tokens; None: its context.

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
    return build(Decoder(model, max_model_len))
