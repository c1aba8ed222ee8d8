"""Hostile templates end in one line, within little memory."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("seeds", ["0-39"])
def test_templates_that_try_to_take_all(seeds: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.tokens.hostile", "--seeds", seeds],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
