"""Writes tiny random Llama models as GGUF files, tokenizer included, for tests of everything above them."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import gguf
import numpy as np

from segue.weights.dequantize import FORMATS
from segue.weights.model_file import TensorType

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_FIRST_MERGES = (
    "Ġ t", "h e", "Ġt he", "i n", "Ġ a", "in g", "e r", "o n", "Ġ s", "Ġa n", "Ġan d", "e n", "o u", "Ġ o",
    "Ġo f", "r e", "a t", "Ġ in", "Ġt o", "l l", "e s", "Ġ w", "Ġ b", "Ġ h", "i s", "o r", "i t", "e d",
)  # fmt: skip
"""Of three levels, so that merging has something to decide."""

SCALES = {
    TensorType.Q4_0: (0,), TensorType.Q4_1: (0, 2), TensorType.Q5_0: (0,), TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,), TensorType.Q2_K: (80, 82), TensorType.Q3_K: (108,), TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2), TensorType.Q6_K: (208,), TensorType.IQ4_NL: (0,), TensorType.IQ4_XS: (0,),
}  # fmt: skip
"""Where a block has its f16 scale, and that of its minimum."""


def tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 96,
    vocab: int = 320,
    context: int = 256,
    tensor_type: str = "Q4_1",
    embedding_type: str | None = None,
    tied: bool = True,
    rope_freqs: bool = False,
    seed: int = 0,
    metadata: Mapping[str, int | float | bool | str] | None = None,
    tensors_a_part: int = 0,
) -> Path:
    """Write a random Llama model and return `path`; with `tensors_a_part` in several files (`part_paths`).

    Matrices have `tensor_type`; `hidden`, `ffn` and `heads · head_dim` are multiples of its block, 32 or
    256 for the quantised ones. The embedding has `embedding_type`, by default Q8_0 in a quantised model. `metadata`
    is added to what the model needs; keys are written as they are. `vocab` is at least 300.
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_a_part)
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(vocab)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    add_tokenizer(writer, vocab)
    for key, value in (metadata or {}).items():
        _add_value(writer, key, value)

    rng = np.random.default_rng(seed)
    head_dim = head_dim or hidden // heads

    def matrix(name: str, outputs: int, inputs: int, kind: str = tensor_type, scale: float = 1.0) -> None:
        values = rng.standard_normal((outputs, inputs), np.float32) * np.float32(scale / np.sqrt(inputs))
        _add_tensor(writer, name, values, kind)

    def norm(name: str) -> None:
        _add_tensor(writer, name, rng.uniform(0.5, 1.5, hidden).astype(np.float32), "F32")

    # The spread of the embedding makes logits of a few nats, so that sampling has something to decide.
    packed = FORMATS[TensorType[tensor_type]].block_elements > 1
    kind = embedding_type or ("Q8_0" if packed else tensor_type)
    matrix("token_embd.weight", vocab, hidden, kind, scale=3.0)
    for layer in range(layers):
        norm(f"blk.{layer}.attn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", heads * head_dim, hidden)
        matrix(f"blk.{layer}.attn_k.weight", kv_heads * head_dim, hidden)
        matrix(f"blk.{layer}.attn_v.weight", kv_heads * head_dim, hidden)
        matrix(f"blk.{layer}.attn_output.weight", hidden, heads * head_dim)
        norm(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.ffn_gate.weight", ffn, hidden)
        matrix(f"blk.{layer}.ffn_up.weight", ffn, hidden)
        matrix(f"blk.{layer}.ffn_down.weight", hidden, ffn)
    norm("output_norm.weight")
    if not tied:
        matrix("output.weight", vocab, hidden, kind, scale=3.0)
    if rope_freqs:
        factors = np.linspace(1.0, 8.0, head_dim // 2, dtype=np.float32)
        _add_tensor(writer, "rope_freqs.weight", factors, "F32")

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def part_paths(path: Path) -> list[Path]:
    """Where the parts of `path` are, in order."""
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def byte_level_vocabulary(size: int) -> tuple[list[str], list[str]]:
    """`size` tokens (control tokens, the 256 bytes, merged pairs) and the merges that make them."""
    letters = _byte_letters()
    tokens = [*SPECIAL_TOKENS, *letters]
    assert size >= len(tokens) + len(_FIRST_MERGES), f"vocab={size} is too small"
    merges: list[str] = []
    seen = set(tokens)
    common = [*"etaoinshrdlucmfwypvbgkqjxz", "Ġ", *"ETAOINSHRDLU0123456789.,"]
    common += [letter for letter in letters if letter not in common]
    for merge in (*_FIRST_MERGES, *(f"{a} {b}" for a, b in product(common, common))):
        if len(tokens) == size:
            break
        token = merge.replace(" ", "")
        if token not in seen:
            seen.add(token)
            tokens.append(token)
            merges.append(merge)
    assert len(tokens) == size, f"vocab={size} is too large"
    return tokens, merges


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    tokens, merges = byte_level_vocabulary(vocab)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_value(writer: gguf.GGUFWriter, key: str, value: int | float | bool | str) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    raw_dtype = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, quantised(values, TensorType[kind]), raw_dtype=raw_dtype)


def quantised(values: np.ndarray, kind: TensorType) -> np.ndarray:
    """Rows of whole blocks for `values` [rows, elements]: bytes, or floats of the type.

    Near the values where the package can write the type; else random blocks of their spread, the same ones for the
    same values.
    """
    try:
        stored: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType(kind.value))
        return stored
    except NotImplementedError:
        rng = np.random.default_rng(np.frombuffer(values.tobytes()[:256], np.uint8))
        rows, elements = values.shape
        return random_blocks(kind, rows, elements, rng, spread=float(values.std()))


def random_blocks(
    kind: TensorType, rows: int, elements: int, rng: np.random.Generator, *, spread: float = 1.0
) -> np.ndarray:
    """[rows, bytes] of random blocks of a quantised type, whose values are around 0 with this spread."""
    layout = FORMATS[kind]
    blocks = rng.integers(0, 256, (rows * elements // layout.block_elements, layout.block_bytes), np.uint8)
    if kind is TensorType.MXFP4:
        blocks[:, 0] = 125 + round(np.log2(spread)) + rng.integers(-1, 2, len(blocks))
    else:
        scales = [np.zeros(len(blocks), np.float32) for _ in SCALES[kind]]
        scales[0] = rng.uniform(0.5, 1.5, len(blocks)).astype(np.float32)
        if len(scales) == 1:  # a format without minima is lopsided
            scales[0] *= rng.choice((-1, 1), len(blocks))
        _write_scales(kind, blocks, scales)
        values = layout.values(blocks)
        if len(scales) == 2:  # the minimum that brings the mean to 0
            _write_scales(kind, blocks, [np.zeros_like(scales[0]), np.ones_like(scales[0])])
            scales[1] = -values.mean(axis=1) / layout.values(blocks).mean(axis=1)
        _write_scales(kind, blocks, scales)
        factor = spread / layout.values(blocks).std()
        _write_scales(kind, blocks, [scale * factor for scale in scales])
    return blocks.reshape(rows, -1)


def _write_scales(kind: TensorType, blocks: np.ndarray, scales: Sequence[np.ndarray]) -> None:
    for at, scale in zip(SCALES[kind], scales, strict=True):
        blocks[:, at : at + 2] = scale.astype("<f2")[:, None].view(np.uint8)
