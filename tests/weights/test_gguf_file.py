import os
import re
import struct
import tracemalloc
from pathlib import Path

import gguf as package
import pytest

from segue.errors import ModelFileError
from segue.weights import gguf_file as reader
from segue.weights.dequantize import FORMATS
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile, TensorType
from tests.weights.make_gguf import tiny_llama
from tests.weights.raw_gguf import (
    ARCHITECTURE,
    ARRAY,
    STRING,
    U32,
    array,
    entry,
    gguf,
    string,
    tensor,
    u32,
    u64,
)

F32, Q4_0, Q4_K, IQ2_XS = 0, 2, 12, 17


def load(tmp_path: Path, content: bytes) -> ModelFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return load_gguf(path)


def refused(tmp_path: Path, content: bytes, pattern: str) -> None:
    """The file is refused in one line that names it and says `pattern`."""
    with pytest.raises(ModelFileError, match=pattern) as caught:
        load(tmp_path, content)
    message = str(caught.value)
    assert message.isprintable(), "one line, nothing that a terminal would interpret"
    assert str(tmp_path / "model.gguf") in message
    assert len(message) < 400


# The tables agree with the package that defines the format in Python.


def test_value_types_are_ggufs() -> None:
    assert {kind.name: kind.value for kind in reader.ValueType} == {
        kind.name: kind.value for kind in package.GGUFValueType
    }
    assert reader.VERSIONS[-1] == package.GGUF_VERSION
    assert struct.pack("<I", package.GGUF_MAGIC) == reader.MAGIC
    assert reader.DEFAULT_ALIGNMENT == package.GGUF_DEFAULT_ALIGNMENT


def test_tensor_types_are_ggmls() -> None:
    for kind in TensorType:
        theirs = package.GGMLQuantizationType[kind.name]
        assert theirs.value == kind.value
        layout = FORMATS[kind]
        assert (layout.block_elements, layout.block_bytes) == package.GGML_QUANT_SIZES[theirs]
    for number, name in reader.OTHER_TYPES.items():
        assert package.GGMLQuantizationType(number).name == name
    assert not reader.OTHER_TYPES.keys() & {int(kind) for kind in TensorType}


# What is read.


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(tmp_path: Path, version: int) -> None:
    model = load(tmp_path, gguf(version=u32(version)))
    assert model.architecture == "llama"
    assert model.tensors == {}


def test_every_value_type(tmp_path: Path) -> None:
    values = {
        0: ("<B", 200), 1: ("<b", -100), 2: ("<H", 60_000), 3: ("<h", -30_000), 4: ("<I", 4_000_000_000),
        5: ("<i", -2_000_000_000), 6: ("<f", 0.5), 7: ("<?", True),
        10: ("<Q", 2**64 - 1), 11: ("<q", -(2**63)), 12: ("<d", 0.1),
    }  # fmt: skip
    entries = [ARCHITECTURE]
    for kind, (layout, value) in values.items():
        entries.append(entry(f"one.{kind}", kind, struct.pack(layout, value)))
        entries.append(entry(f"two.{kind}", ARRAY, array(kind, 2, struct.pack(layout, value) * 2)))
        entries.append(entry(f"none.{kind}", ARRAY, array(kind, 0, b"")))
    entries.append(entry("text", STRING, string("Ġ€𝄞\n")))
    entries.append(entry("texts", ARRAY, array(STRING, 3, string("a") + string("") + string("é"))))
    metadata = load(tmp_path, gguf(entries)).metadata
    for kind, (_, value) in values.items():
        assert metadata[f"one.{kind}"] == value
        assert type(metadata[f"one.{kind}"]) is type(value)
        assert metadata[f"two.{kind}"] == [value, value]
        assert isinstance(two := metadata[f"two.{kind}"], list)
        assert type(two[0]) is type(value)
        assert metadata[f"none.{kind}"] == []
    assert metadata["text"] == "Ġ€𝄞\n"
    assert metadata["texts"] == ["a", "", "é"]


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    size = 64
    entries = [ARCHITECTURE, entry("general.alignment", U32, u32(alignment))]
    data = bytes(range(size)) + bytes(range(100, 100 + size))
    tensors = [tensor("a", [8, 2], F32, 0), tensor("b", [16], F32, size)]
    model = load(tmp_path, gguf(entries, tensors, data, alignment=alignment))
    assert model.tensors["a"].shape == (2, 8)
    assert model.tensors["a"].data.tobytes() == data[:size]
    assert model.tensors["b"].data.tobytes() == data[size:]


def test_tensor_data_is_a_read_only_view(tmp_path: Path) -> None:
    model = load_gguf(tiny_llama(tmp_path / "tiny.gguf"))
    data = model.tensors["token_embd.weight"].data
    assert not data.flags.owndata
    assert not data.flags.writeable


def test_reading_takes_no_memory_for_tensors(tmp_path: Path) -> None:
    """A file of 2 GB, most of it a hole."""
    size = 2**31
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf(tensors=[tensor("a", [2**13, 2**16], F32, 0)]))
    os.truncate(path, path.stat().st_size + size)
    tracemalloc.start()
    try:
        model = load_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert model.tensors["a"].data.nbytes == size
    assert peak < 2**20


# What is refused.


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=re.escape(f"{tmp_path}/none.gguf: no such file")):
        load_gguf(tmp_path / "none.gguf")


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=re.escape(f"{tmp_path} is a directory")):
        load_gguf(tmp_path)


def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        load_gguf(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(gguf())
    path.chmod(0)
    with pytest.raises(ModelFileError, match="cannot be read: Permission denied"):
        load_gguf(path)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "a\nb", "\udcff"])
