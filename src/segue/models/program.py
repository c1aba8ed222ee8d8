"""A model as data: a flat list of operations over named row buffers.

A family file (`models/llama.py`) builds a `Program` once from a model file's metadata. The native runtime
compiles the list to one call; the reference runtime interprets it, line by line. A buffer is a
matrix `[rows, width]` of f32, one row for each input token of a step; nothing in it outlives the step.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Embed:
    """out[r] = weight[token[r]]"""

    weight: str
    out: str


@dataclass(frozen=True)
class RMSNorm:
    """out = x / sqrt(mean(x²) + eps) · weight, by row (Zhang & Sennrich 2019)."""

    x: str
    weight: str
    out: str
    eps: float


@dataclass(frozen=True)
class Linear:
    """out = x · Wᵀ, or out += x · Wᵀ with `accumulate`. W is `weights` stacked along their rows: q, k
    and v (or gate and up) are one operation with one output, in that order."""

    x: str
    weights: tuple[str, ...]
    out: str
    accumulate: bool = False


@dataclass(frozen=True)
class Attention:
    """Rotates q and k of `qkv` (RoPE, interleaved or half-split pairs), writes k and v to the layer's KV
    and attends causally.

    qkv [rows, (heads + 2·kv_heads) · head_dim] → out [rows, heads · head_dim]. Query head h reads KV head
    h // (heads // kv_heads). Scores are scaled by 1/√head_dim.
    """

    qkv: str
    out: str
    layer: int


@dataclass(frozen=True)
class SiluMul:
    """out = silu(x[:, :w]) · x[:, w:], the gate first (Shazeer 2020)."""

    x: str
    out: str


@dataclass(frozen=True)
class Logits:
    """logits = RMSNorm(x[wanted rows]) · Wᵀ, only for rows that are sampled or scored."""

    x: str
    norm: str
    eps: float
    weight: str


Op = Embed | RMSNorm | Linear | Attention | SiluMul | Logits


@dataclass(frozen=True)
class Program:
    """A model family's operations and the sizes they need."""

    ops: tuple[Op, ...]
    widths: dict[str, int]
    """Width of each buffer."""
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rope_theta: float
    rope_dim: int
    """Leading dimensions of a head that are rotated."""
    rope_interleaved: bool
    """True: pairs (2i, 2i+1), as GGUF's llama family stores q and k; False: pairs (i, i + rope_dim/2)."""
    rope_factors: tuple[float, ...] = ()
    """Divides the frequency of each pair, where the file has `rope_freqs`; empty: all 1."""
