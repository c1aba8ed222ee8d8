import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segue.errors import ModelFileError
from segue.models import build_program
from segue.models.program import GLU, Attention, Embed, Linear, Logits, NormParts, RMSNorm, Rope
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile, Tensor, TensorType
from tests.models.programs import rope_of
from tests.weights.make_gguf import tiny_llama

EPS = float(np.float32(1e-5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return load_gguf(tiny_llama(tmp_path_factory.mktemp("llama") / "tiny.gguf"))


def with_metadata(model: ModelFile, **changes: Any) -> ModelFile:
    """The model with keys `llama.<name>` changed ("__" is a dot), or removed when the value is None."""
    metadata = dict(model.metadata)
    for name, value in changes.items():
        key = f"llama.{name.replace('__', '.')}"
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    return replace(model, metadata=metadata)


def with_tensor(
    model: ModelFile,
    name: str,
    shape: tuple[int, ...],
    kind: TensorType = TensorType.F32,
    values: Sequence[float] | None = None,
) -> ModelFile:
    data = np.zeros(shape, np.float32) if values is None else np.array(values, np.float32)
    tensor = Tensor(name, shape, kind, data.view(np.uint8).reshape(-1))
    return replace(model, tensors={**model.tensors, name: tensor})


def without_tensor(model: ModelFile, name: str) -> ModelFile:
    return replace(model, tensors={key: value for key, value in model.tensors.items() if key != name})


def refused(model: ModelFile, pattern: str) -> None:
    with pytest.raises(ModelFileError, match=pattern) as caught:
        build_program(model)
    assert str(caught.value).startswith(f"{model.path}: ")
    assert str(caught.value).isprintable()


def test_operations_of_a_small_model(tmp_path: Path) -> None:
    program = build_program(load_gguf(tiny_llama(tmp_path / "tiny.gguf", layers=1)))
    assert program.ops == (
        Embed("token_embd.weight", "x"),
        RMSNorm("x", "blk.0.attn_norm.weight", "normed", EPS),
        Linear("normed", ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"), "qkv"),
        Attention(
            "qkv",
            "attention",
            0,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope=Rope(10_000.0, 16, True),
            scale=0.25,
        ),
        Linear("attention", ("blk.0.attn_output.weight",), "x", accumulate=True),
        RMSNorm("x", "blk.0.ffn_norm.weight", "normed", EPS),
        Linear("normed", ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"), "gate_up"),
        GLU("gate_up", "activated", "silu"),
        Linear("activated", ("blk.0.ffn_down.weight",), "x", accumulate=True),
        RMSNorm("x", "output_norm.weight", "normed", EPS),
        Logits("normed", "token_embd.weight"),
    )
    assert program.widths == {
        "x": 64, "normed": 64, "qkv": 128, "attention": 64, "gate_up": 192, "activated": 96,
    }  # fmt: skip


def test_every_buffer_is_written_before_it_is_read_and_has_a_width(model: ModelFile) -> None:
    program = build_program(model)
    written: set[str] = set()
    for op in program.ops:
        if not isinstance(op, Embed):
            read = op.qkv if isinstance(op, Attention) else op.x
            assert read in written, op
        if isinstance(op, Linear) and op.accumulate:
            assert op.out in written, op
        if not isinstance(op, Logits | NormParts):
            written.add(op.out)
    assert written == program.widths.keys()
    assert [op.layer for op in program.attentions] == list(range(2))


def test_smollm2(smollm2_path: Path) -> None:
    program = build_program(load_gguf(smollm2_path))
    assert len(program.attentions) == 30
    for op in program.attentions:
        assert (op.num_heads, op.num_kv_heads, op.head_dim) == (9, 3, 64)
    assert rope_of(program).theta == 100_000.0
    assert (program.vocab_size, program.max_model_len) == (49_152, 8192)
    assert program.widths["x"] == 576
    assert program.widths["activated"] == 1536
    assert len(program.ops) == 1 + 30 * 8 + 2


def test_output_matrix_of_its_own(tmp_path: Path) -> None:
    model = load_gguf(tiny_llama(tmp_path / "tiny.gguf", tied=False))
    last = build_program(model).ops[-1]
    assert isinstance(last, Logits)
    assert last.weight == "output.weight"


def test_defaults_of_missing_keys(model: ModelFile) -> None:
    program = build_program(with_metadata(model, rope__freq_base=None, vocab_size=None))
    assert rope_of(program).theta == 10_000.0
    assert program.vocab_size == 320


def test_kv_heads_default_to_heads(tmp_path: Path) -> None:
    model = load_gguf(tiny_llama(tmp_path / "tiny.gguf", kv_heads=4))
    program = build_program(with_metadata(model, attention__head_count_kv=None))
    assert [op.num_kv_heads for op in program.attentions] == [4, 4]


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    program = build_program(load_gguf(tiny_llama(tmp_path / "tiny.gguf", head_dim=32)))
    assert [op.head_dim for op in program.attentions] == [32, 32]
    assert program.widths["attention"] == 128
    assert program.widths["qkv"] == 256


def test_rope_of_part_of_a_head(model: ModelFile) -> None:
    program = build_program(with_metadata(model, rope__dimension_count=8))
    assert rope_of(program).dim == 8


def test_rope_factors(tmp_path: Path) -> None:
    model = load_gguf(tiny_llama(tmp_path / "tiny.gguf", rope_freqs=True))
    factors = rope_of(build_program(model)).factors
    assert factors == tuple(np.linspace(1, 8, 8, dtype=np.float32).tolist())
    scaled = with_metadata(model, rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert rope_of(build_program(scaled)).factors == tuple(2 * factor for factor in factors)


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        ({"rope__scaling__factor": 4.0}, (4.0,) * 8),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, (4.0,) * 8),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, ()),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, ()),
        ({"rope__scaling__type": "linear"}, ()),
    ],
)
def test_linear_rope_scaling(model: ModelFile, changes: dict[str, Any], factors: tuple[float, ...]) -> None:
    assert rope_of(build_program(with_metadata(model, **changes))).factors == factors


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 0}, r"llama.block_count=0 is not in \[1, "),
        ({"block_count": True}, "not an integer"),
        ({"block_count": 2.0}, "not an integer"),
        ({"block_count": 3}, r"the tensor 'blk\.2\.attn_norm\.weight' is missing"),
        ({"block_count": 2**31 - 1}, r"the tensor 'blk\.2\.attn_norm\.weight' is missing"),
        ({"block_count": 1}, r"the tensor 'blk\.1\..*' is not part of the llama models"),
        ({"embedding_length": None}, "missing"),
        ({"embedding_length": 63}, "no multiple of its 4 attention heads"),
        ({"embedding_length": 128}, r"shape \(320, 64\), its metadata says \(320, 128\)"),
        ({"feed_forward_length": 64}, r"shape \(96, 64\), its metadata says \(64, 64\)"),
        ({"feed_forward_length": [96, 96]}, "not an integer"),
        ({"attention__head_count": 0}, "not in"),
        ({"attention__head_count": 2**40}, "not in"),
        ({"attention__head_count": 3, "attention__head_count_kv": 2}, "cannot be shared evenly"),
        ({"attention__head_count_kv": 3}, "4 attention heads cannot be shared evenly by 3 KV heads"),
        ({"attention__head_count_kv": 8}, r"=8 is not in \[1, 4\]"),
        ({"attention__head_count_kv": 1}, r"attn_k.weight' has the shape"),
        ({"attention__key_length": 32}, r"keys of 32|has the shape"),
        ({"attention__value_length": 8}, "keys of 16 and values of 8 dimensions"),
        ({"attention__layer_norm_rms_epsilon": None}, "missing"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "not in"),
        ({"attention__layer_norm_rms_epsilon": -1e-5}, "not in"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "nan is not in"),
        ({"attention__layer_norm_rms_epsilon": math.inf}, "inf is not in"),
        ({"attention__layer_norm_rms_epsilon": "1e-5"}, "not a number"),
        ({"context_length": None}, "missing"),
        ({"context_length": 0}, "not in"),
        ({"context_length": 2**31}, "not in"),
        ({"vocab_size": 319}, "token_embd.weight has 320 rows, llama.vocab_size is 319"),
        ({"rope__freq_base": 0.0}, "not in"),
        ({"rope__freq_base": math.nan}, "not in"),
        ({"rope__dimension_count": 7}, "odd"),
        ({"rope__dimension_count": 18}, r"not in \[2, 16\]"),
        ({"rope__scaling__type": "yarn"}, "'yarn' is not supported; known: none, linear"),
        ({"rope__scaling__type": 1}, "not a string"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": -2.0}, "not in"),
        ({"rope__scaling__factor": math.nan}, "not in"),
        ({"rope__scaling__attn_factor": 0.5}, "not supported"),
        ({"rope__scale_linear": 2.0}, "not supported"),
        ({"expert_count": 8}, "llama.expert_used_count is missing"),
        ({"expert_count": 8, "expert_used_count": 9}, r"expert_used_count=9 is not in \[1, 8\]"),
        (
            {"expert_count": 8, "expert_used_count": 2},
            r"the tensor 'blk\.0\.ffn_gate_inp\.weight' is missing",
        ),
        ({"expert_count": [8] * 100_000}, "llama.expert_count is not an integer"),
        ({"expert_weights_scale": 2.5}, "not supported"),
        ({"attention__causal": False}, "not supported"),
        ({"attention__max_alibi_bias": 8.0}, "not supported"),
        ({"attention__scale": 0.5}, "not supported"),
        ({"attention__sliding_window": -1}, "not in"),
        (
            {"attention__sliding_window_pattern": [True]},
            "neither a number nor true or false for each of 2 layers",
        ),
        ({"attention__sliding_window_pattern": [1, 0]}, "neither a number nor true or false"),
        ({"logit_scale": 8.0}, "not supported"),
    ],
)
def test_metadata_that_is_refused(model: ModelFile, changes: dict[str, Any], pattern: str) -> None:
    refused(with_metadata(model, **changes), pattern)


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_count": 0},
        {"attention__causal": True},
        {"logit_scale": 1.0},
        {"rope__scaling__attn_factor": 1.0},
        {"attention__sliding_window": 0},
    ],
)
def test_neutral_values_change_nothing(model: ModelFile, changes: dict[str, Any]) -> None:
    assert build_program(with_metadata(model, **changes)) == build_program(model)


