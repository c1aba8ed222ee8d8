from pathlib import Path

import gguf
import numpy as np
import pytest

from segue.models import build_program
from segue.weights.dequantize import FORMATS, dequantize
from segue.weights.gguf import load_gguf
from segue.weights.model_file import Tensor, TensorType
from tests.weights.make_gguf import quantised, random_blocks, tiny_llama


@pytest.mark.parametrize("kind", TensorType)
def test_our_reader_sees_what_the_gguf_package_sees(tmp_path: Path, kind: TensorType) -> None:
    path = tiny_llama(
        tmp_path / "tiny.gguf",
        tensor_type=kind.name,
        hidden=256,
        ffn=256,
        heads=8,
        head_dim=32,
        tied=False,
        rope_freqs=True,
    )
    model = load_gguf(path)
    package = gguf.GGUFReader(path)
    assert model.path == str(path)
    assert model.size_bytes == path.stat().st_size
    assert model.architecture == "llama"
    fields = {name: field for name, field in package.fields.items() if not name.startswith("GGUF.")}
    assert list(model.metadata) == list(fields)
    for name, field in fields.items():
        assert model.metadata[name] == field.contents()
    assert list(model.tensors) == [tensor.name for tensor in package.tensors]
    for theirs in package.tensors:
        ours = model.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert int(ours.type) == int(theirs.tensor_type)
        assert ours.data.dtype == np.uint8
        assert ours.data.tobytes() == theirs.data.tobytes()


@pytest.mark.parametrize("kind", [kind for kind in TensorType if FORMATS[kind].block_elements > 1])
def test_random_weights_have_the_spread_that_is_asked_for(kind: TensorType) -> None:
    wanted = np.random.default_rng(kind).standard_normal((8, 512), np.float32) / 16
    for data in (
        quantised(wanted, kind),
        random_blocks(kind, 8, 512, np.random.default_rng(0), spread=1 / 16),
    ):
        values = dequantize(Tensor("w", wanted.shape, kind, data.reshape(-1)))
        assert values.std() == pytest.approx(1 / 16, rel=0.3)
        assert abs(values.mean()) < 1 / 160
    np.testing.assert_array_equal(quantised(wanted, kind), quantised(wanted, kind))


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        tiny_llama(tmp_path / f"{i}.gguf", seed=seed).read_bytes() for i, seed in enumerate((0, 0, 1))
    )
    assert first == again
    assert first != other


def test_options_reach_the_program(tmp_path: Path) -> None:
    path = tiny_llama(
        tmp_path / "tiny.gguf",
        layers=3,
        hidden=96,
        heads=6,
        kv_heads=3,
        head_dim=32,
        ffn=64,
        vocab=400,
        context=99,
    )
    program = build_program(load_gguf(path))
    heads = [(op.num_heads, op.num_kv_heads, op.head_dim) for op in program.attentions]
    assert heads == [(6, 3, 32)] * 3
    assert (program.vocab_size, program.max_model_len) == (400, 99)
    assert program.widths["x"] == 96
    assert program.widths["activated"] == 64
