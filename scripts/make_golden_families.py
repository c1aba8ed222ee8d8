"""Makes tests/golden/families: tiny random models of each family, and what an independent implementation computes.

`transformers` builds each model from a configuration of its family and computes the logits (f32, eager attention). Its
weights are written with the names, the order and the metadata that llama.cpp's converter gives files of the family;
`gguf` knows the names. Nothing of Segue is imported but the vocabulary of the tests' models.

    make golden

Of each case the folder holds
    NAME.gguf    matrices in f16, as `transformers` computed with; the rest in f32
    NAME.npz     ids [n] i32, rows [r] i32, logits [r, vocab] f32 after the ids of these rows
    NAME@N.npz   the same for a model that computes sequences of up to N ids otherwise than longer ones
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from tests.weights.make_gguf import add_tokenizer

VOCAB = 300
LENGTH = 48
ROWS_EVERY = 3
WINDOW = 8

FloatArray = npt.NDArray[np.float32]

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "attn_implementation": "eager", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    arch: gguf.MODEL_ARCH
    config: transformers.PretrainedConfig
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the family's files have beside what all have, by key without the architecture."""
    interleaved: bool = False
    """The converter puts the two dimensions of a rotary pair side by side, in q and k."""
    norm_shift: float = 0.0
    """What the converter adds to the weights of norms."""
    tensors: Mapping[str, FloatArray] = field(default_factory=dict)
    """What the converter makes of the configuration."""
    short_length: int | None = None
    """Up to how many ids are computed otherwise."""


def rope(theta: float = 10_000.0, kind: str = "default", **others: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **others}


def llama3_factors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> FloatArray:
    """How many times slower each pair turns (the converter's `rope_freqs`)."""
    lengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    between = np.clip((original / lengths - low) / (high - low), 0, 1)
    slower: FloatArray = (1 / ((1 - between) / factor + between)).astype(np.float32)
    return slower


def llama3() -> Family:
    scaling = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=rope(5e5, "llama3", **scaling)
    )
    return Family(
        gguf.MODEL_ARCH.LLAMA, config, {"rope.freq_base": 5e5, "rope.dimension_count": 8}, interleaved=True,
        tensors={"rope_freqs.weight": llama3_factors(8, 5e5, scaling)},
    )  # fmt: skip


def llama2() -> Family:
    """With a linear scaling, biases, and an output matrix of its own."""
    config = transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=False, attention_bias=True, head_dim=12,
        rope_parameters=rope(1e4, "linear", factor=2.0),
    )  # fmt: skip
    metadata = {
        "rope.freq_base": 1e4, "rope.dimension_count": 12, "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0, "attention.key_length": 12, "attention.value_length": 12,
    }  # fmt: skip
    return Family(gguf.MODEL_ARCH.LLAMA, config, metadata, interleaved=True)


def qwen2() -> Family:
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=False, rope_parameters=rope(1e6))
    return Family(gguf.MODEL_ARCH.QWEN2, config, {"rope.freq_base": 1e6})


def qwen3() -> Family:
    config = transformers.Qwen3Config(
        **SIZES, tie_word_embeddings=True, head_dim=12, rope_parameters=rope(1e6)
    )
    metadata = {"rope.freq_base": 1e6, "attention.key_length": 12, "attention.value_length": 12}
    return Family(gguf.MODEL_ARCH.QWEN3, config, metadata)


def gemma3() -> Family:
    """As its 4B and larger: six layers, the last of them with all that came before and a linear scaling."""
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7}, head_dim=12, query_pre_attn_scalar=12, sliding_window=WINDOW,
        rope_parameters={"full_attention": rope(1e6, "linear", factor=8.0), "sliding_attention": rope(1e4)},
    )  # fmt: skip
    assert [kind == "full_attention" for kind in config.layer_types] == [i == 5 for i in range(7)]
    metadata = {
        "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        "attention.key_length": 12, "attention.value_length": 12, "attention.sliding_window": WINDOW,
    }  # fmt: skip
    return Family(gguf.MODEL_ARCH.GEMMA3, config, metadata, norm_shift=1.0)


