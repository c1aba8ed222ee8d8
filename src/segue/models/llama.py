"""The Llama family (Touvron et al. 2023): what GGUF calls "llama", SmolLM2 and TinyLlama among them.

x = embed(tokens)
each layer:  x += attn_output · attention(rope(q, k), v)    of RMSNorm(x)
             x += ffn_down · (silu(gate) · up)              of RMSNorm(x)
logits = output · RMSNorm(x)                                output is token_embd when tied
"""

import math
from dataclasses import dataclass

import numpy as np

from segue.display import show_name
from segue.models.checked import CheckedModel
from segue.models.program import Attention, Embed, Linear, Logits, Op, Program, RMSNorm, Rope, SiluMul
from segue.weights.model_file import ModelFile, TensorType

_MAX_COUNT = 2**31 - 1
_DEFAULT_ROPE_THETA = 10_000.0

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "llama.attention.causal": (True,),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.attention.sliding_window": (0,),
    "llama.attn_logit_softcapping": (0.0,),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.expert_count": (0,),
    "llama.final_logit_softcapping": (0.0,),
    "llama.logit_scale": (0.0, 1.0),
    "llama.residual_scale": (0.0, 1.0),
    "llama.rope.scale_linear": (0.0, 1.0),
    "llama.rope.scaling.attn_factor": (0.0, 1.0),
    "llama.use_parallel_residual": (False,),
}
"""Keys that change what is computed, with the values that mean they do not. Others are refused."""


