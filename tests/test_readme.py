"""The Python of the README runs as it stands there."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.usefixtures("smollm2_path")
@pytest.mark.parametrize("block", BLOCKS)
def test_python_block(block: str) -> None:
    names: dict[str, object] = {}
    exec(block, names)
    assert "LLM" in names


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 3


def test_adding_a_model_shows_the_code() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "adding-a-model.md").read_text()
    family, golden = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert family == (root / "src" / "segue" / "models" / "qwen2.py").read_text()
    assert golden in (root / "scripts" / "make_golden_families.py").read_text()
