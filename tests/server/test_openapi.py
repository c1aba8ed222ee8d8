"""Requests made from the OpenAPI document, right and wrong ones: none may break the server.

A longer sweep:  python -m tests.server.sweep --examples 2000
"""

from tests.server.running import ServerProcess
from tests.server.sweep import sweep


def test_no_request_breaks_the_server(server: ServerProcess) -> None:
    assert sweep(server.url, examples=25, seed=1) > 100
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert "Traceback" not in server.log
