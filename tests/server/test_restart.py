"""The engine's process is killed under a server: its clients see a pause, and `/health` says why."""

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

from tests.server.running import RunningServer, serve_process, until
from tests.weights.make_gguf import tiny_llama

BODY: dict[str, Any] = {
    "prompt": "the hen",
    "temperature": 1.0,
    "max_tokens": 1500,
    "stream": True,
    "ignore_eos": True,
    "logprobs": 1,
}


def stream(server: RunningServer, seed: int) -> list[Any]:
    """All that a client is told of an answer, joined."""
    text, logprobs, reasons = "", [], []
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**BODY, "seed": seed}) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                logprobs += choice["logprobs"]["token_logprobs"]
                reasons.append(choice["finish_reason"])
    return [text, logprobs, reasons[-1]]


def test_streams_go_on_and_health_tells(tmp_path: Path, long_path: Path) -> None:
    with serve_process(tmp_path / "log", long_path, "--max-model-len", "4096") as server:
        quiet = [stream(server, seed) for seed in range(3)]
        rough: list[list[Any]] = [[] for _ in quiet]

        def read(seed: int) -> None:
            rough[seed] = stream(server, seed)

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(len(rough))]
        for reader in readers:
            reader.start()
        states = set()
        with server.client() as client:
            for _ in range(3):
                until(lambda: server.metric("vllm:num_requests_running") >= 2)
                (pid,) = server.children()
                os.kill(pid, signal.SIGKILL)
                until(lambda: client.get("/health").status_code == 503)
                while (answer := client.get("/health")).status_code != 200:
                    states.add((answer.status_code, answer.json()["engine"]))
            assert answer.json() == {"engine": "running"}
        for reader in readers:
            reader.join()
        assert states == {(503, "restarting")}
        assert rough == quiet
        assert server.metric("segue:engine_restarts_total") == 3
        assert server.log.count("WARNING: the engine's process was ended by SIGKILL") == 3
        assert len(re.findall(r"WARNING: the engine runs again; \d open requests go on", server.log)) == 3


def test_a_model_that_cannot_be_loaded_and_then_can(tmp_path: Path, tiny_path: Path) -> None:
    """The server says that it is out of order, and why in its log; and it comes back by itself."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_path.read_bytes())
    body = {"prompt": "the hen", "max_tokens": 5}
    with serve_process(tmp_path / "log", path, "--max-model-len", "256") as server, server.client() as client:
        (tmp_path / "damaged").write_bytes(b"no model")
        (tmp_path / "damaged").rename(path)
        (pid,) = server.children()
        os.kill(pid, signal.SIGKILL)
        until(lambda: client.get("/health").json().get("engine") != "running")
        until(lambda: client.get("/health").json().get("engine") != "restarting")
        health, refused = client.get("/health"), client.post("/v1/completions", json=body)
        assert health.status_code == refused.status_code == 503
        error = refused.json()["error"]
        assert error["code"] == "engine_unavailable"
        assert "could not be loaded again" in error["message"]
        assert server.metric("segue:engine_restarts_total") >= 5
        assert "the model could not be loaded again" in server.log
        (tmp_path / "whole").write_bytes(tiny_path.read_bytes())
        (tmp_path / "whole").rename(path)
        until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=body).status_code == 200
        assert "Traceback" not in server.log


def test_the_next_engine_loads_the_file_that_the_first_one_did(tmp_path: Path, tiny_path: Path) -> None:
    """The model's name was a link, which then leads elsewhere."""
    link = tmp_path / "model.gguf"
    link.symlink_to(tiny_path)
    body = {"prompt": "the hen", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
    with serve_process(tmp_path / "log", link) as server, server.client() as client:
        assert server.model == str(link)
        before = client.post("/v1/completions", json=body).json()["choices"]
        link.unlink()
        link.symlink_to(tiny_llama(tmp_path / "other.gguf", seed=99))
        (pid,) = server.children()
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.children() != [pid])
        until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=body).json()["choices"] == before
