"""Logits against `transformers` (tests/golden/logits.npz, by scripts/make_golden_logits.py)."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from segue.models import build_program
from segue.runtime.reference import ReferenceExecutor
from segue.weights.gguf import load_gguf

FloatArray = npt.NDArray[np.float32]
Golden = dict[str, npt.NDArray[np.float32]]
LogitsOf = Callable[[Sequence[int]], FloatArray]

NUM_PROMPTS = 6

REFERENCE_BOUND = 1e-3
"""Both compute in f32; only the order of sums differs. Measured: 8.2e-5."""


@pytest.fixture(scope="module")
def golden() -> Golden:
    with np.load(Path(__file__).parent.parent / "golden" / "logits.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def reference_logits(smollm2_path: Path) -> LogitsOf:
    model = load_gguf(smollm2_path)
    return ReferenceExecutor(build_program(model), model).logits


@pytest.mark.parametrize("prompt", range(NUM_PROMPTS))
def test_reference(golden: Golden, reference_logits: LogitsOf, prompt: int) -> None:
    logits = reference_logits(golden[f"ids_{prompt}"].tolist())
    chosen = logits[:, golden["vocabulary_ids"]]
    np.testing.assert_allclose(chosen, golden[f"logits_{prompt}"], rtol=0, atol=REFERENCE_BOUND)
    top = np.take_along_axis(logits, golden[f"top_ids_{prompt}"], axis=1)
    np.testing.assert_allclose(top, golden[f"top_logits_{prompt}"], rtol=0, atol=REFERENCE_BOUND)
    wide = logits.astype(np.float64)
    highest = wide.max(axis=1)
    logsumexp = highest + np.log(np.exp(wide - highest[:, None]).sum(axis=1))
    np.testing.assert_allclose(logsumexp, golden[f"logsumexp_{prompt}"], rtol=0, atol=REFERENCE_BOUND)
    assert_top_1(logits, golden, prompt, clear=REFERENCE_BOUND * 2)


def assert_top_1(logits: FloatArray, golden: Golden, prompt: int, *, clear: float) -> None:
    """The most likely id is the golden one wherever the golden margin to the second is `clear` nats."""
    top = golden[f"top_logits_{prompt}"]
    decided = top[:, 0] - top[:, 1] > clear
    assert decided.any()
    expected = golden[f"top_ids_{prompt}"][:, 0]
    assert logits.argmax(axis=1)[decided].tolist() == expected[decided].tolist()
