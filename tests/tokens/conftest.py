"""Tokenizers that the tests share."""

from pathlib import Path

import pytest

from segue.tokens import Tokenizer
from segue.weights.gguf import load_gguf
from tests.tokens.small import small_tokenizer


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_model(load_gguf(smollm2_path))
