"""A model as data: a flat list of operations over named row buffers.

A family file (`models/llama.py`) builds a `Program` once from a model file's metadata. The native runtime
reads the operations by the names of their attributes and compiles the list to one call
(`native/src/program_reader.cpp`); the reference runtime interprets it, line by line. A buffer is a
matrix `[rows, width]` of f32, one row for each input token of a step; nothing in it outlives the step.
"""

from dataclasses import dataclass
from typing import Literal

Function = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""silu(x) = x · sigmoid(x); gelu(x) = x · Φ(x), and its approximation by tanh (Hendrycks & Gimpel 2016)."""


@dataclass(frozen=True)
class Embed:
    """out[r] = scale · weight[token[r]], plus positions[position[r] + first_position] where there are any."""

    weight: str
    out: str
    scale: float = 1.0
    positions: str | None = None
    """Learned position embeddings, a row for each position."""
    first_position: int = 0


@dataclass(frozen=True)
class RMSNorm:
    """out = x / sqrt(mean(x²) + eps) · weight, by row (Zhang & Sennrich 2019); added to out with `accumulate`."""

    x: str
    weight: str
    out: str
    eps: float
    accumulate: bool = False


@dataclass(frozen=True)
class LayerNorm:
    """out = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, by row (Ba et al. 2016)."""

    x: str
    weight: str
    bias: str
    out: str
    eps: float


@dataclass(frozen=True)
class NormParts:
    """RMSNorm in place of `count` parts of a row, each as wide as `weight`, from column `first` on.

    The heads of q and k where each is normalised by itself; one part, where all heads are normalised together.
    """

    x: str
    weight: str
    first: int
    count: int
    width: int
    eps: float


@dataclass(frozen=True)
class Linear:
    """out = scale · (x · Wᵀ + b), added to out with `accumulate`. W is `weights` stacked along their rows: q, k
    and v (or gate and up) are one operation with one output, in that order."""

    x: str
    weights: tuple[str, ...]
    out: str
    accumulate: bool = False
    biases: tuple[str | None, ...] = ()
    """One for each of `weights`, or None where it has none; empty: none has."""
    scale: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings (Su et al. 2021) of the leading `dim` dimensions of a head.

    Pair i of the vector at position p is rotated by p · theta^(-2i / dim) / factors[i], and multiplied by `scale`.
    """

    theta: float
    dim: int
    interleaved: bool
    """True: pairs (2i, 2i+1), as GGUF's llama family stores q and k; False: pairs (i, i + dim/2)."""
    factors: tuple[float, ...] = ()
    """One for each pair, where the file has `rope_freqs` or its metadata a scaling; empty: all 1."""
    scale: float = 1.0
    """What YaRN (Peng et al. 2023) and LongRoPE (Ding et al. 2024) multiply q and k by."""


@dataclass(frozen=True)
class Attention:
    """Rotates q and k of `qkv`, writes k and v to the layer's KV and attends causally.

    qkv [rows, (num_heads + 2·num_kv_heads) · head_dim] → out [rows, num_heads · head_dim]. Query head h reads
    KV head h // (num_heads // num_kv_heads). Scores are q · k · scale, then softcap · tanh(score / softcap).
    """

    qkv: str
    out: str
    layer: int
    """Which KV it has: attentions are numbered from 0, in order."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: nothing is rotated."""
    scale: float
    """1/√head_dim in most families."""
    softcap: float | None = None
    window: int | None = None
    """Position p sees the keys in (p - window, p]; None: all up to p."""
    sinks: str | None = None
    """A score for each query head that counts in the softmax and has no value (Xiao et al. 2023)."""


@dataclass(frozen=True)
class Activation:
    """out = function(x)"""

    x: str
    out: str
    function: Function


@dataclass(frozen=True)
class GLU:
    """out = function(x[:, :w]) · x[:, w:], the gate first (Shazeer 2020)."""

    x: str
    out: str
    function: Function


@dataclass(frozen=True)
class Experts:
    """out += Σ weight_e · down[e] · (function(gate[e] · x) · (up[e] · x)) over a row's experts e (Shazeer et al. 2017).

    A row's experts are the `used` of `count` with the largest of the scores router · x, the lower number where two are
    equal; the weights are the softmax of their scores. They are added in the order of their numbers.
    """

    x: str
    router: str
    """[count, width of x]"""
    gate: str
    """[count, width, width of x], and so is `up`; `down` is [count, width of out, width]."""
    up: str
    down: str
    out: str
    count: int
    used: int
    width: int
    function: Function


@dataclass(frozen=True)
class Logits:
    """logits = softcap · tanh(scale · x · Wᵀ / softcap), only for rows that are sampled or scored."""

    x: str
    weight: str
    scale: float = 1.0
    softcap: float | None = None


Op = Embed | RMSNorm | LayerNorm | NormParts | Linear | Attention | Activation | GLU | Experts | Logits


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
