"""A small vocabulary for tests: every byte, a few merges, control tokens and a user-defined one."""

from collections.abc import Mapping

from segue.tokens import Tokenizer
from segue.tokens.byte_level import token_to_bytes
from segue.weights.model_file import ModelFile

BYTES = [chr(i) for i in range(0x200) if token_to_bytes(chr(i)) != chr(i).encode() or 0x20 < i < 0x7F]
MERGES = ["a b", "ab c", "Ġ Ġ", "Ġ a", "h i", "Ã ©", "1 2", "! !", "s t", "o p", "st op"]
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
USER_DEFINED = ["</think>", "<tool>"]

TOKENS = [*CONTROL, *USER_DEFINED, *BYTES, *[merge.replace(" ", "") for merge in MERGES]]
KINDS = [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [1] * (len(BYTES) + len(MERGES))

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def metadata(changes: Mapping[str, object] | None = None) -> dict[str, object]:
    """The tokenizer's metadata; of `changes`, a None takes the key away."""
    keys: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    keys.update(changes or {})
    return {key: value for key, value in keys.items() if value is not None}


def small_model(changes: Mapping[str, object] | None = None) -> ModelFile:
    return ModelFile(
        path="small.gguf", size_bytes=0, architecture="llama", metadata=metadata(changes), tensors={}
    )


def small_tokenizer(changes: Mapping[str, object] | None = None) -> Tokenizer:
    return Tokenizer.from_model(small_model(changes))