def test_windows(model: ModelFile) -> None:
    def windows(**changes: Any) -> list[int | None]:
        return [op.window for op in build_program(with_metadata(model, **changes)).attentions]

    assert windows(attention__sliding_window=8) == [8, 8]
    assert windows(attention__sliding_window=8, attention__sliding_window_pattern=2) == [8, None]
    assert windows(attention__sliding_window=8, attention__sliding_window_pattern=[False, True]) == [None, 8]
    assert windows(attention__sliding_window_pattern=[False, True]) == [None, None]


def test_tokenizer_of_another_size(model: ModelFile) -> None:
    tokens = {"tokenizer.ggml.tokens": ["a"] * 321}
    refused(replace(model, metadata={**model.metadata, **tokens}), "the tokenizer has 321 tokens")


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_q.weight",
        "blk.1.attn_k.weight", "blk.0.attn_v.weight", "blk.0.attn_output.weight", "blk.1.ffn_norm.weight",
        "blk.1.ffn_gate.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight",
    ],
)  # fmt: skip
def test_each_tensor_must_be_there_in_its_shape(model: ModelFile, name: str) -> None:
    refused(without_tensor(model, name), f"the tensor '{name}' is missing")
    rows, *rest = model.tensors[name].shape
    refused(with_tensor(model, name, (rows + 1, *rest)), "has the shape|the tokenizer has 320 tokens")
    refused(with_tensor(model, name, (rows, *rest, 1)), "has the shape")


def test_norms_must_be_floats(model: ModelFile) -> None:
    refused(with_tensor(model, "output_norm.weight", (64,), TensorType.Q8_0), "is Q8_0, it must be of floats")


def test_a_tensor_that_nothing_would_use(model: ModelFile) -> None:
    refused(with_tensor(model, "blk.0.attn_q.scale", (64,)), "the tensor 'blk.0.attn_q.scale' is not part of")


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_rope_factors_must_be_positive(model: ModelFile, factor: float) -> None:
    refused(with_tensor(model, "rope_freqs.weight", (8,), values=[factor] * 8), "not a positive number")


def test_rope_factors_must_be_one_for_each_pair(model: ModelFile) -> None:
    refused(with_tensor(model, "rope_freqs.weight", (4,)), "has the shape")
    refused(with_tensor(model, "rope_freqs.weight", (8,), TensorType.F16), "must be F32")


def test_unknown_architecture(model: ModelFile) -> None:
    refused(
        replace(model, architecture="mamba"),
        "the architecture 'mamba' is not supported; known: gemma2, gemma3, gpt2, granite, llama, ",
    )
    refused(replace(model, architecture="x\n" * 1000), "is not supported")
