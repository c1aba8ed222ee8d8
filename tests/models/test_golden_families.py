"""Each family against `transformers` (tests/golden/families, by scripts/make_golden_families.py)."""

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from segue.contract.step import SeqStep
from segue.models import build_program
from segue.models.program import Program
from segue.runtime.native import NativeExecutor
from segue.runtime.reference import ReferenceExecutor
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile
from tests.native.models import ISAS, has_isa, make_executor

FOLDER = Path(__file__).parent.parent / "golden" / "families"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))

BOUND = 1e-4
"""All three compute in f32, with these weights; only the order of sums differs. Measured: at most 1e-5."""

FloatArray = npt.NDArray[np.float32]


class Golden:
    """The model of a case, its ids, and what its logits must be."""

    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz") as arrays:
            self.ids: list[int] = arrays["ids"].tolist()
            self.rows: list[int] = arrays["rows"].tolist()
            self.logits: FloatArray = arrays["logits"]
        self.model: ModelFile = load_gguf(FOLDER / f"{name}.gguf")
        self.program: Program = build_program(self.model)


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_reference(golden: Golden) -> None:
    logits = ReferenceExecutor(golden.program, golden.model).logits(golden.ids)
    np.testing.assert_allclose(logits[golden.rows], golden.logits, rtol=0, atol=BOUND)


@pytest.mark.parametrize("isa", ISAS)
def test_native(golden: Golden, isa: str) -> None:
    loaded = golden.program, golden.model
    if not has_isa(loaded, isa):
        pytest.skip(f"this CPU has no {isa}")
    logits = make_executor(loaded, isa=isa, kv_dtype="f32").logits(golden.ids)
    np.testing.assert_allclose(logits[golden.rows], golden.logits, rtol=0, atol=BOUND)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_give_the_bits_of_the_whole(golden: Golden, chunk: int) -> None:
    """With the KV that a server keeps, in blocks that are shorter than a window."""
    executor = NativeExecutor(golden.program, golden.model, threads=2)
    edges = [*range(0, len(golden.ids), chunk), len(golden.ids)]
    assert logprobs(executor, golden.ids, edges) == logprobs(executor, golden.ids, [0, len(golden.ids)])


def logprobs(executor: NativeExecutor, ids: list[int], edges: list[int]) -> list[object]:
    """Of all ids after each id, computed in the chunks between `edges`."""
    block_size = 4
    num_blocks = -(-len(ids) // block_size)
    executor.allocate_kv(num_blocks, block_size)
    rows: list[object] = []
    for start, end in itertools.pairwise(edges):
        step = SeqStep(
            start=start,
            tokens=ids[start:end],
            blocks=list(range(num_blocks)),
            prompt_targets=[0] * (end - start),
            num_prompt_logprobs=executor.vocab_size,
        )
        rows += executor.forward([step]).prompt_logprobs[0]
    return rows