def gemma2() -> Family:
    config = transformers.Gemma2Config(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=12, query_pre_attn_scalar=12, sliding_window=WINDOW,
        attn_logit_softcapping=2.0, final_logit_softcapping=5.0, rope_parameters=rope(),
    )  # fmt: skip
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    metadata = {
        "attention.key_length": 12, "attention.value_length": 12, "attention.sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    }  # fmt: skip
    return Family(gguf.MODEL_ARCH.GEMMA2, config, metadata, norm_shift=1.0)


def mistral() -> Family:
    config = transformers.MistralConfig(
        **SIZES, tie_word_embeddings=False, head_dim=12, sliding_window=WINDOW, rope_parameters=rope()
    )
    metadata = {
        "rope.dimension_count": 12, "attention.key_length": 12, "attention.value_length": 12,
        "attention.sliding_window": WINDOW,
    }  # fmt: skip
    return Family(gguf.MODEL_ARCH.LLAMA, config, metadata, interleaved=True)


def phi3() -> Family:
    config = transformers.Phi3Config(
        **SIZES, tie_word_embeddings=False, sliding_window=WINDOW, rope_parameters=rope()
    )
    metadata = {
        "rope.freq_base": 1e4, "rope.dimension_count": 8, "rope.scaling.original_context_length": 1024,
        "attention.sliding_window": WINDOW,
    }  # fmt: skip
    return Family(gguf.MODEL_ARCH.PHI3, config, metadata)


def phi4() -> Family:
    """Phi-4-mini: three quarters of each head are rotated, with LongRoPE."""
    original, short, long = 24, [1.0, 1.1, 1.5], [1.2, 2.0, 9.0]
    config = transformers.Phi3Config(
        **SIZES, tie_word_embeddings=True, original_max_position_embeddings=original,
        rope_parameters=rope(
            kind="longrope", partial_rotary_factor=0.75, short_factor=short, long_factor=long,
            original_max_position_embeddings=original,
        ),
    )  # fmt: skip
    metadata = {
        "rope.freq_base": 1e4, "rope.dimension_count": 6, "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(1024 / original) / np.log(original))),
        "attention.sliding_window": 0,
    }  # fmt: skip
    tensors = {
        "rope_factors_short.weight": np.array(short, np.float32),
        "rope_factors_long.weight": np.array(long, np.float32),
    }
    return Family(gguf.MODEL_ARCH.PHI3, config, metadata, tensors=tensors, short_length=original)


def granite() -> Family:
    config = transformers.GraniteConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=rope(), embedding_multiplier=3.0,
        attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0,
    )  # fmt: skip
    metadata = {
        "rope.dimension_count": 8, "embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.4,
        "logit_scale": 2.0,
    }  # fmt: skip
    return Family(gguf.MODEL_ARCH.GRANITE, config, metadata, interleaved=True)


def olmo2() -> Family:
    config = transformers.Olmo2Config(**SIZES, tie_word_embeddings=False, rope_parameters=rope(5e5))
    return Family(gguf.MODEL_ARCH.OLMO2, config, {"rope.freq_base": 5e5})


def mixtral() -> Family:
    config = transformers.MixtralConfig(
        **{**SIZES, "intermediate_size": 32}, tie_word_embeddings=False, num_local_experts=5, num_experts_per_tok=2,
        rope_parameters=rope(1e6),
    )  # fmt: skip
    metadata = {"rope.freq_base": 1e6, "rope.dimension_count": 8, "expert_count": 5, "expert_used_count": 2}
    return Family(gguf.MODEL_ARCH.LLAMA, config, metadata, interleaved=True)


def qwen3moe() -> Family:
    config = transformers.Qwen3MoeConfig(
        **SIZES, tie_word_embeddings=False, head_dim=12, num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=24, norm_topk_prob=True, rope_parameters=rope(1e6),
    )  # fmt: skip
    metadata = {
        "rope.freq_base": 1e6, "attention.key_length": 12, "attention.value_length": 12, "expert_count": 6,
        "expert_used_count": 3, "expert_feed_forward_length": 24,
    }  # fmt: skip
    return Family(gguf.MODEL_ARCH.QWEN3MOE, config, metadata)


def smollm3() -> Family:
    """The last of its four layers has no RoPE."""
    config = transformers.SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 4}, tie_word_embeddings=True, rope_parameters=rope(5e6)
    )
    assert config.no_rope_layers == [1, 1, 1, 0]
    metadata = {"rope.freq_base": 5e6, "rope.dimension_count": 8}
    return Family(gguf.MODEL_ARCH.SMOLLM3, config, metadata, interleaved=True)


