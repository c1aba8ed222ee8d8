"""One server for all tests that leave it as it is, and one whose answers a test can choose."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from segue import LLM, AsyncLLM
from segue.server.shared.options import ServerOptions
from segue.tokens import Tokenizer
from segue.weights.gguf import load_gguf
from tests.server.running import (
    RunningServer,
    Script,
    ServerProcess,
    scripted_args,
    serve_process,
    serve_script,
)
from tests.weights.make_gguf import tiny_llama

CONTEXT = 16384


@pytest.fixture(scope="session")
def long_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for answers that take seconds."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "long.gguf", context=CONTEXT)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, long_path: Path) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ("--served-model-name", "tiny", "--served-model-name", "also", "--num-kv-blocks", "1200")
    with serve_process(
        log, long_path, *arguments, "--max-model-len", str(CONTEXT), "--tool-call-parser", "hermes"
    ) as running:
        yield running


@pytest.fixture(scope="session")
def openai(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def long_llm(long_path: Path) -> Iterator[LLM]:
    """The same model without a server."""
    with LLM(long_path, max_model_len=1024) as llm:
        yield llm


class Scripted:
    """A server whose model says what it is told to."""

    def __init__(self, server: RunningServer, script: Script, tokenizer: Tokenizer, llm: AsyncLLM) -> None:
        self.server = server
        self.script = script
        self.tokenizer = tokenizer
        self._llm = llm

    @property
    def num_open(self) -> int:
        """Requests whose answers somebody waits for."""
        return len(self._llm._answers)

    def say(self, text: str) -> None:
        self.script.token_ids = self.tokenizer.encode(text)


@pytest.fixture
def scripted(
    request: pytest.FixtureRequest, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scripted]:
    tokenizer = Tokenizer.from_model(load_gguf(tiny_path))
    (end_id,) = tokenizer.eos_token_ids & {2}
    script = Script(tokenizer.vocab_size, end_id)
    monkeypatch.setattr("segue.host.build._executor", lambda args, file: script)
    options = getattr(request, "param", ServerOptions(tool_call_parser="hermes"))
    llm = AsyncLLM(scripted_args(tiny_path))
    with serve_script(llm, options) as running:
        try:
            yield Scripted(running, script, tokenizer, llm)
        finally:
            script.close()