@dataclass(frozen=True)
class _Sizes:
    """Hyperparameters, checked against each other."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention(self) -> int:
        return self.heads * self.head_dim


def build(model: ModelFile) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    checked = CheckedModel(model)
    for key, neutral in _NEUTRAL.items():
        checked.only(key, neutral)
    sizes = _sizes(checked)
    program = Program(
        ops=_ops(checked, sizes, _rope(checked, model, sizes.head_dim)),
        widths={
            "x": sizes.hidden,
            "normed": sizes.hidden,
            "qkv": sizes.qkv,
            "attention": sizes.attention,
            "gate_up": 2 * sizes.ffn,
            "activated": sizes.ffn,
        },
        vocab_size=sizes.vocab,
        max_model_len=checked.integer("llama.context_length", low=1, high=_MAX_COUNT),
    )
    checked.refuse_other_tensors()
    return program


def _sizes(checked: CheckedModel) -> _Sizes:
    hidden = checked.integer("llama.embedding_length", low=1, high=_MAX_COUNT)
    heads = checked.integer("llama.attention.head_count", low=1, high=_MAX_COUNT)
    kv_heads = checked.integer("llama.attention.head_count_kv", low=1, high=heads, default=heads)
    if heads % kv_heads:
        raise checked.error(f"{heads} attention heads cannot be shared evenly by {kv_heads} KV heads")
    if not checked.has_value("llama.attention.key_length") and hidden % heads:
        raise checked.error(f"llama.embedding_length={hidden} is no multiple of its {heads} attention heads")
    head_dim = checked.integer("llama.attention.key_length", low=2, high=_MAX_COUNT, default=hidden // heads)
    value_dim = checked.integer("llama.attention.value_length", low=1, high=_MAX_COUNT, default=head_dim)
    if value_dim != head_dim:
        raise checked.error(f"keys of {head_dim} and values of {value_dim} dimensions are not supported")
    return _Sizes(
        layers=checked.integer("llama.block_count", low=1, high=_MAX_COUNT),
        hidden=hidden,
        ffn=checked.integer("llama.feed_forward_length", low=1, high=_MAX_COUNT),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=_vocab(checked),
        eps=checked.positive("llama.attention.layer_norm_rms_epsilon", below=1.0),
    )


def _vocab(checked: CheckedModel) -> int:
    """How many ids there are: the rows of the embedding, which the metadata may not contradict."""
    vocab = checked.tensor("token_embd.weight").shape[0]
    declared = checked.integer("llama.vocab_size", low=1, high=_MAX_COUNT, default=vocab)
    tokens = checked.value("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else vocab
    if not vocab == declared == num_tokens:
        raise checked.error(
            f"token_embd.weight has {vocab} rows, llama.vocab_size is {declared}, "
            f"the tokenizer has {num_tokens} tokens"
        )
    return vocab


def _rope(checked: CheckedModel, model: ModelFile, head_dim: int) -> Rope:
    dim = checked.integer("llama.rope.dimension_count", low=2, high=head_dim, default=head_dim)
    if dim % 2:
        raise checked.error(f"llama.rope.dimension_count={dim} is odd")
    return Rope(
        theta=checked.positive("llama.rope.freq_base", default=_DEFAULT_ROPE_THETA),
        dim=dim,
        interleaved=True,
        factors=_rope_factors(checked, model, dim),
    )


def _ops(checked: CheckedModel, sizes: _Sizes, rope: Rope) -> tuple[Op, ...]:
    embedding = checked.matrix("token_embd.weight", sizes.vocab, sizes.hidden)
    ops: list[Op] = [Embed(embedding, "x")]
    for layer in range(sizes.layers):
        ops += _attention_block(checked, sizes, rope, layer)
        ops += _ffn_block(checked, sizes, layer)
    tied = not checked.has_tensor("output.weight")
    ops.append(
        Logits(
            x="x",
            norm=checked.vector("output_norm.weight", sizes.hidden),
            eps=sizes.eps,
            weight=embedding if tied else checked.matrix("output.weight", sizes.vocab, sizes.hidden),
        )
    )
    return tuple(ops)


def _attention_block(checked: CheckedModel, sizes: _Sizes, rope: Rope, layer: int) -> list[Op]:
    kv_width = sizes.kv_heads * sizes.head_dim
    norm = checked.vector(f"blk.{layer}.attn_norm.weight", sizes.hidden)
    q = checked.matrix(f"blk.{layer}.attn_q.weight", sizes.attention, sizes.hidden)
    k = checked.matrix(f"blk.{layer}.attn_k.weight", kv_width, sizes.hidden)
    v = checked.matrix(f"blk.{layer}.attn_v.weight", kv_width, sizes.hidden)
    output = checked.matrix(f"blk.{layer}.attn_output.weight", sizes.hidden, sizes.attention)
    return [
        RMSNorm("x", norm, "normed", sizes.eps),
        Linear("normed", (q, k, v), "qkv"),
        Attention("qkv", "attention", layer, sizes.heads, sizes.kv_heads, sizes.head_dim, rope),
        Linear("attention", (output,), "x", accumulate=True),
    ]


def _ffn_block(checked: CheckedModel, sizes: _Sizes, layer: int) -> list[Op]:
    norm = checked.vector(f"blk.{layer}.ffn_norm.weight", sizes.hidden)
    gate = checked.matrix(f"blk.{layer}.ffn_gate.weight", sizes.ffn, sizes.hidden)
    up = checked.matrix(f"blk.{layer}.ffn_up.weight", sizes.ffn, sizes.hidden)
    down = checked.matrix(f"blk.{layer}.ffn_down.weight", sizes.hidden, sizes.ffn)
    return [
        RMSNorm("x", norm, "normed", sizes.eps),
        Linear("normed", (gate, up), "gate_up"),
        SiluMul("gate_up", "activated"),
        Linear("activated", (down,), "x", accumulate=True),
    ]


def _rope_factors(checked: CheckedModel, model: ModelFile, rope_dim: int) -> tuple[float, ...]:
    """What divides each pair's frequency: `rope_freqs` (Llama 3), times linear scaling's factor."""
    linear = _linear_rope_scaling(checked)
    if not checked.has_tensor("rope_freqs.weight"):
        return () if linear == 1.0 else (linear,) * (rope_dim // 2)
    name = checked.vector("rope_freqs.weight", rope_dim // 2)
    tensor = model.tensors[name]
    if tensor.type is not TensorType.F32:
        raise checked.error(f"rope_freqs.weight is {tensor.type.name}, it must be F32")
    factors = tuple(linear * factor for factor in np.frombuffer(tensor.data, "<f4").tolist())
    if not all(0 < factor < math.inf for factor in factors):
        raise checked.error("rope_freqs.weight has a factor that is not a positive number")
    return factors


def _linear_rope_scaling(checked: CheckedModel) -> float:
    kind = checked.string("llama.rope.scaling.type", default="linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise checked.error(
            f"llama.rope.scaling.type={show_name(kind)} is not supported; known: none, linear"
        )
    if checked.value("llama.rope.scaling.factor") == 0.0:
        return 1.0  # GGUF writers use 0 for "not scaled".
    return checked.positive("llama.rope.scaling.factor", default=1.0)
