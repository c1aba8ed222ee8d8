"""Each family against `transformers` (tests/golden/families, by scripts/make_golden_families.py)."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from segue.contract.step import SeqStep
from segue.models import build_program
from segue.models.program import Attention, Program
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
        model, _, max_model_len = name.partition("@")
        self.model: ModelFile = load_gguf(FOLDER / f"{model}.gguf")
        self.program: Program = build_program(self.model, int(max_model_len) if max_model_len else None)


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


def test_what_a_family_asks_for_shows(golden: Golden) -> None:
    """Without any one option of its operations the logits are others: the bound would find it missing."""
    for changes in OPTIONS:
        program = without(golden.program, changes)
        if program != golden.program:
            logits = ReferenceExecutor(program, golden.model).logits(golden.ids)
            assert np.abs(logits[golden.rows] - golden.logits).max() > 10 * BOUND, changes


OPTIONS: tuple[dict[str, Any], ...] = (
    {"scale": 1.0}, {"softcap": None}, {"window": None}, {"biases": ()}, {"positions": None}, {"rope": None},
    {"factors": ()}, {"dim": 2, "factors": ()}, {"theta": 1e5},
)  # fmt: skip
"""Fields of operations and their RoPE, and what turns them off."""


def without(program: Program, changes: dict[str, Any]) -> Program:
    """The program with these fields changed, in every operation that has them."""

    def changed(value: Any) -> Any:
        own = {name: new for name, new in changes.items() if hasattr(value, name)}
        if isinstance(value, Attention) and value.rope is not None and not own:
            own = {"rope": changed(value.rope)}
        return replace(value, **own)

    return replace(program, ops=tuple(changed(op) for op in program.ops))


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
