"""Fixtures of the whole suite."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from segue.errors import DownloadError
from segue.llm.llm import LLM
from segue.weights import hub
from tests.weights.make_gguf import tiny_llama

# Tests depend on no clock: an example may take long on a busy machine.
hypothesis.settings.register_profile("segue", deadline=None)
hypothesis.settings.load_profile("segue")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1; fetched into the cache folder (SEGUE_HOME) if it is not there.

    A failed download fails the tests that need the model, unless SEGUE_TEST_OFFLINE=1 says that there is
    no network: then they are skipped.
    """
    try:
        return hub.pull("smollm2")
    except DownloadError as error:
        if os.environ.get("SEGUE_TEST_OFFLINE") == "1":
            pytest.skip(f"SEGUE_TEST_OFFLINE=1 and the model is not in {hub.cache_dir()}: {error}")
        raise


@pytest.fixture(scope="session")
def smollm2_llm(smollm2_path: Path) -> Iterator[LLM]:
    """The model in this process, with room for a few short requests; the tests share its prefix cache."""
    with LLM(smollm2_path, max_model_len=1024, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 320 ids and 256 positions: fast, and what it says means nothing."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_llm(tiny_path: Path) -> Iterator[LLM]:
    """The random model on the reference runtime."""
    with LLM(tiny_path, runtime="reference", max_num_seqs=8) as llm:
        yield llm
