"""What every request passes through: where it comes from, the key, the request's id, the count."""

import base64
import binascii
import hmac
import ipaddress
import logging
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.server.shared import request_id
from segue.server.shared.http_errors import HttpError, error_response
from segue.server.shared.metrics import Metrics
from segue.server.shared.options import ServerOptions

log = logging.getLogger("segue.server")

OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics", "/docs", "/openapi.json"})
"""Without a key: nothing there can be made to work, or shows what others ask."""
OPEN_PREFIX = "/web/"
"""The files of the page at "/", which then asks for the key."""
SUBPROTOCOL_KEY = "openai-insecure-api-key."
"""How a browser's WebSocket, which cannot set headers, brings a key."""
SUBPROTOCOL_ENCODED_KEY = "segue-api-key."
"""The same with the key as base64url without padding: a subprotocol cannot have a "/" or a "=" in it."""
ANY = "*"
SHOWN_CHARS = 128
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Counted by name."""


class PlaceCheck:
    """Refuses what a browser sends for a page from elsewhere.

    The page may be open about it (`Origin`), or have its own name lead to this server (`Host`: DNS rebinding).
    Clients that are no browsers send no `Origin`, and in `Host` what their user gave as the address.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._origins = frozenset(options.cors_origins)
        # No browser reaches a Unix socket; a proxy in front of it sends the names of its own.
        self._hosts = frozenset({ANY}) if options.uds is not None else _own_names(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = None if scope["type"] == "lifespan" else self._why_not(Headers(scope=scope))
        if why is None:
            await self._app(scope, receive, send)
        else:
            await error_response(HttpError(why, status=HTTPStatus.FORBIDDEN))(scope, receive, send)

    def _why_not(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(_address("", host)[0]):
            return f"the server does not go by the name {_shown(host)}: --allowed-host lets it"
        if origin is None or not self._origins.isdisjoint({ANY, origin}):
            return None
        scheme, _, address = origin.partition("://")
        if host and address and _address(scheme, address) == _address(scheme, host):
            return None
        return f"pages of {_shown(origin)} may not use this server: --cors-origin lets them"

    def _is_own(self, name: str) -> bool:
        """Nobody can make an address lead elsewhere."""
        if _ip_address(name) is not None or not self._hosts.isdisjoint({ANY, name}):
            return True
        return any(name.endswith(host[1:]) for host in self._hosts if host.startswith("*."))


def _own_names(options: ServerOptions) -> frozenset[str]:
    """Those that are given, and those of the machine: for others too if the server listens to others."""
    names = {"localhost", "*.localhost", options.host, *options.allowed_hosts}
    address = _ip_address(options.host)
    if address is None or not address.is_loopback:
        own = socket.gethostname()
        names |= {own, f"{own.partition('.')[0]}.local"}
    return frozenset(name.lower().rstrip(".") for name in names)


def _ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _address(scheme: str, address: str) -> tuple[str, int | None]:
    """Name and port. The name of what is no address is empty."""
    try:
        parts = urlsplit(f"//{address}")
        return (parts.hostname or "").rstrip("."), parts.port or {"http": 80, "https": 443}.get(scheme)
    except ValueError:
        return "", None


def _shown(header: str) -> str:
    return ascii(header if len(header) <= SHOWN_CHARS else f"{header[:SHOWN_CHARS]}…")


class KeyCheck:
    """Lets only those in who have one of the keys."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._may_enter(scope):
            await self._app(scope, receive, send)
        else:
            await error_response(_refusal(scope))(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        if scope["type"] == "lifespan" or scope.get("method") == "OPTIONS":
            return True
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_PREFIX):
            return True
        given = [key.encode() for key in _given_keys(scope)]
        return any(hmac.compare_digest(key, known) for key in given for known in self._keys)


def _given_keys(scope: Scope) -> Iterator[str]:
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    for protocol in scope.get("subprotocols", ()):
        if protocol.startswith(SUBPROTOCOL_KEY):
            yield protocol.removeprefix(SUBPROTOCOL_KEY)
        elif protocol.startswith(SUBPROTOCOL_ENCODED_KEY):
            encoded = protocol.removeprefix(SUBPROTOCOL_ENCODED_KEY)
            with suppress(binascii.Error, UnicodeDecodeError):
                yield base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()


def _refusal(scope: Scope) -> HttpError:
    if "authorization" in Headers(scope=scope):
        message, code = "Incorrect API key provided", "invalid_api_key"
    else:
        message, code = "You didn't provide an API key: send it as Authorization: Bearer KEY", None
    headers = {"www-authenticate": "Bearer"}
    return HttpError(message, status=HTTPStatus.UNAUTHORIZED, code=code, headers=headers)


class RequestLog:
    """Gives each request an id, counts it by route and status, and tells of it in the log."""

    def __init__(self, app: ASGIApp, metrics: Metrics, router: Router, *, tells: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._router = router
        self._tells = tells

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id.begin(Headers(scope=scope).get("x-request-id", ""))

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = request_id.current()
                assert given is not None
                MutableHeaders(scope=message)["x-request-id"] = given
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._metrics.http_request(method, self._route(scope), message["status"])
                if self._tells:
                    client, path = (scope["client"] or ("-",))[0], quote(scope["path"])
                    log.info("%s %s %s %d %s", client, method, path, message["status"], given)
            await send(message)

        await self._app(scope, receive, send_counted)

    def _route(self, scope: Scope) -> str:
        """The path as it is declared, since there is no end of paths that clients can think of."""
        for route in self._router.routes:
            match, _ = route.matches(scope)
            if match is not Match.NONE:
                return str(getattr(route, "path", "other"))
        return "other"
