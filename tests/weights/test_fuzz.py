"""Damaged files: whatever the damage, a ModelFileError or a program, nothing else and at no great cost."""

import random
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from segue.errors import ModelFileError
from segue.models import build_program
from segue.weights.dequantize import FORMATS, dequantize
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile
from tests.weights.make_gguf import part_paths, tiny_llama
from tests.weights.raw_gguf import ARCHITECTURE, gguf, tensor

FILES_PER_SEED = 2000
NUMBERS = (0, 1, 2, 3, 7, 8, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)

KEYS = (
    *(b"block_count", b"embedding_length", b"feed_forward_length", b"context_length", b"vocab_size"),
    *(b"head_count", b"head_count_kv", b"layer_norm_rms_epsilon", b"freq_base", b"general.architecture"),
    *(b"split.no", b"split.count", b"split.tensors.count"),
)


tiny = partial(tiny_llama, layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "tiny.gguf"
    return tiny(path).read_bytes()


@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_raise_nothing_but_model_file_error(whole: bytes, tmp_path: Path, seed: int) -> None:
    header = whole.index(b"output_norm.weight")
    check(whole, header, tmp_path / "damaged.gguf", build_program, seed)


@pytest.mark.parametrize("seed", range(2))
def test_damaged_tensors_of_every_type(tmp_path: Path, seed: int) -> None:
    """What is read has as many bytes as its shape says: every value can be had."""
    infos, data = [], b""
    for kind, layout in FORMATS.items():
        infos.append(tensor(kind.name, [256, 2], kind.value, len(data)))
        size = 512 // layout.block_elements * layout.block_bytes
        data += bytes(size + -size % 32)
    content = gguf([ARCHITECTURE], infos, data)

    def read(model: ModelFile) -> None:
        for stored in model.tensors.values():
            assert dequantize(stored).shape == stored.shape

    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    assert [stored.type for stored in load_gguf(path).tensors.values()] == list(FORMATS)
    check(content, len(content) - len(data), path, read, seed)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_parts(tmp_path: Path, seed: int) -> None:
    paths = part_paths(tiny(tmp_path / "tiny.gguf", tensors_a_part=4))
    content = paths[seed].read_bytes()
    check(content, content.rindex(b".weight") + 40, paths[seed], build_program, seed)


def check(whole: bytes, header: int, path: Path, use: Callable[[ModelFile], object], seed: int) -> None:
    """Write many damaged copies of `whole` to `path`, load each and use it."""
    rng = random.Random(seed)
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in range(FILES_PER_SEED):
        path.write_bytes(damage(whole, header, rng))
        message = refusal(path, use, f"seed {seed}, file {number}")
        if message is not None:
            refused += 1
            assert message.isprintable(), f"seed {seed}, file {number}"
    assert refused > FILES_PER_SEED / 3, "the damage is too slight to test anything"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
    assert grown_kib < 64 * 1024


def refusal(path: Path, use: Callable[[ModelFile], object], where: str) -> str | None:
    """Why the file is refused; None when it can be used."""
    try:
        use(load_gguf(path))
    except ModelFileError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(where) from error
    return None


def damage(whole: bytes, header: int, rng: random.Random) -> bytes:
    """One to three changes, most of them to the first `header` bytes, where each one matters."""
    damaged = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        if not damaged:
            break
        at = rng.randrange(min(header if rng.random() < 0.9 else len(damaged), len(damaged)))
        match rng.randrange(8):
            case 0:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                damaged[at] = rng.randrange(256)
            case 2:
                del damaged[at + 1 :]
            case 3:
                damaged[at:at] = rng.randbytes(rng.randint(1, 9))
            case 4:
                del damaged[at : at + rng.randint(1, 9)]
            case 5:
                damaged[at : at + 4] = (rng.choice(NUMBERS) % 2**32).to_bytes(4, "little")
            case 6:
                damaged[at : at + 8] = rng.choice(NUMBERS).to_bytes(8, "little")
            case _:
                damage_value(damaged, rng)
    return bytes(damaged)


def damage_value(damaged: bytearray, rng: random.Random) -> None:
    """Change a number of the metadata, which may leave a file that is well formed and absurd."""
    key = rng.choice(KEYS)
    at = damaged.find(key)
    if at >= 0:
        at += len(key) + 4
        damaged[at : at + 4] = rng.choice(
            [rng.choice(NUMBERS) % 2**32, 0x7FC00000, 0x7F800000, 0xFF800000, 0xBF800000, rng.randrange(100)]
        ).to_bytes(4, "little")
