"""Our token ids are llama.cpp's, for texts of many kinds."""

import json
from pathlib import Path

import pytest

from segue.tokens import Tokenizer

CASES = json.loads((Path(__file__).parent.parent / "golden" / "tokens.json").read_text())["cases"]


def test_the_corpus_is_there() -> None:
    assert len(CASES) >= 150
    assert sum(case["plain"] != case["special"] for case in CASES) >= 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"])[:40])
def test_ids_are_those_of_llama_cpp(smollm2: Tokenizer, case: dict[str, str | list[int]]) -> None:
    text = case["text"]
    assert isinstance(text, str)
    assert smollm2.encode(text) == case["plain"]
    assert smollm2.encode(text, parse_special=True) == case["special"]
