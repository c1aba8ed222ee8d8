"""Servers for tests: `segue serve` as a process, and one in this process whose model says what a test wants."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from segue import AsyncLLM, EngineArgs
from segue.contract.step import ForwardResult, SeqStep, TokenLogprobs
from segue.server.app import create_app
from segue.server.shared.options import ServerOptions
from segue.server.shared.serving import Serving

_SERVES = re.compile(r"serves (?P<model>\S+) at (?P<url>\S+)")


@dataclass
class RunningServer:
    """A server that answers."""

    url: str
    model: str

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=None, **options)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def metric(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if re.match(rf"{re.escape(name)}(\{{| )", line)]
        assert values, name
        return sum(map(float, values))


@dataclass
class ServerProcess(RunningServer):
    """One in a process of its own."""

    process: "subprocess.Popen[bytes]"
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def children(self) -> list[int]:
        """Started by any of its threads."""
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for each in lists for pid in each.read_text().split()]

    def stop(self) -> int:
        """SIGTERM. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


def until(condition: Callable[[], bool]) -> None:
    """Waits for it to become true."""
    while not condition():
        time.sleep(0.01)


@contextlib.contextmanager
def serve_process(
    log_path: Path, model: Path, *arguments: str, **environment: str
) -> Iterator[ServerProcess]:
    """`segue serve` on a free port; ended by SIGKILL if it still runs."""
    command = [sys.executable, "-m", "segue", "serve", str(model)]
    if not any(argument.startswith("--uds") for argument in arguments):
        command += ["--port", "0"]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [*command, *arguments], stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, **environment}
        ) as process,
    ):
        try:
            until(lambda: process.poll() is not None or _SERVES.search(log_path.read_text()) is not None)
            found = _SERVES.search(log_path.read_text())
            assert found is not None, log_path.read_text()
            yield ServerProcess(found["url"], found["model"], process, log_path)
        finally:
            process.kill()


class Script:
    """An `Executor` without weights: every answer is `token_ids`, then `end_id`."""

    vocab_size: int
    max_model_len = 4096
    kv_bytes_per_token = 1

    def __init__(self, vocab_size: int, end_id: int) -> None:
        self.vocab_size = vocab_size
        self.token_ids: Sequence[int] = ()
        self.gate: threading.Semaphore | None = None
        """If set, each step waits for a permit."""
        self.num_steps = 0
        self.failure: Exception | None = None
        self._end_id = end_id

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        pass

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        if self.gate is not None:
            self.gate.acquire()
        self.num_steps += 1
        if self.failure is not None:
            raise self.failure
        result = ForwardResult([], {}, {}, {})
        for seq in seqs:
            if seq.sampling is None:
                continue
            first = seq.start + len(seq.tokens) - seq.sampling.output_start
            for index in range(first, first + 1 + len(seq.drafts)):
                token = self.token_ids[index] if index < len(self.token_ids) else self._end_id
                if seq.sampling.num_logprobs is not None:
                    result.logprobs[len(result.tokens)] = TokenLogprobs(-0.5, 1, (token,), (-0.5,))
                result.tokens.append(token)
        return result

    def close(self) -> None:
        if self.gate is not None:
            self.gate.release(1000)


@contextlib.contextmanager
def serve_script(llm: AsyncLLM, options: ServerOptions) -> Iterator[RunningServer]:
    """A server on a thread of this process."""
    app = create_app(Serving(llm, "script", options))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        host, port = listener.getsockname()
        yield RunningServer(f"http://{host}:{port}", "script")
    finally:
        server.should_exit = True
        thread.join()
        llm.shutdown()


def scripted_args(model: Path) -> EngineArgs:
    return EngineArgs(model=str(model), runtime="reference", max_model_len=2048, num_kv_blocks=512)


def read_events(lines: Iterator[str]) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
