"""How servers begin and end, and clients that go away."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import CONTEXT, Scripted
from tests.server.running import RunningServer, ServerProcess, read_events, serve_process, until

ENDLESS: dict[str, Any] = {"prompt": "the hen", "max_tokens": CONTEXT, "ignore_eos": True, "temperature": 0}
RUNNING = "vllm:num_requests_running"


def send(server: RunningServer, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request without a client library. Returns its connection."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(server.address)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(server: RunningServer, stream: bool) -> None:
    cancelled = server.metric("segue:requests_cancelled_total")
    used = server.metric("vllm:kv_cache_usage_perc")  # by sessions of other tests, until they time out
    connection = send(server, {**ENDLESS, "stream": stream, "n": 2})
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: server.metric(RUNNING) == 2)
    connection.close()
    until(lambda: server.metric(RUNNING) == 0)
    assert server.metric("segue:requests_cancelled_total") == cancelled + 1
    assert server.metric("vllm:kv_cache_usage_perc") <= used


def test_one_of_several_prompts_ends_them_all(server: RunningServer) -> None:
    connection = send(server, {**ENDLESS, "prompt": ["the hen", "of", "inn"], "stream": True})
    assert connection.recv(100)
    until(lambda: server.metric(RUNNING) == 3)
    connection.close()
    until(lambda: server.metric(RUNNING) == 0)


def test_it_is_freed_within_one_step(scripted: Scripted) -> None:
    script = scripted.script
    script.gate = threading.Semaphore(0)
    scripted.say("the hen " * 100)
    connection = send(scripted.server, {"prompt": "x", "max_tokens": 500, "stream": True})
    script.gate.release(3)
    received = b""
    while b"data: " not in received:
        received += connection.recv(1000)
    until(lambda: script.num_steps == 3)
    connection.close()
    until(lambda: scripted.num_open == 0)
    script.gate.release(50)  # a fourth step may wait for it, and cannot be taken back
    until(lambda: scripted.server.metric(RUNNING) == 0)
    assert script.num_steps <= 4
    assert scripted.server.metric("vllm:kv_cache_usage_perc") == 0


def test_half_a_request_is_nothing(server: ServerProcess) -> None:
    for sent in (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
                 b"content-length: 100\r\n\r\n{", b"\x16\x03\x01nonsense\r\n\r\n"):  # fmt: skip
        with socket.create_connection(server.address) as connection:
            connection.sendall(sent)
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert "Traceback" not in server.log


def test_a_slow_reader_holds_up_nobody(server: RunningServer) -> None:
    slow = send(server, {**ENDLESS, "max_tokens": 3000, "stream": True, "logprobs": 20})
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "of", "max_tokens": 5})
        assert answer.status_code == 200
    until(lambda: server.metric(RUNNING) == 0)  # although nothing of it was read
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        received += slow.recv(1 << 20)
    slow.close()
    assert b"data: [DONE]" in received
    assert received.count(b'"finish_reason":"length"') == 1


def test_open_requests_may_finish(tmp_path: Path, long_path: Path) -> None:
    with (
        serve_process(
            tmp_path / "log", long_path, "--max-model-len", "4096", "--shutdown-timeout", "600"
        ) as server,
        server.client() as client,
        client.stream(
            "POST", "/v1/completions", json={**ENDLESS, "max_tokens": 2000, "stream": True}
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        *chunks, done = read_events(lines)
        assert done == "[DONE]"
        assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait() == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", [[], ["--in-process"]])
def test_open_requests_are_cut_off(
    tmp_path: Path, long_path: Path, number: signal.Signals, where: list[str]
) -> None:
    arguments = [
        "--max-model-len",
        str(CONTEXT),
        "--num-kv-blocks",
        "1024",
        "--shutdown-timeout",
        "0.2",
        *where,
    ]
    with (
        serve_process(tmp_path / "log", long_path, *arguments, "--runtime", "reference") as server,
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(number)
        *_, error, done = read_events(lines)
        assert json.loads(error)["error"]["code"] == "engine_unavailable"
        assert done == "[DONE]"
        assert server.process.wait() == 0
    assert "Traceback" not in server.log


def test_a_stream_goes_on_when_the_engine_is_killed(tmp_path: Path, long_path: Path) -> None:
    """With exactly the text that it would have had; and the server answers afterwards."""
    body = {
        "prompt": "a",
        "max_tokens": 3000,
        "ignore_eos": True,
        "seed": 7,
        "temperature": 1.0,
        "stream": True,
    }
    with (
        serve_process(tmp_path / "log", long_path, "--max-model-len", "4096") as server,
        server.client() as client,
    ):
        texts = []
        for kills in (False, True):
            with client.stream("POST", "/v1/completions", json=body) as stream:
                *events, done = _events_with_kill(stream.iter_lines(), server if kills else None)
            assert done == "[DONE]"
            texts.append("".join(json.loads(event)["choices"][0]["text"] for event in events))
        assert texts[0] == texts[1]
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert client.get("/health").status_code == 200
        assert server.stop() == 0


def _events_with_kill(lines: Iterator[str], server: ServerProcess | None) -> Iterator[str]:
    """The events of a stream; the engine of `server` is killed after the tenth."""
    number = 0
    for line in lines:
        if not line.startswith("data: "):
            continue
        number += 1
        if number == 10 and server is not None:
            for pid in server.children():
                os.kill(pid, signal.SIGKILL)
        yield line.removeprefix("data: ")


def test_unix_socket(tmp_path: Path, long_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):  # the second one finds nothing that the first one left
        with serve_process(
            tmp_path / "log", long_path, "--max-model-len", "256", "--uds", str(path)
        ) as server:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://x") as client:
                assert client.get("/health").status_code == 200
            assert "is in use" in refused(long_path, "--uds", str(path))
            assert server.stop() == 0
        assert not path.exists()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with serve_process(tmp_path / "log", long_path, "--max-model-len", "256", "--uds", str(path)):
        pass


def test_tls(tmp_path: Path, long_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    flags = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--max-model-len", "256"]
    with serve_process(tmp_path / "log", long_path, *flags) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=server.url, verify=context) as client:
            assert client.get("/v1/models").status_code == 200
    assert "cannot be used" in refused(
        long_path, "--ssl-keyfile", str(certificate), "--ssl-certfile", str(key)
    )
    assert "needs both" in refused(long_path, "--ssl-keyfile", str(key))


def refused(model: Path, *arguments: str, exit_code: int = 2) -> str:
    """A start that fails. Returns the line that says why."""
    command = [sys.executable, "-m", "segue", "serve", str(model), "--max-model-len", "256", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("segue: error: ")
    return line


def test_starts_that_fail(server: RunningServer, long_path: Path, tmp_path: Path) -> None:
    assert "is in use: choose another" in refused(long_path, "--port", str(server.address[1]))
    assert "port=70000" in refused(long_path, "--port", "70000")
    assert "no address of this machine" in refused(long_path, "--host", "no.such.host.invalid", "--port", "0")
    assert "shutdown_timeout" in refused(long_path, "--shutdown-timeout", "-1", "--port", "0")
    assert "no such file" in refused(tmp_path / "none.gguf", "--port", "0").lower()
    assert "made for 16384" in refused(long_path, "--max-model-len", "20000", "--port", "0")


def test_without_the_extra_it_says_what_to_install(long_path: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'uvicorn' else find(name, *more)\n"
        f"sys.argv = ['segue', 'serve', {str(long_path)!r}]\n"
        "from segue.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        'segue: error: segue serve needs uvicorn: pip install "segue[server]"\n',
    )


def test_no_key_is_shown(tmp_path: Path, long_path: Path) -> None:
    with (
        serve_process(
            tmp_path / "log", long_path, "--max-model-len", "256", SEGUE_API_KEY="a-secret"
        ) as server,
        server.client() as client,
    ):
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer a-secret"}).status_code == 200
        assert server.stop() == 0
    assert "a-secret" not in server.log


def test_one_id_in_log_header_and_answer(tmp_path: Path, tiny_path: Path) -> None:
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
    }
    with serve_process(tmp_path / "log", tiny_path) as server, server.client() as client:
        for path, body in bodies.items():
            for given, field in (
                (None, None),
                ("mine", None),
                ("mine", "the-field"),
                (None, "x" * 300 + "é"),
            ):
                headers = {} if given is None else {"x-request-id": given}
                asked = body if field is None else {**body, "request_id": field[:256]}
                answer = client.post(path, json=asked, headers=headers)
                told = answer.headers["x-request-id"]
                assert f"POST {path} 200 {told}\n" in server.log
                _, _, own = answer.json()["id"].replace("_", "-", 1).partition("-")
                if field is not None and len(field) > 256:
                    assert own == field[:256]
                else:
                    assert told in (own, f"req_{own}")
                    assert own == (field or given or own)
        client.get("/a%0Ab")
        assert "GET /a%0Ab 404" in server.log


def test_more_requests_than_may_wait(tmp_path: Path, long_path: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-queue", "1", "--max-model-len", str(CONTEXT))
    body = {"prompt": "a", "max_tokens": 2}
    with serve_process(tmp_path / "log", long_path, *flags) as server, server.client() as client:
        connections = [send(server, {**ENDLESS, "stream": True}) for _ in range(2)]
        until(lambda: client.post("/v1/completions", json=body).status_code == 429)
        messages = [{"role": "user", "content": "a"}]
        for path, asked in (
            ("/v1/completions", body),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "a"}),
        ):
            refused = client.post(path, json=asked)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "queue_full"
            assert "--max-queue" in refused.json()["error"]["message"]
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert client.get("/health").status_code == 200
        for connection in connections:
            connection.close()
        until(lambda: client.post("/v1/completions", json=body).status_code == 200)
