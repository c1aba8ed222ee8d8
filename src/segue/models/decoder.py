"""What decoders of transformers have in common (Vaswani et al. 2017), read from a file with GGUF's names.

A family file says which parts its layers are made of; each part is taken from the file, checked, and comes back as
operations on the buffers named here:

    x        the residual stream          qkv, attention       a layer's attention, before and after
    normed   x through a norm             gate_up, activated   its feed-forward network
    branch   what a layer's half adds to x, where that is normalised first
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from segue.display import show_name
from segue.models.checked import CheckedModel
from segue.models.program import (
    GLU,
    Activation,
    Attention,
    Embed,
    Experts,
    Function,
    LayerNorm,
    Linear,
    Logits,
    NormParts,
    Op,
    Program,
    RMSNorm,
    Rope,
)
from segue.weights.model_file import ModelFile, TensorType

_MAX_COUNT = 2**31 - 1
_DEFAULT_ROPE_THETA = 10_000.0

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
"""Keys that change what is computed, with the values that mean they do not. Other values of a key that the family
has not read are refused."""


@dataclass(frozen=True)
class Sizes:
    """Hyperparameters, checked against each other."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


class Decoder:
    """A model file under questioning by its family. Every method raises ModelFileError for what does not fit.

    `max_model_len`: how long sequences may become, for the families that compute short ones otherwise.
    """

    def __init__(self, model: ModelFile, max_model_len: int | None = None) -> None:
        self.checked = CheckedModel(model)
        self._model = model
        self._prefix = model.architecture
        self._read: set[str] = set()
        self.sizes = self._sizes()
        self.longest = min(max_model_len or self.sizes.context, self.sizes.context)

    # ---- values --------------------------------------------------------------------------------------------------

    def key(self, name: str) -> str:
        """The key in the file, which counts as read from now on."""
        self._read.add(name)
        return f"{self._prefix}.{name}"

    def count(self, name: str, *, low: int = 1, high: int = _MAX_COUNT, default: int | None = None) -> int:
        return self.checked.integer(self.key(name), low=low, high=high, default=default)

    def factor(self, name: str, default: float = 1.0) -> float:
        """A positive number; 0 and a missing key mean `default`."""
        if self.checked.value(self.key(name)) == 0.0:
            return default
        return self.checked.positive(self.key(name), default=default)

    def cap(self, name: str) -> float | None:
        """A positive number; None for 0 and a missing key."""
        return self.factor(name) if self.checked.value(self.key(name)) else None

    @property
    def rms_eps(self) -> float:
        return self.checked.positive(self.key("attention.layer_norm_rms_epsilon"), below=1.0)

    @property
    def layer_norm_eps(self) -> float:
        return self.checked.positive(self.key("attention.layer_norm_epsilon"), below=1.0)

    def _sizes(self) -> Sizes:
        checked = self.checked
        hidden = self.count("embedding_length")
        heads = self.count("attention.head_count")
        kv_heads = self.count("attention.head_count_kv", high=heads, default=heads)
        if heads % kv_heads:
            raise checked.error(f"{heads} attention heads cannot be shared evenly by {kv_heads} KV heads")
        if not checked.has_value(self.key("attention.key_length")) and hidden % heads:
            raise checked.error(
                f"{self.key('embedding_length')}={hidden} is no multiple of its {heads} attention heads"
            )
        head_dim = self.count("attention.key_length", low=2, default=hidden // heads)
        value_dim = self.count("attention.value_length", default=head_dim)
        if value_dim != head_dim:
            raise checked.error(f"keys of {head_dim} and values of {value_dim} dimensions are not supported")
        return Sizes(
            layers=self.count("block_count"),
            hidden=hidden,
            ffn=self.count("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=self._vocab(),
            context=self.count("context_length"),
        )

    def _vocab(self) -> int:
        """How many ids there are: the rows of the embedding, which the metadata may not contradict."""
        checked = self.checked
        vocab = checked.tensor("token_embd.weight").shape[0]
        declared = self.count("vocab_size", default=vocab)
        tokens = checked.value("tokenizer.ggml.tokens")
        num_tokens = len(tokens) if isinstance(tokens, list) else vocab
        if not vocab == declared == num_tokens:
            raise checked.error(
                f"token_embd.weight has {vocab} rows, {self.key('vocab_size')} is {declared}, "
                f"the tokenizer has {num_tokens} tokens"
            )
        return vocab

    def windows(self, period: int, default: int = 0) -> Iterator[int | None]:
        """Each layer's window; None for those that see all, which are every `period`-th, and none for 0.

        The file may have another period, or say it of each layer. Without a window all layers see all.
        """
        window = self.count("attention.sliding_window", low=0, default=default) or None
        key, layers = self.key("attention.sliding_window_pattern"), self.sizes.layers
        pattern = self.checked.value(key)
        if not isinstance(pattern, list):
            period = self.count("attention.sliding_window_pattern", low=0, default=period)
            return (window if period == 0 or (layer + 1) % period else None for layer in range(layers))
        if len(pattern) != layers or not all(isinstance(is_local, bool) for is_local in pattern):
            raise self.checked.error(
                f"{key} is neither a number nor true or false for each of {layers} layers"
            )
        return (window if is_local else None for is_local in pattern)

    def rope(
        self, *, interleaved: bool, theta: float | None = None, factors: tuple[float, ...] | None = None
    ) -> Rope:
        """As the file says, but for `theta` and `factors` where they are given."""
        head_dim = self.sizes.head_dim
        dim = self.count("rope.dimension_count", low=2, high=head_dim, default=head_dim)
        if dim % 2:
            raise self.checked.error(f"{self.key('rope.dimension_count')}={dim} is odd")
        if theta is None:
            theta = self.checked.positive(self.key("rope.freq_base"), default=_DEFAULT_ROPE_THETA)
        return Rope(theta, dim, interleaved, self._rope_factors(dim) if factors is None else factors)

    def _rope_factors(self, dim: int) -> tuple[float, ...]:
        """What divides each pair's frequency: `rope_freqs` (Llama 3), times linear scaling's factor."""
        linear = self._linear_rope_scaling()
        if not self.checked.has_tensor("rope_freqs.weight"):
            return () if linear == 1.0 else (linear,) * (dim // 2)
        return tuple(linear * factor for factor in self.positive_vector("rope_freqs.weight", dim // 2))

    def long_rope(self) -> Rope:
        """LongRoPE (Ding et al. 2024) over halves of a head, where the file has its factors.

        A file has two sets of them: for sequences up to `original_context_length`, and for longer ones. Which of them
        holds depends on `max_model_len` alone: the short ones if no sequence may become longer than that, else the
        long ones for all, from the first token on. A sequence that grew out of one set would need all its keys anew.
        """
        names = {kind: f"rope_factors_{kind}.weight" for kind in ("short", "long")}
        if not any(self.checked.has_tensor(name) for name in names.values()):
            return self.rope(interleaved=False)
        self.checked.only(self.key("rope.scaling.type"), ("longrope",))
        plain = self.rope(interleaved=False, factors=())
        factors = {kind: self.positive_vector(name, plain.dim // 2) for kind, name in names.items()}
        original = self.count("rope.scaling.original_context_length")
        used = factors["short" if self.longest <= original else "long"]
        return Rope(plain.theta, plain.dim, False, used, self.factor("rope.scaling.attn_factor"))

    def positive_vector(self, name: str, width: int) -> tuple[float, ...]:
        """A small vector of positive numbers that becomes part of the operations."""
        tensor = self._model.tensors[self.checked.vector(name, width)]
        if tensor.type is not TensorType.F32:
            raise self.checked.error(f"{name} is {tensor.type.name}, it must be F32")
        factors = tuple(np.frombuffer(tensor.data, "<f4").tolist())
        if not all(0 < factor < math.inf for factor in factors):
            raise self.checked.error(f"{name} has a factor that is not a positive number")
        return factors

    def _linear_rope_scaling(self) -> float:
        kind = self.checked.string(self.key("rope.scaling.type"), default="linear")
        if kind == "none":
            return 1.0
        if kind != "linear":
            raise self.checked.error(
                f"{self.key('rope.scaling.type')}={show_name(kind)} is not supported; known: none, linear"
            )
        return self.factor("rope.scaling.factor")  # GGUF writers use 0 for "not scaled".

    # ---- operations ----------------------------------------------------------------------------------------------

    def embed(self, scale: float = 1.0, *, positions: bool = False) -> list[Op]:
        """With `positions`, the file has learned ones for all of its context."""
        sizes, matrix = self.sizes, self.checked.matrix
        weight = matrix("token_embd.weight", sizes.vocab, sizes.hidden)
        learned = matrix("position_embd.weight", sizes.context, sizes.hidden) if positions else None
        return [Embed(weight, "x", scale, learned)]

    def rms_norm(self, name: str, x: str = "x", out: str = "normed", *, accumulate: bool = False) -> RMSNorm:
        return RMSNorm(
            x, self.checked.vector(f"{name}.weight", self.sizes.hidden), out, self.rms_eps, accumulate
        )

    def layer_norm(self, name: str) -> LayerNorm:
        weight, bias = (
            self.checked.vector(f"{name}.{part}", self.sizes.hidden) for part in ("weight", "bias")
        )
        return LayerNorm("x", weight, bias, "normed", self.layer_norm_eps)

    def linear(
        self,
        x: str,
        out: str,
        inputs: int,
        weights: dict[str, int],
        *,
        biases: bool = False,
        accumulate: bool = False,
        scale: float = 1.0,
    ) -> Linear:
        """`weights`: outputs by tensor name, without ".weight". With `biases` each may have one."""
        stack = tuple(
            self.checked.matrix(f"{name}.weight", outputs, inputs) for name, outputs in weights.items()
        )
        found = tuple(
            self.checked.vector(f"{name}.bias", outputs)
            if biases and self.checked.has_tensor(f"{name}.bias")
            else None
            for name, outputs in weights.items()
        )
        return Linear(x, stack, out, accumulate, found if any(found) else (), scale)

    def qkv(self, layer: int, x: str = "normed", *, biases: bool = False, fused: bool = False) -> Linear:
        """q, k and v of `x`: three tensors, or one that has them stacked."""
        block, sizes = f"blk.{layer}", self.sizes
        if fused:
            weights = {f"{block}.attn_qkv": sizes.q + 2 * sizes.kv}
        else:
            weights = {f"{block}.attn_q": sizes.q, f"{block}.attn_k": sizes.kv, f"{block}.attn_v": sizes.kv}
        return self.linear(x, "qkv", sizes.hidden, weights, biases=biases)

    def norm_heads(self, layer: int) -> list[Op]:
        """RMSNorm of each head of q and k by itself."""
        sizes, names = self.sizes, [f"blk.{layer}.attn_{part}_norm.weight" for part in "qk"]
        q, k = (self.checked.vector(name, sizes.head_dim) for name in names)
        return [
            NormParts("qkv", q, 0, sizes.heads, sizes.head_dim, self.rms_eps),
            NormParts("qkv", k, sizes.q, sizes.kv_heads, sizes.head_dim, self.rms_eps),
        ]

    def norm_all_heads(self, layer: int) -> list[Op]:
        """RMSNorm of all heads of q together, and of those of k."""
        sizes = self.sizes
        q = self.checked.vector(f"blk.{layer}.attn_q_norm.weight", sizes.q)
        k = self.checked.vector(f"blk.{layer}.attn_k_norm.weight", sizes.kv)
        return [
            NormParts("qkv", q, 0, 1, sizes.q, self.rms_eps),
            NormParts("qkv", k, sizes.q, 1, sizes.kv, self.rms_eps),
        ]

    def attention(
        self,
        layer: int,
        rope: Rope | None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Attention:
        """`scale` is 1/√head_dim if it is None."""
        sizes = self.sizes
        return Attention(
            "qkv",
            "attention",
            layer,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            rope,
            scale=1 / math.sqrt(sizes.head_dim) if scale is None else scale,
            softcap=softcap,
            window=window,
        )

    def attn_output(self, layer: int, *, biases: bool = False, scale: float = 1.0) -> Linear:
        """Added to x."""
        weights = {f"blk.{layer}.attn_output": self.sizes.hidden}
        return self.linear(
            "attention", "x", self.sizes.q, weights, biases=biases, accumulate=True, scale=scale
        )

    def glu(
        self, layer: int, function: Function = "silu", x: str = "normed", *, fused: bool = False
    ) -> list[Op]:
        """Gate and up of `x`: two tensors, or one that has them stacked."""
        block, sizes = f"blk.{layer}", self.sizes
        if fused:
            weights = {f"{block}.ffn_up": 2 * sizes.ffn}
        else:
            weights = {f"{block}.ffn_gate": sizes.ffn, f"{block}.ffn_up": sizes.ffn}
        return [
            self.linear(x, "gate_up", sizes.hidden, weights),
            GLU("gate_up", "activated", function),
        ]

    def activation(self, layer: int, function: Function) -> list[Op]:
        """A feed-forward network without a gate, with biases."""
        weights = {f"blk.{layer}.ffn_up": self.sizes.ffn}
        up = self.linear("normed", "gate_up", self.sizes.hidden, weights, biases=True)
        return [up, Activation("gate_up", "activated", function)]

    def ffn_down(self, layer: int, *, biases: bool = False, scale: float = 1.0) -> Linear:
        """Added to x."""
        weights = {f"blk.{layer}.ffn_down": self.sizes.hidden}
        return self.linear(
            "activated", "x", self.sizes.ffn, weights, biases=biases, accumulate=True, scale=scale
        )

    def network(self, layer: int, function: Function = "silu") -> list[Op]:
        """Added to x, of "normed": gate, up and down, or experts of them where the file has some."""
        if self.count("expert_count", low=0, default=0):
            return [self.experts(layer, function)]
        return [*self.glu(layer, function), self.ffn_down(layer)]

    def experts(self, layer: int, function: Function = "silu") -> Experts:
        """Added to x, of "normed"."""
        block, hidden = f"blk.{layer}", self.sizes.hidden
        count = self.count("expert_count")
        used = self.count("expert_used_count", high=count)
        width = self.count("expert_feed_forward_length", default=self.sizes.ffn)
        matrices = self.checked.matrices
        return Experts(
            "normed",
            self.checked.matrix(f"{block}.ffn_gate_inp.weight", count, hidden),
            matrices(f"{block}.ffn_gate_exps.weight", count, width, hidden),
            matrices(f"{block}.ffn_up_exps.weight", count, width, hidden),
            matrices(f"{block}.ffn_down_exps.weight", count, hidden, width),
            "x",
            count,
            used,
            width,
            function,
        )

    def normed_branch(self, branch: Linear, norm: str) -> list[Op]:
        """What `branch` would add to x, normalised before."""
        to_branch = Linear(branch.x, branch.weights, "branch", False, branch.biases, branch.scale)
        return [to_branch, self.rms_norm(norm, "branch", "x", accumulate=True)]

    def logits(self, *, scale: float = 1.0, softcap: float | None = None) -> list[Op]:
        """Of "normed". The embedding's weights where the file has none for the output."""
        name = "output.weight" if self.checked.has_tensor("output.weight") else "token_embd.weight"
        return [
            Logits("normed", self.checked.matrix(name, self.sizes.vocab, self.sizes.hidden), scale, softcap)
        ]

    def program(self, ops: list[Op]) -> Program:
        """Refuses a file with tensors that none of the operations reads, or with keys that would change them."""
        for name, neutral in _NEUTRAL.items():
            if name not in self._read:
                self.checked.only(self.key(name), neutral)
        self.checked.refuse_other_tensors()
        return Program(tuple(ops), self._widths(ops), self.sizes.vocab, self.sizes.context)

    def _widths(self, ops: list[Op]) -> dict[str, int]:
        sizes = self.sizes
        gates = 2 if any(isinstance(op, GLU) for op in ops) else 1
        widths = {
            "x": sizes.hidden,
            "normed": sizes.hidden,
            "branch": sizes.hidden,
            "qkv": sizes.q + 2 * sizes.kv,
            "attention": sizes.q,
            "gate_up": gates * sizes.ffn,
            "activated": sizes.ffn,
        }
        written = {op.out for op in ops if not isinstance(op, Logits | NormParts)}
        return {name: width for name, width in widths.items() if name in written}
