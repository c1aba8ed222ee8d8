"""Who may use the server: pages from elsewhere may not, by their origin or by DNS rebinding; keys of any form may."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin, Subprotocol

from segue.errors import ParameterError
from segue.server.ops.access import _own_names
from segue.server.shared.options import ServerOptions
from tests.server.conftest import Scripted
from tests.server.running import RunningServer, serve_process
from tests.server.test_errors import error_of

PATHS = ("/", "/health", "/v1/models", "/engine", "/nothing")


def handshake(server: RunningServer, **options: Any) -> tuple[int, bytes]:
    """The status of a WebSocket's handshake, and the body of a refusal."""
    host, port = server.address

    async def run() -> tuple[int, bytes]:
        name = options.pop("name", host)
        try:
            async with connect(f"ws://{name}:{port}/v1/realtime", host=host, port=port, **options) as socket:
                assert json.loads(await socket.recv())["type"] == "session.created"
            return 101, b""
        except InvalidStatus as error:
            return error.response.status_code, bytes(error.response.body or b"")

    return asyncio.run(run())


def statuses(server: RunningServer, **headers: str) -> set[int]:
    with server.client() as client:
        answers = [client.get(path, headers=headers) for path in PATHS]
        answers.append(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers))
    for answer in answers:
        if answer.status_code == 403:
            assert error_of(answer)
    return {answer.status_code for answer in answers}


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://[", ""])
def test_pages_from_elsewhere_are_refused(server: RunningServer, origin: str) -> None:
    assert statuses(server, origin=origin) == {403}
    status, body = handshake(server, origin=Origin(origin))
    assert status == 403
    assert "--cors-origin" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "name", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "x" * 300]
)
def test_names_that_lead_here_are_refused(server: RunningServer, name: str) -> None:
    """DNS rebinding: for its browser, the page is of the same origin as this server."""
    port = server.address[1]
    assert statuses(server, host=f"{name}:{port}") == {403}
    assert statuses(server, host=f"{name}:{port}", origin=f"http://{name}:{port}") == {403}
    status, body = handshake(server, name=name, origin=Origin(f"http://{name}:{port}"))
    assert status == 403
    assert "--allowed-host" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "LOCALHOST", "localhost.", "a.localhost", "[::1]"]
)
def test_own_pages_and_clients_without_an_origin_come_in(server: RunningServer, name: str) -> None:
    port = server.address[1]
    assert statuses(server, host=f"{name}:{port}") == {200, 404}
    assert statuses(server, host=f"{name}:{port}", origin=f"http://{name.lower()}:{port}") == {200, 404}
    assert statuses(server, host=name, origin=f"https://{name.lower()}") == {200, 404}  # behind a proxy
    if name != "[::1]":
        assert handshake(server, name=name, origin=Origin(f"http://{name.lower()}:{port}"))[0] == 101
    assert handshake(server)[0] == 101


@pytest.mark.parametrize(
    "scripted",
    [
        ServerOptions(
            cors_origins=("https://a.example",), allowed_hosts=("llm.example", "*.lan.example", "UP.example")
        )
    ],
    indirect=True,
)
def test_flags_let_in(scripted: Scripted) -> None:
    server, port = scripted.server, scripted.server.address[1]
    with server.client() as client:

        def status(**headers: str) -> int:
            return client.get("/health", headers=headers).status_code

        assert status(origin="https://a.example") == 200
        assert status(origin="https://b.example") == 403
        assert status(origin="https://a.example:8443") == 403
        for name in ("llm.example", f"llm.example:{port}", "a.lan.example", "b.a.lan.example", "up.example"):
            assert status(host=name) == 200, name
        for name in ("a.llm.example", "lan.example", "xlan.example", "a.lan.example.evil.example"):
            assert status(host=name) == 403, name
        assert status(host="llm.example", origin="https://evil.example") == 403


@pytest.mark.parametrize(
    "scripted", [ServerOptions(cors_origins=("*",), allowed_hosts=("*",))], indirect=True
)
def test_stars_let_all_in(scripted: Scripted) -> None:
    assert statuses(scripted.server, host="evil.example", origin="https://evil.example") == {200, 404}


def test_names_of_a_server_that_listens_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Box.lan")
    assert _own_names(ServerOptions()) == {"localhost", "*.localhost", "127.0.0.1"}
    for host in ("0.0.0.0", "::", "192.168.0.2"):
        assert _own_names(ServerOptions(host=host)) >= {"box.lan", "box.local"}
    assert "llm.lan" in _own_names(ServerOptions(host="llm.lan"))


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:80", "a.*", "*a.example", "a b"])
def test_hosts_that_are_no_names(name: str) -> None:
    with pytest.raises(ParameterError, match="allowed_host"):
        ServerOptions(allowed_hosts=(name,))


KEY = 'a/b=c+"~ d=='


def test_keys_in_a_subprotocol(tmp_path: Path, tiny_path: Path) -> None:
    def encoded(key: bytes) -> str:
        return f"segue-api-key.{base64.urlsafe_b64encode(key).decode().rstrip('=')}"

    with serve_process(tmp_path / "log", tiny_path, "--api-key", KEY, "--api-key", "plain") as server:
        for protocol, status in (
            (encoded(KEY.encode()), 101),
            (encoded(b"plain"), 101),
            ("openai-insecure-api-key.plain", 101),
            (encoded(b"other"), 401),
            (encoded(b"\xff"), 401),
            ("segue-api-key.a", 401),
            ("segue-api-key.", 401),
        ):
            protocols = [Subprotocol("realtime"), Subprotocol(protocol)]
            assert handshake(server, subprotocols=protocols)[0] == status, protocol
