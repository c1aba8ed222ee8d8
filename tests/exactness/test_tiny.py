"""Every pair of modes on tiny random models with the native kernels: answers equal the plain run's bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.verify.matrix import Report, Run, Verification
from segue.verify.modes import MODES, Combination, Skipped, combine
from segue.verify.workbench import Workbench
from tests.models.test_golden_families import FOLDER
from tests.weights.make_gguf import tiny_llama

SINGLES = [mode.name for mode in MODES]
PAIRS = [
    f"{a.name} + {b.name}"
    for i, a in enumerate(MODES)
    for b in MODES[i + 1 :]
    if isinstance(combine((a, b)), Combination)
]


@pytest.fixture(scope="module", params=["quantised", "windows", "biases"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    match request.param:
        case "windows":
            return FOLDER / "gemma3.gguf"
        case "biases":
            return FOLDER / "qwen2.gguf"
        case _:
            return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=1024)


@pytest.fixture(scope="module")
def report(model: Path) -> Iterator[Report]:
    workbench = Workbench(model)
    yield Verification(workbench, MODES, pairs=True, answer_len=10).run("tiny")
    workbench.close()


def run_of(report: Report, name: str) -> Run:
    return next(run for run in report.runs if run.name == name)


@pytest.mark.parametrize("name", [*SINGLES, *PAIRS])
def test_equal(report: Report, name: str) -> None:
    run = run_of(report, name)
    assert run.difference is None, str(run.difference)
    assert run.not_exercised == ()
    assert run.num_tokens > 0
    assert run.num_logprobs > run.num_tokens


def test_everything_at_once(report: Report) -> None:
    runs = [run for run in report.runs if len(run.modes) > 2]
    assert len(runs) >= 4
    assert {mode for run in runs for mode in run.modes} == set(SINGLES)
    for run in runs:
        assert run.difference is None, str(run.difference)
        assert run.not_exercised == ()


def test_what_is_left_out_contradicts(report: Report) -> None:
    """No pair is missing without a reason."""
    assert len(report.runs) == len(SINGLES) + len(PAIRS) + sum(len(run.modes) > 2 for run in report.runs)
    assert len(PAIRS) + len(report.skipped) == len(MODES) * (len(MODES) - 1) // 2
    assert all(isinstance(skipped, Skipped) and skipped.why for skipped in report.skipped)
    # Values of one setting, and few more.
    assert len(report.skipped) <= 25
