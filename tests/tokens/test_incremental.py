"""A growing text has the ids of the whole at every moment."""

import random

import pytest

from segue.tokens import Tokenizer
from segue.tokens.incremental import IncrementalEncoder
from segue.weights.gguf import load_gguf
from tests.session.texts import TEXTS


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: object) -> Tokenizer:
    return Tokenizer.from_model(load_gguf(str(smollm2_path)))


@pytest.mark.parametrize("seed", range(6))
def test_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    pieces = [
        word + rng.choice((" ", " ", "  ", "\n", "")) for text in TEXTS.values() for word in text.split(" ")
    ]
    encoder = IncrementalEncoder.of(tokenizer)
    text = ""
    for _ in range(400):
        text += rng.choice(pieces)
        if rng.random() < 0.05:
            text = text[: rng.randrange(len(text) + 1)]
        assert encoder.encode(text) == tokenizer.encode(text)


def test_work_depends_on_what_is_new() -> None:
    num_chars = 0

    def encode(text: str) -> list[int]:
        nonlocal num_chars
        num_chars += len(text)
        return list(text.encode())

    encoder = IncrementalEncoder(encode)
    text = ""
    for _ in range(2000):
        text += " word"
        assert encoder.encode(text) == list(text.encode())
    assert num_chars < 2000 * 700
