"""Our token ids are llama.cpp's, for texts of many kinds."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from segue.tokens import Tokenizer
from segue.weights.gguf import load_gguf


@dataclass(frozen=True)
class Case:
    text: str
    plain: list[int]
    """Control tokens are text."""
    special: list[int]
    """Control tokens are parsed."""
    others: dict[str, list[int]]
    """Plain ids under other pre-tokenizers, where they differ."""


GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "tokens.json").read_text())
CASES = [Case(**case) for case in GOLDEN["cases"]]


def test_the_corpus_is_there() -> None:
    assert len(CASES) >= 150
    assert sum(case.plain != case.special for case in CASES) >= 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case.text)[:40])
def test_ids_are_those_of_llama_cpp(smollm2: Tokenizer, case: Case) -> None:
    assert smollm2.encode(case.text) == case.plain
    assert smollm2.encode(case.text, parse_special=True) == case.special


@pytest.mark.parametrize("pre", GOLDEN["other_pre_tokenizers"])
def test_other_pre_tokenizers_are_those_of_llama_cpp(smollm2_path: Path, pre: str) -> None:
    model = load_gguf(smollm2_path)
    tokenizer = Tokenizer.from_model(
        replace(
            model,
            metadata={**model.metadata, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False},
        )
    )
    short = [case for case in CASES if len(case.text) <= GOLDEN["short"]]
    assert any(pre in case.others for case in short)
    for case in short:
        assert tokenizer.encode(case.text) == case.others.get(pre, case.plain), case.text
