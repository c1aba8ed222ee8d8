"""Memory that runs out at any allocation: a clean error, and the next step is right."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.allocation import SCENARIOS
from tests.native.models import make_model

SOURCE = Path(__file__).parent / "failing_allocator.cpp"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The failing allocator, built."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    library = tmp_path_factory.mktemp("allocator") / "failing_allocator.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-std=c++20", SOURCE, "-o", library, "-ldl"], check=True
    )
    return library


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_allocation_may_fail(allocator: Path, tmp_path: Path, scenario: str) -> None:
    make_model(tmp_path / "model.gguf", "Q4_1")
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.allocation", str(tmp_path / "model.gguf"), scenario],
        env={**os.environ, "LD_PRELOAD": str(allocator)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    assert done.stdout.count("allocations") == 2
