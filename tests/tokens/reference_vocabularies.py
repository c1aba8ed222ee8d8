"""Token ids beside llama.cpp's, over the vocabularies and texts that it tests its own tokenizers with.

    python -m tests.tokens.reference_vocabularies [FOLDER]

Without FOLDER (llama.cpp's `models/`) they are fetched from the package index, in the sources of llama-cpp-python. What
is of a kind that Segue does not know is named, and must be refused in one line. Chat templates must render or be
refused with a message of their own.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from segue.errors import ModelFileError, ParameterError, SegueError
from segue.tokens import Tokenizer
from segue.tokens.chat import render_chat
from segue.weights.gguf import load_gguf

SOURCES = "llama-cpp-python==0.3.36"
SEPARATOR = "\n__ggml_vocab_test__\n"
MUST_BE_KNOWN = {
    "command-r", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact", "starcoder",
}  # fmt: skip
MESSAGES = [
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Because of the air."},
    {"role": "user", "content": "And at night?"},
]


def fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "--no-build-isolation", SOURCES, "-d", str(folder)], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        wanted = [member for member in sources if "/vendor/llama.cpp/models/" in member.name]
        sources.extractall(folder, wanted, filter="data")
    (models,) = folder.glob("*/vendor/llama.cpp/models")
    return models


def check_vocabulary(path: Path) -> bool:
    name = path.stem.removeprefix("ggml-vocab-")
    try:
        tokenizer = Tokenizer.from_model(load_gguf(path))
    except ModelFileError as error:
        print(f"{name}: refused: {error}")
        return name not in MUST_BE_KNOWN
    texts_path = path.with_name(path.name + ".inp")
    if not texts_path.exists():
        print(f"{name}: no texts")
        return name not in MUST_BE_KNOWN
    texts = texts_path.read_bytes().decode().split(SEPARATOR)
    expected = path.with_name(path.name + ".out").read_text().split("\n")
    wrong = [
        text
        for text, ids in zip(texts, expected, strict=False)
        if tokenizer.encode(text) != list(map(int, ids.split()))
    ]
    print(f"{name}: {len(texts)} texts, {len(wrong)} with other ids{'' if not wrong else f': {wrong[:3]}'}")
    return not wrong


def check_template(path: Path) -> bool:
    try:
        text = render_chat(path.read_text(encoding="utf-8"), MESSAGES, bos_token="<s>", eos_token="</s>")
    except (ParameterError, ModelFileError) as error:
        print(f"{path.name}: refused: {error}")
        return "\n" not in str(error)
    except SegueError as error:
        print(f"{path.name}: {type(error).__name__}: {error}")
        return False
    missing = [message["content"] for message in MESSAGES if message["content"] not in text]
    print(f"{path.name}: {len(text)} characters{f', without {missing}' if missing else ''}")
    return not missing


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(sys.argv[1]) if len(sys.argv) > 1 else fetch(Path(temporary))
        results = [check_vocabulary(path) for path in sorted(models.glob("ggml-vocab-*.gguf"))]
        results += [check_template(path) for path in sorted((models / "templates").glob("*.jinja"))]
    print(f"{results.count(True)} of {len(results)} as they should be")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
