"""A model's file in fewer bits: what becomes what, and that there is a whole file or none."""

import os
import resource
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from segue.errors import FailedError, ModelFileError, UsageError
from segue.models import build_program
from segue.runtime.reference import ReferenceExecutor
from segue.weights.dequantize import FloatArray, dequantize
from segue.weights.gguf import load_gguf
from segue.weights.model_file import TensorType
from segue.weights.quantize import QUANTISERS, quantize
from segue.weights.quantize_model import quantize_model
from tests.weights import raw_gguf
from tests.weights.make_gguf import part_paths, tiny_llama

F32, F16, Q4_0, Q8_0 = TensorType.F32, TensorType.F16, TensorType.Q4_0, TensorType.Q8_0
CHANGED = {"general.file_type", "general.quantization_version"}


def raw_model(
    path: Path, tensors: dict[str, tuple[int, ...]], kind: TensorType = F32, fill: float = 1.0
) -> Path:
    """A file with these tensors, all of one value. Shapes are outermost first."""
    infos, data = [], b""
    for name, shape in tensors.items():
        infos.append(raw_gguf.tensor(name, shape[::-1], kind, len(data)))
        data += np.full(shape, fill, "<f4" if kind is F32 else "<f2").tobytes()
        data += bytes(-len(data) % 32)
    path.write_bytes(raw_gguf.gguf(tensors=infos, data=data))
    return path


def types(path: Path) -> dict[str, TensorType]:
    return {name: tensor.type for name, tensor in load_gguf(path).tensors.items()}


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("kind", QUANTISERS)
def test_matrices_are_rounded_and_all_else_is_as_it_was(
    tmp_path: Path, kind: TensorType, stored: str
) -> None:
    source = tiny_llama(tmp_path / "in.gguf", tensor_type=stored, tied=False, rope_freqs=True)
    before, after = quantize_model(source, tmp_path / "out.gguf", kind)
    assert (before, after) == (source.stat().st_size, (tmp_path / "out.gguf").stat().st_size)
    old, new = load_gguf(source), load_gguf(tmp_path / "out.gguf")
    assert list(new.tensors) == list(old.tensors)
    for name, tensor in new.tensors.items():
        was = old.tensors[name]
        assert tensor.shape == was.shape
        if len(tensor.shape) == 1:
            assert (tensor.type, tensor.data.tobytes()) == (F32, was.data.tobytes())
        else:
            assert tensor.type is (Q8_0 if name == "output.weight" else kind)
            assert tensor.data.tobytes() == quantize(dequantize(was), tensor.type).tobytes()
    theirs = [gguf.GGUFReader(source).fields, gguf.GGUFReader(tmp_path / "out.gguf").fields]
    fields = [
        {
            name: (field.types, field.contents())
            for name, field in each.items()
            if name not in CHANGED and "GGUF." not in name
        }
        for each in theirs
    ]
    assert fields[0] == fields[1]
    assert theirs[1]["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    file_type = gguf.LlamaFileType(theirs[1]["general.file_type"].contents())
    assert file_type.name == f"MOSTLY_{kind.name}"


def logits(path: Path) -> FloatArray:
    model = load_gguf(path)
    return ReferenceExecutor(build_program(model), model).logits(list(range(40, 60)))


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.02), ("Q5_0", 0.15), ("Q4_0", 0.3)])
def test_the_model_still_says_the_same(tmp_path: Path, kind: str, error: float) -> None:
    source = tiny_llama(tmp_path / "in.gguf", tensor_type="F32")
    quantize_model(source, tmp_path / "out.gguf", TensorType[kind])
    expected, got = logits(source), logits(tmp_path / "out.gguf")
    assert 0 < np.linalg.norm(got - expected) / np.linalg.norm(expected) < error


def test_what_becomes_what(tmp_path: Path) -> None:
    shapes = {
        "token_embd.weight": (4, 64), "position_embd.weight": (4, 64), "blk.0.attn_q.weight": (4, 64),
        "blk.0.ffn_up_exps.weight": (3, 4, 64), "blk.0.ffn_gate_inp.weight": (3, 64), "blk.0.attn_q.bias": (1, 64),
        "blk.0.attn_q_norm.weight": (2, 64), "blk.0.ssm_conv1d.weight": (64, 4), "blk.0.odd.weight": (32, 33),
        "output_norm.weight": (64,),
    }  # fmt: skip
    tied = raw_model(tmp_path / "tied.gguf", shapes)
    untied = raw_model(tmp_path / "untied.gguf", shapes | {"output.weight": (4, 64)})
    for source in (tied, untied):
        quantize_model(source, tmp_path / "out.gguf", Q4_0, replace=True)
        changed = {name: kind for name, kind in types(tmp_path / "out.gguf").items() if kind is not F32}
        matrices = {"blk.0.attn_q.weight": Q4_0, "blk.0.ffn_up_exps.weight": Q4_0}
        if source is tied:
            assert changed == {"token_embd.weight": Q8_0} | matrices
        else:
            assert changed == {"token_embd.weight": Q4_0, "output.weight": Q8_0} | matrices


