"""The simulation notices every rule that is switched off, so a green run means something."""

import pytest

from tests.sim.checks import Violation
from tests.sim.driver import run_seed
from tests.sim.faults import FAULTS

MAX_STEPS = 60_000
"""Of the engine, over seeds 0, 1, 2, …: by then a fault must have been noticed."""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    steps = seed = 0
    try:
        while steps < MAX_STEPS:
            steps += run_seed(seed, 100)
            seed += 1
    except Violation as violation:
        cause = violation.__cause__ and violation.__cause__.__cause__
        assert not isinstance(cause, (TypeError, AttributeError, NameError)), (
            f"{name} does not fit the code: {cause}"
        )
        return
    pytest.fail(f"{name}: nothing was noticed in {steps} steps of {seed} seeds")
