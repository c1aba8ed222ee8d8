"""A program with every operation and every option of one, which no family has together."""

import numpy as np

from segue.models.program import (
    GLU,
    Activation,
    Attention,
    Embed,
    Experts,
    LayerNorm,
    Linear,
    Logits,
    NormParts,
    Op,
    Program,
    RMSNorm,
    Rope,
)
from segue.weights.model_file import ModelFile, Tensor, TensorType

VOCAB = 300
HIDDEN = 36
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 9
FFN = 22
CONTEXT = 1200
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


def every_operation() -> tuple[Program, ModelFile]:
    """f32 weights; windows shorter and longer than a tile of keys, and a layer without one."""
    rng = np.random.default_rng(7)
    tensors: dict[str, Tensor] = {}

    def tensor(name: str, *shape: int, scale: float = 1.0, shift: float = 0.0) -> str:
        values = (rng.standard_normal(shape) * scale + shift).astype(np.float32)
        tensors[name] = Tensor(name, shape, TensorType.F32, values.reshape(-1).view(np.uint8))
        return name

    def matrix(name: str, outputs: int, inputs: int) -> str:
        return tensor(name, outputs, inputs, scale=inputs**-0.5)

    def norm(name: str, width: int) -> str:
        return tensor(name, width, scale=0.2, shift=1.0)

    def layer(
        index: int, rope: Rope | None, window: int | None, softcap: float | None, sinks: bool
    ) -> list[Op]:
        q, k, v = (
            matrix(f"{index}.{name}", width, HIDDEN) for name, width in zip("qkv", (Q, KV, KV), strict=True)
        )
        biases = (tensor(f"{index}.q.bias", Q), None, tensor(f"{index}.v.bias", KV))
        return [
            LayerNorm("x", norm(f"{index}.norm", HIDDEN), tensor(f"{index}.norm.bias", HIDDEN), "normed", 1e-5),
            Linear("normed", (q, k, v), "qkv", biases=biases, scale=0.9),
            NormParts("qkv", norm(f"{index}.q_norm", HEAD_DIM), 0, HEADS, HEAD_DIM, 1e-6),
            NormParts("qkv", norm(f"{index}.k_norm", KV), Q, 1, KV, 1e-6),
            Attention(
                "qkv", "attention", index, HEADS, KV_HEADS, HEAD_DIM, rope, scale=0.3, softcap=softcap, window=window,
                sinks=tensor(f"{index}.sinks", HEADS) if sinks else None,
            ),
            Linear("attention", (matrix(f"{index}.o", HIDDEN, Q),), "branch"),
            RMSNorm("branch", norm(f"{index}.post", HIDDEN), "x", 1e-6, accumulate=True),
        ]  # fmt: skip

    def network(index: int, op: GLU | Activation) -> list[Op]:
        width = 2 * FFN if isinstance(op, GLU) else FFN
        up = matrix(f"{index}.up", width, HIDDEN)
        down = matrix(f"{index}.down", HIDDEN, FFN)
        return [
            RMSNorm("x", norm(f"{index}.ffn_norm", HIDDEN), "normed", 1e-6),
            Linear("normed", (up,), op.x, biases=(tensor(f"{index}.up.bias", width),)),
            op,
            Linear("activated", (down,), "x", accumulate=True, scale=0.5),
        ]

    def experts(index: int) -> list[Op]:
        """Two of four, among them two with the same scores."""
        router = matrix(f"{index}.router", 4, HIDDEN)
        scores = tensors[router].data.view(np.float32).reshape(4, HIDDEN)
        scores[3] = scores[1]
        gate, up = (
            tensor(f"{index}.{name}", 4, FFN, HIDDEN, scale=HIDDEN**-0.5) for name in ("gates", "ups")
        )
        down = tensor(f"{index}.downs", 4, HIDDEN, FFN, scale=FFN**-0.5)
        return [
            RMSNorm("x", norm(f"{index}.experts_norm", HIDDEN), "normed", 1e-6),
            Experts("normed", router, gate, up, down, "x", 4, 2, FFN, "silu"),
        ]

    positions = tensor("positions", CONTEXT + 2, HIDDEN, scale=0.3)
    ops: list[Op] = [Embed(matrix("embed", VOCAB, HIDDEN), "x", 3.0, positions, first_position=2)]
    ops += layer(0, Rope(1e4, 6, interleaved=False, scale=1.2), window=7, softcap=None, sinks=False)
    ops += network(0, GLU("gate_up", "activated", "gelu"))
    ops += layer(1, None, window=100, softcap=2.5, sinks=True)
    ops += network(1, Activation("up", "activated", "relu"))
    ops += experts(1)
    ops += layer(2, Rope(1e4, 8, interleaved=True), window=None, softcap=None, sinks=True)
    ops += network(2, GLU("gate_up", "activated", "gelu_tanh"))
    ops += layer(3, None, window=300, softcap=None, sinks=False)
    ops += network(3, Activation("up", "activated", "silu"))
    ops += [
        RMSNorm("x", norm("norm", HIDDEN), "normed", 1e-6),
        Logits("normed", matrix("output", VOCAB, HIDDEN), scale=4.0, softcap=6.0),
    ]
    widths = {
        "x": HIDDEN, "normed": HIDDEN, "branch": HIDDEN, "qkv": Q + 2 * KV, "attention": Q, "gate_up": 2 * FFN,
        "up": FFN, "activated": FFN,
    }  # fmt: skip
    program = Program(tuple(ops), widths, VOCAB, CONTEXT)
    return program, ModelFile("every operation", 0, "test", {}, tensors)