def test_impossible_paths(name: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load_gguf(name)
    assert str(caught.value).isprintable()


def test_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match="cannot be read: Not a directory"):
        load_gguf(tmp_path / "file" / "model.gguf")


SMALL = tensor("a", [8], F32, 0)
DATA = bytes(32)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04 and more", "not a GGUF file"),
        (gguf(magic=b"GGML"), "not a GGUF file"),
        (b"GGUF", "it ends inside"),
        (gguf()[:23], "it ends inside"),
        (gguf(version=u32(1)), "GGUF version 1 is not supported"),
        (gguf(version=u32(4)), "GGUF version 4 is not supported"),
        (gguf(version=b"\0\0\0\3"), "big-endian"),
        (gguf(entries=[]), "general.architecture"),
        (gguf([entry("general.architecture", U32, u32(7))]), "general.architecture"),
        (gguf(num_entries=2**64 - 1), "claims 18446744073709551615 metadata keys"),
        (gguf(num_tensors=2**63), "claims 9223372036854775808 tensors"),
        (gguf(num_entries=2), "metadata key 1 is empty"),
        (gguf([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' is there twice"),
        (gguf(tensors=[SMALL, SMALL], data=DATA), "the tensor 'a' is there twice"),
        (gguf([ARCHITECTURE, entry("k", 13, b"")]), "unknown type 13"),
        (gguf([ARCHITECTURE, entry("k", ARRAY, array(99, 0, b""))]), "unknown type 99"),
        (gguf([ARCHITECTURE, entry("k", ARRAY, array(ARRAY, 0, b""))]), "array of arrays"),
        (gguf([ARCHITECTURE, entry("k", ARRAY, array(U32, 2**62, b""))]), "4611686018427387904 elements"),
        (gguf([ARCHITECTURE, entry("k", ARRAY, array(U32, 2**20, b""))]), "it ends inside the value of 'k'"),
        (gguf([ARCHITECTURE, entry("k", ARRAY, array(STRING, 2**20, b""))]), "claims 1048576 strings"),
        (gguf([ARCHITECTURE, entry("k", STRING, u64(2**64 - 1))]), "it ends inside the value of 'k'"),
        (gguf([ARCHITECTURE, entry("k", STRING, u64(1000) + b"short")]), "it ends inside the value of 'k'"),
        (gguf([ARCHITECTURE, entry("k", STRING, string(b"\xff\xfe"))]), "not valid UTF-8"),
        (gguf([ARCHITECTURE, entry(b"\xc3", U32, u32(0))]), "metadata key 1 is not valid UTF-8"),
        (gguf([ARCHITECTURE, entry("k", 7, b"\2")]), "neither true nor false"),
        (gguf([ARCHITECTURE, entry("k" * 999 + "\n", 13, b"")]), "unknown type"),
        (gguf([ARCHITECTURE, entry("general.alignment", U32, u32(0))]), "general.alignment is 0"),
        (gguf([ARCHITECTURE, entry("general.alignment", U32, u32(48))]), "general.alignment is 48"),
        (gguf([ARCHITECTURE, entry("general.alignment", STRING, string("32"))]), "not an integer"),
        (gguf([ARCHITECTURE, entry("split.count", U32, u32(3))]), "is a part.*does not say its split.no"),
        (gguf(tensors=[tensor("a", [], F32, 0)], data=DATA), "has 0 dimensions"),
        (gguf(tensors=[tensor("a", [1] * 5, F32, 0)], data=DATA), "has 5 dimensions"),
        (gguf(tensors=[tensor("a", [8, 0], F32, 0)], data=DATA), r"has the shape \(0, 8\)"),
        (gguf(tensors=[tensor("a", [2**63, 2**63], F32, 0)], data=DATA), "ends at byte"),
        (gguf(tensors=[tensor("a", [33], Q4_0, 0)], data=DATA), "no multiple of Q4_0's 32"),
        (
            gguf(tensors=[tensor("a", [288], Q4_K, 0)], data=DATA * 9),
            "288 elements, no multiple of Q4_K's 256",
        ),
        (gguf(tensors=[tensor("a", [256], Q4_K, 0)], data=bytes(143)), "ends at byte"),
        (
            gguf(tensors=[tensor("a", [256], IQ2_XS, 0)], data=DATA),
            "IQ2_XS, which is not supported; use.*Q4_1",
        ),
        (gguf(tensors=[tensor("a", [8], 4, 0)], data=DATA), "unknown type 4; supported are F32.*Q8_0"),
        (gguf(tensors=[tensor("a", [8], F32, 16)], data=DATA * 2), "no multiple of the alignment 32"),
        (gguf(tensors=[tensor("a", [8], F32, 32)], data=DATA), "ends at byte"),
        (gguf(tensors=[tensor("a", [8], F32, 2**64 - 32)], data=DATA), "ends at byte"),
        (gguf(tensors=[SMALL], data=DATA[:-1]), "ends at byte"),
        (gguf(tensors=[tensor("a", [9], F32, 0), tensor("b", [8], F32, 32)], data=DATA * 2), "overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(tmp_path: Path, content: bytes, pattern: str) -> None:
    refused(tmp_path, content, pattern)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    tensors = [SMALL, tensor("b", [8], F32, 32)]
    whole = gguf([ARCHITECTURE, entry("k", ARRAY, array(STRING, 1, string("v")))], tensors, DATA * 2)
    load(tmp_path, whole)
    for length in range(1, len(whole)):
        refused(tmp_path, whole[:length], "is damaged|not a GGUF")
