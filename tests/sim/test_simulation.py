"""Everything at once over tiny pools, from fixed seeds. A failing seed: `python -m tests.sim.run --seeds SEED`."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from segue.contract.reports import EngineOutput
from tests.sim.driver import Setup, Simulation, run_seed
from tests.sim.trace import Trace

SEEDS_PER_TEST = 10


@pytest.mark.parametrize("first", range(0, 160, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        run_seed(seed, 200)


def _threaded(seed: int) -> Setup:
    """A setup whose steps run on the engine's own thread while the next ones are planned."""
    setup = Setup.draw(random.Random(seed))
    config = {name: getattr(setup.config, name) for name in type(setup.config).__struct_fields__}
    config["async_depth"] = 2 + seed % 3
    return replace(setup, config=type(setup.config)(**config), faults=False, threaded=True)


@pytest.mark.parametrize("first", range(1000, 1030, SEEDS_PER_TEST))
def test_seeds_with_a_step_thread(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        Simulation(seed, _threaded(seed)).run(200)


def _fingerprint(seed: int, setup: Setup | None = None) -> str:
    trace = Trace()
    Simulation(seed, setup, trace).run(100)
    return trace.fingerprint


def test_the_same_seed_gives_the_same_plans_results_and_outputs() -> None:
    prints = [_fingerprint(seed) for seed in range(20)]
    assert prints == [_fingerprint(seed) for seed in range(20)]
    assert len(set(prints)) == 20


def test_a_seed_gives_the_same_in_another_process() -> None:
    """No order depends on hashes, which differ between processes."""
    code = "from tests.sim.test_simulation import _fingerprint; print(*map(_fingerprint, range(5)))"
    prints = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        prints.append(done.stdout)
    assert prints[0] == prints[1]


def _outputs(setup: Setup, seed: int) -> list[str]:
    """All that the engine says, in order."""
    said: list[str] = []

    class Listener(Trace):
        def add(self, value: object) -> None:
            if isinstance(value, list):
                said.extend(repr(each) for each in value if isinstance(each, EngineOutput))

    simulation = Simulation(seed, setup)
    simulation.trace = Listener()
    simulation.run(100)
    return said


@pytest.mark.parametrize("seed", range(2000, 2010))
def test_a_step_thread_changes_nothing(seed: int) -> None:
    setup = _threaded(seed)
    assert _outputs(setup, seed) == _outputs(replace(setup, threaded=False), seed)