def test_of_a_model_in_parts_a_whole_one(tmp_path: Path) -> None:
    whole = tiny_llama(tmp_path / "whole.gguf", tensor_type="F16")
    parts = part_paths(tiny_llama(tmp_path / "in.gguf", tensor_type="F16", tensors_a_part=5))
    quantize_model(whole, tmp_path / "a.gguf", Q4_0)
    quantize_model(parts[1], tmp_path / "b.gguf", Q4_0)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_another_alignment_becomes_the_usual_one(tmp_path: Path) -> None:
    entries = [raw_gguf.ARCHITECTURE, raw_gguf.entry("general.alignment", raw_gguf.U32, raw_gguf.u32(8))]
    infos = [raw_gguf.tensor("a.bias", [2], F32, 0), raw_gguf.tensor("b.weight", [32, 1], F32, 8)]
    data = np.arange(34, dtype="<f4").tobytes()
    (tmp_path / "in.gguf").write_bytes(raw_gguf.gguf(entries, infos, data, alignment=8))
    quantize_model(tmp_path / "in.gguf", tmp_path / "out.gguf", Q8_0)
    made = load_gguf(tmp_path / "out.gguf")
    assert "general.alignment" not in made.metadata
    assert dequantize(made.tensors["a.bias"]).tolist() == [0.0, 1.0]
    assert dequantize(made.tensors["b.weight"])[0, -1] == pytest.approx(33, rel=1e-3)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    source = raw_model(tmp_path / "in.gguf", {"a.weight": (2048, 8192)}, F16)
    tracemalloc.start()
    try:
        quantize_model(source, tmp_path / "out.gguf", Q8_0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2048 * 8192  # half of the source


# What is refused, and what is left then.


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "in.gguf", tensor_type="F16")
    (tmp_path / "out.gguf").write_text("dear to someone")
    with pytest.raises(UsageError, match=r"out\.gguf exists; --force replaces it"):
        quantize_model(source, tmp_path / "out.gguf", Q4_0)
    assert (tmp_path / "out.gguf").read_text() == "dear to someone"


def test_a_model_may_be_replaced_by_itself(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "in.gguf", tensor_type="F16")
    quantize_model(source, tmp_path / "out.gguf", Q4_0)
    quantize_model(source, source, Q4_0, replace=True)
    assert source.read_bytes() == (tmp_path / "out.gguf").read_bytes()
    assert left(tmp_path) == ["in.gguf", "out.gguf"]


@pytest.mark.parametrize(
    ("tensors", "kind", "fill", "pattern"),
    [
        ({"a.weight": (2, 32)}, F32, np.nan, "the tensor 'a.weight' cannot be Q4_0: a value is not finite"),
        (
            {"b.weight": (1, 32), "a.weight": (2, 32)},
            F32,
            1e30,
            "'b.weight' cannot be Q4_0: a value is too large",
        ),
        ({"norm.weight": (32,)}, F32, 1.0, "has no matrices of F32, F16, BF16 to quantize"),
        ({}, F32, 1.0, "has no matrices"),
    ],
)
def test_models_that_cannot_be_quantized(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], kind: TensorType, fill: float, pattern: str
) -> None:
    source = raw_model(tmp_path / "in.gguf", tensors, kind, fill)
    with pytest.raises(ModelFileError, match=pattern) as caught:
        quantize_model(source, tmp_path / "out.gguf", Q4_0)
    assert str(caught.value).startswith(str(source))
    assert left(tmp_path) == ["in.gguf"]


def test_nothing_is_rounded_twice(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "in.gguf", tensor_type="Q8_0")
    with pytest.raises(ModelFileError, match=r"'blk\.0\.attn_q\.weight' is Q8_0 already"):
        quantize_model(source, tmp_path / "out.gguf", Q4_0)
    assert left(tmp_path) == ["in.gguf"]


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "in.gguf", tensor_type="F16")
    with pytest.raises(UsageError, match="is a directory"):
        quantize_model(source, tmp_path, Q4_0, replace=True)
    with pytest.raises(UsageError, match="none: no such folder"):
        quantize_model(source, tmp_path / "none" / "out.gguf", Q4_0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(FailedError, match=r"out\.gguf cannot be written: File too large"):
            quantize_model(source, tmp_path / "out.gguf", Q4_0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left(tmp_path) == ["in.gguf"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "in.gguf", tensor_type="F16")
    seen = []

    def interrupt(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, tmp_path / "out.gguf", Q4_0, progress=interrupt)
    assert left(tmp_path) == ["in.gguf"]
    assert seen == sorted(seen)
    quantize_model(
        source, tmp_path / "out.gguf", Q4_0, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1][1] - 32 < seen[-1][0] <= seen[-1][1] == os.path.getsize(tmp_path / "out.gguf")
