"""Makes tests/golden/logits.npz: logits of SmolLM2-135M-Instruct by an independent implementation.

`transformers` computes them (LlamaForCausalLM, f32, eager attention) from the weights of the very GGUF file that
Segue runs, dequantised by the `gguf` package. Nothing of Segue is imported.

    python -m venv .envs/golden
    .envs/golden/bin/pip install torch==2.13.0 transformers gguf
    .envs/golden/bin/python scripts/make_golden_logits.py smollm2-135m-instruct-q4_1.gguf tests/golden/logits.npz

Of each prompt i the file holds
    ids_i [n] i32           the token ids
    logits_i [n, 256] f32   the logits of `vocabulary_ids` [256] i32 after each token
    top_ids_i [n, 8] i32, top_logits_i [n, 8] f32   the most likely ids, most likely first
    logsumexp_i [n] f32     of all logits
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import transformers

NUM_VOCABULARY_IDS = 256
NUM_TOP = 8

PROMPTS = (
    "The bridge was closed at noon, so we walked along the river to the next one.",
    "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "Le train de Genève arrive à 18 h 45",
    "In 1969, 3 people flew 384,400 km to",
    "日本の首都は東京",
)


def read_weights(reader: gguf.GGUFReader) -> dict[str, npt.NDArray[np.float32]]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}


def read_field(reader: gguf.GGUFReader, name: str) -> object:
    return reader.fields[name].contents()


def half_split(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k in transformers' order: GGUF has a head's rotary pairs interleaved, transformers in halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build_model(reader: gguf.GGUFReader) -> transformers.LlamaForCausalLM:
    def number(name: str) -> float:
        value = read_field(reader, f"llama.{name}")
        assert isinstance(value, int | float)
        return value

    heads, kv_heads = int(number("attention.head_count")), int(number("attention.head_count_kv"))
    layers = int(number("block_count"))
    weights = read_weights(reader)
    config = transformers.LlamaConfig(
        vocab_size=weights["token_embd.weight"].shape[0],
        hidden_size=int(number("embedding_length")),
        intermediate_size=int(number("feed_forward_length")),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(number("context_length")),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "token_embd"}
    for i in range(layers):
        for theirs, ours in (
            ("input_layernorm", "attn_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ):
            names[f"model.layers.{i}.{theirs}"] = f"blk.{i}.{ours}"
    state = {}
    for theirs, ours in names.items():
        weight = weights[f"{ours}.weight"]
        if ours.endswith("attn_q"):
            weight = half_split(weight, heads)
        elif ours.endswith("attn_k"):
            weight = half_split(weight, kv_heads)
        state[f"{theirs}.weight"] = torch.from_numpy(weight.copy())
    model.load_state_dict(state, strict=True)
    return model


def build_tokenizer(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    """SmolLM2's: byte-level BPE that first splits digits off, one by one."""
    tokens = read_field(reader, "tokenizer.ggml.tokens")
    merges = read_field(reader, "tokenizer.ggml.merges")
    types = read_field(reader, "tokenizer.ggml.token_type")
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    assert isinstance(types, list)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == control])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden logits with transformers.")
    parser.add_argument("model", type=Path, help="the GGUF file")
    parser.add_argument("output", type=Path, help="the .npz file to write")
    args = parser.parse_args()

    reader = gguf.GGUFReader(args.model)
    model = build_model(reader)
    tokenizer = build_tokenizer(reader)
    rng = np.random.default_rng(0)
    vocabulary_ids = np.sort(rng.choice(model.config.vocab_size, NUM_VOCABULARY_IDS, replace=False))
    arrays: dict[str, npt.NDArray[np.generic]] = {"vocabulary_ids": vocabulary_ids.astype(np.int32)}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        top = logits.topk(NUM_TOP)
        arrays[f"ids_{i}"] = np.array(ids, dtype=np.int32)
        arrays[f"logits_{i}"] = logits.numpy()[:, vocabulary_ids]
        arrays[f"top_ids_{i}"] = top.indices.numpy().astype(np.int32)
        arrays[f"top_logits_{i}"] = top.values.numpy()
        arrays[f"logsumexp_{i}"] = torch.logsumexp(logits.double(), -1).numpy().astype(np.float32)
        following = tokenizer.decode([int(top.indices[-1, 0])])
        print(f"{len(ids)} tokens: {prompt!r} → {following!r}")
    np.savez_compressed(args.output, allow_pickle=False, **arrays)
    print(f"{args.output}: {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
