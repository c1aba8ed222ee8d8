"""A model as data: a flat list of operations over named row buffers.

A family file (`models/llama.py`) builds a `Program` once from a model file's metadata. The native runtime
reads the operations by the names of their attributes and compiles the list to one call
(`native/src/program_reader.cpp`); the reference runtime interprets it, line by line. A buffer is a
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
class Rope:
    """Rotary position embeddings (Su et al. 2021) of the leading `dim` dimensions of a head.

    Pair i of the vector at position p is rotated by p · theta^(-2i / dim) / factors[i].
    """

    theta: float
    dim: int
    interleaved: bool
    """True: pairs (2i, 2i+1), as GGUF's llama family stores q and k; False: pairs (i, i + dim/2)."""
    factors: tuple[float, ...] = ()
    """One for each pair, where the file has `rope_freqs`; empty: all 1."""


@dataclass(frozen=True)
class Attention:
    """Rotates q and k of `qkv`, writes k and v to the layer's KV and attends causally.

    qkv [rows, (num_heads + 2·num_kv_heads) · head_dim] → out [rows, num_heads · head_dim]. Query head h reads
    KV head h // (num_heads // num_kv_heads). Scores are scaled by 1/√head_dim.
    """

    qkv: str
    out: str
    layer: int
    """Which KV it has: attentions are numbered from 0, in order."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope


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
    """A model family's operations and the sizes that belong to none of them."""

    ops: tuple[Op, ...]
    widths: dict[str, int]
    """Width of each buffer."""
    vocab_size: int
    max_model_len: int

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Those of the operations that keep KV, by layer."""
        return tuple(op for op in self.ops if isinstance(op, Attention))
