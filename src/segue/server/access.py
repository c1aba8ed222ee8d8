"""What every request passes through: the key, the request's id, the count."""

import hmac
import uuid
from collections.abc import Iterable
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.server.errors import HttpError, error_response
from segue.server.metrics import Metrics

OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics", "/docs", "/openapi.json"})
"""Without a key: nothing there can be made to work, or shows what others ask."""
OPEN_PREFIX = "/web/"
"""The files of the page at "/", which then asks for the key."""
SUBPROTOCOL_KEY = "openai-insecure-api-key."
"""How a browser's WebSocket, which cannot set headers, brings a key."""
MAX_ID_CHARS = 128
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Counted by name."""


class KeyCheck:
    """Lets only those in who have one of the keys."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._may_enter(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "Incorrect API key provided"})
        else:
            await error_response(_refusal(scope))(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        if scope["type"] == "lifespan" or scope.get("method") == "OPTIONS":
            return True
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_PREFIX):
            return True
        given = [key.encode() for key in _given_keys(scope)]
        return any(hmac.compare_digest(key, known) for key in given for known in self._keys)


def _given_keys(scope: Scope) -> list[str]:
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    keys = [key.strip()] if scheme.lower() == "bearer" else []
    protocols = scope.get("subprotocols", ())
    return keys + [
        each.removeprefix(SUBPROTOCOL_KEY) for each in protocols if each.startswith(SUBPROTOCOL_KEY)
    ]


def _refusal(scope: Scope) -> HttpError:
    if "authorization" in Headers(scope=scope):
        message, code = "Incorrect API key provided", "invalid_api_key"
    else:
        message, code = "You didn't provide an API key: send it as Authorization: Bearer KEY", None
    headers = {"www-authenticate": "Bearer"}
    return HttpError(message, status=HTTPStatus.UNAUTHORIZED, code=code, headers=headers)


class RequestCount:
    """Counts requests by route and status, and gives each an id, which clients show in their logs."""

    def __init__(self, app: ASGIApp, metrics: Metrics, router: Router) -> None:
        self._app = app
        self._metrics = metrics
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._metrics.http_request(method, self._route(scope), message["status"])
            await send(message)

        await self._app(scope, receive, send_counted)

    def _route(self, scope: Scope) -> str:
        """The path as it is declared, since there is no end of paths that clients can think of."""
        for route in self._router.routes:
            match, _ = route.matches(scope)
            if match is not Match.NONE:
                return str(getattr(route, "path", "other"))
        return "other"


def _request_id(given: str) -> str:
    if given and len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req_{uuid.uuid4().hex}"
