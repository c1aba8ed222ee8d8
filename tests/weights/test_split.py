"""Models in several files: any part stands for the model, and what does not belong together is refused."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from segue.errors import ModelFileError
from segue.models import build_program
from segue.weights.gguf import load_gguf, pinned
from tests.weights.make_gguf import part_paths, tiny_llama
from tests.weights.raw_gguf import ARCHITECTURE, U32, entry, gguf, tensor, u32

tiny = partial(tiny_llama, layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=300)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = part_paths(tiny(tmp_path / "tiny.gguf", tensors_a_part=4))
    assert [path.name for path in paths] == [f"tiny-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return paths


def refused(path: Path, culprit: Path, pattern: str) -> None:
    """In one line that names the part at fault first."""
    with pytest.raises(ModelFileError, match=pattern) as caught:
        load_gguf(path)
    message = str(caught.value)
    assert message.startswith(str(culprit))
    assert message.isprintable()


def test_any_part_stands_for_the_model(tmp_path: Path, parts: list[Path]) -> None:
    whole = load_gguf(tiny(tmp_path / "whole.gguf"))
    for path in parts:
        model = load_gguf(path)
        assert model.path == str(parts[0])
        assert model.metadata == whole.metadata
        assert model.size_bytes == sum(part.stat().st_size for part in parts)
        assert list(model.tensors) == list(whole.tensors)
        for name, stored in model.tensors.items():
            assert stored.data.tobytes() == whole.tensors[name].data.tobytes()
            assert not stored.data.flags.owndata
        assert build_program(model) == build_program(whole)


def test_a_part_keeps_its_name_when_it_is_a_link(tmp_path: Path, parts: list[Path]) -> None:
    """As in a cache whose files are named by what they hold. A link to the folder is followed."""
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(parts):
        path.rename(tmp_path / f"blob{number}")
        (tmp_path / "snapshot" / path.name).symlink_to(tmp_path / f"blob{number}")
    (tmp_path / "latest").symlink_to("snapshot")
    path = pinned(tmp_path / "latest" / parts[1].name)
    assert path == tmp_path / "snapshot" / parts[1].name
    assert len(load_gguf(path).tensors) == 11
    assert pinned(tmp_path / "latest" / ".." / "blob1") == tmp_path / "blob1"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Path], missing: int) -> None:
    parts[missing].unlink()
    for path in parts:
        if path != parts[missing]:
            refused(
                path,
                parts[missing],
                f"no such file; it is part {missing + 1} of 3 of a model with 11 tensors",
            )


def test_a_damaged_part_is_named(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-40])
    refused(parts[0], parts[2], "is damaged: the tensor .* ends at byte")


def test_a_renamed_part(tmp_path: Path, parts: list[Path]) -> None:
    renamed = parts[1].rename(tmp_path / "model.gguf")
    refused(renamed, renamed, "part 2 of 3 .* does not end in -00002-of-00003.gguf")


def test_a_part_under_the_name_of_another(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    refused(parts[0], parts[2], "it is part 2 of 3 .*; beside the others it would be part 3 of 3")


def test_a_whole_model_under_the_name_of_a_part(tmp_path: Path, parts: list[Path]) -> None:
    tiny(tmp_path / "whole.gguf").rename(parts[1])
    refused(parts[2], parts[1], "it is a whole model; beside the others it would be part 2 of 3")


def test_parts_of_models_of_different_sizes(tmp_path: Path, parts: list[Path]) -> None:
    bigger = part_paths(tiny(tmp_path / "bigger.gguf", layers=2, tensors_a_part=7))
    bigger[1].rename(parts[1])
    refused(
        parts[0], parts[1], "with 20 tensors; beside the others it would be part 2 of 3 .* with 11 tensors"
    )


NUMBERS = {"split.no": 0, "split.count": 2, "split.tensors.count": 2}


def part(tmp_path: Path, name: str, *more: bytes, tensors: tuple[str, ...], **numbers: int) -> Path:
    """A part with these tensors of one element; `numbers` in place of NUMBERS, with _ for the last dots."""
    values = NUMBERS | {key.replace("_", "."): value for key, value in numbers.items()}
    entries = [ARCHITECTURE, *(entry(key, U32, u32(value)) for key, value in values.items()), *more]
    infos = [tensor(each, [1], 0, 32 * i) for i, each in enumerate(tensors)]
    path = tmp_path / name
    path.write_bytes(gguf(entries, infos, bytes(32 * len(tensors))))
    return path


def pair(tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], *more: bytes) -> list[Path]:
    return [
        part(tmp_path, "m-00001-of-00002.gguf", tensors=first),
        part(tmp_path, "m-00002-of-00002.gguf", *more, tensors=second, split_no=1),
    ]


def test_parts_with_different_metadata(tmp_path: Path) -> None:
    paths = pair(tmp_path, ("a",), ("b",), entry("llama.block_count", U32, u32(3)))
    refused(paths[0], paths[1], f"another model than {paths[0]}: 'llama.block_count' differs")


def test_each_part_has_its_own_alignment(tmp_path: Path) -> None:
    assert list(
        load_gguf(pair(tmp_path, ("a",), ("b",), entry("general.alignment", U32, u32(8)))[1]).tensors
    ) == ["a", "b"]


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    paths = pair(tmp_path, ("a",), ("a",))
    refused(paths[0], paths[1], f"has the tensor 'a', and so has {paths[0]}")


def test_fewer_tensors_than_there_should_be(tmp_path: Path) -> None:
    paths = pair(tmp_path, ("a",), ())
    refused(paths[1], paths[0], "a model with 2 tensors, and all parts together have 1")


@pytest.mark.parametrize(
    ("numbers", "pattern"),
    [
        ({"split_no": 2}, "is damaged: it is part 3 of 2"),
        ({"split_count": 2**32 - 1}, "does not end in -00001-of-4294967295.gguf"),
        ({"split_count": 99_999}, "does not end in -00001-of-99999.gguf"),
    ],
)
def test_impossible_counts(tmp_path: Path, numbers: dict[str, int], pattern: str) -> None:
    path = part(tmp_path, "m-00001-of-00002.gguf", tensors=("a",), **numbers)
    refused(path, path, pattern)


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_in_one_part_is_whole(tmp_path: Path, count: int) -> None:
    assert list(load_gguf(part(tmp_path, "model.gguf", tensors=("a",), split_count=count)).tensors) == ["a"]