def gpt2() -> Family:
    others = {
        key: SIZES[key] for key in ("vocab_size", "attn_implementation", "bos_token_id", "eos_token_id")
    }
    config = transformers.GPT2Config(**others, n_positions=128, n_embd=32, n_layer=2, n_head=4)
    return Family(gguf.MODEL_ARCH.GPT2, config)


FAMILIES: tuple[Callable[[], Family], ...] = (
    gemma2, gemma3, gpt2, granite, llama2, llama3, mistral, mixtral, olmo2, phi3, phi4, qwen2, qwen3,
    qwen3moe, smollm3,
)  # fmt: skip


def random_weights(shape: tuple[int, ...], name: str, shift: float, rng: np.random.Generator) -> FloatArray:
    """Values of the sizes that make every part count: matrices (in f16's values), norms, biases."""
    if len(shape) > 1:
        scale = 0.6 if "embed" in name or "wte" in name or "wpe" in name else shape[-1] ** -0.5
        return (rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)
    if name.endswith("weight"):
        return (rng.uniform(0.5, 1.5, shape) - shift).astype(np.float32)
    return (rng.standard_normal(shape) * 0.3).astype(np.float32)


def interleave(rows: FloatArray, heads: int) -> FloatArray:
    """Rows of q or k whose pairs are halves of a head, with each pair's two side by side."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def with_experts_apart(state: Mapping[str, FloatArray]) -> Iterator[tuple[str, FloatArray]]:
    """Gate and up of all experts, which newer versions of `transformers` keep in one tensor, as two."""
    for name, values in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        else:
            yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), values


def gguf_tensors(family: Family, state: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    config = family.config
    names = gguf.get_tensor_name_map(family.arch, config.num_hidden_layers)
    tensors = dict(family.tensors)
    for theirs, values in with_experts_apart(state):
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, theirs
        if family.interleaved and ("q_proj" in theirs or "k_proj" in theirs):
            heads = config.num_attention_heads if "q_proj" in theirs else config.num_key_value_heads
            values = interleave(values, heads)
        if theirs.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = values.T
        shift = family.norm_shift if theirs.endswith("norm.weight") else 0.0
        tensors[name] = values + np.float32(shift)
    return tensors


def write_gguf(path: Path, family: Family, state: Mapping[str, FloatArray]) -> None:
    config = family.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[family.arch])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if family.arch == gguf.MODEL_ARCH.GPT2:
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in family.metadata.items():
        add: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        }  # fmt: skip
        add[type(value)](f"{gguf.MODEL_ARCH_NAMES[family.arch]}.{key}", value)
    add_tokenizer(writer, VOCAB)
    for name, values in gguf_tensors(family, state).items():
        writer.add_tensor(name, values.astype(np.float16 if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(name: str, family: Family, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(family.config).to(torch.float32).eval()
    rng = np.random.default_rng(0)
    state = {}
    for key, tensor in model.state_dict().items():
        if key != "lm_head.weight" or not family.config.tie_word_embeddings:
            state[key] = random_weights(tuple(tensor.shape), key, family.norm_shift, rng)
    model.load_state_dict({key: torch.from_numpy(values) for key, values in state.items()}, strict=False)
    model.tie_weights()
    write_gguf(folder / f"{name}.gguf", family, state)

    ids = rng.integers(3, VOCAB, LENGTH).astype(np.int32)
    save_logits(folder / f"{name}.npz", model, ids)
    if family.short_length is not None:
        save_logits(folder / f"{name}@{family.short_length}.npz", model, ids[: family.short_length])
    print(f"{name}: {(folder / f'{name}.gguf').stat().st_size} bytes")


def save_logits(path: Path, model: Any, ids: npt.NDArray[np.int32]) -> None:
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
    rows = np.arange(ROWS_EVERY - 1, len(ids), ROWS_EVERY, dtype=np.int32)
    np.savez_compressed(path, allow_pickle=False, ids=ids, rows=rows, logits=logits[rows])
    print(f"{path.stem}: {path.stat().st_size} bytes, logits of a spread of {logits.std():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden models of each family with transformers.")
    parser.add_argument("folder", type=Path, help="where they go")
    parser.add_argument("names", nargs="*", help="some of them; by default all")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        if not args.names or family.__name__ in args.names:
            make(family.__name__, family(), args.folder)


if __name__ == "__main__":
    main()
