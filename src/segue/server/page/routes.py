"""`/`, the page's files, and `/engine`."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from importlib import resources

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from segue.contract.reports import EngineSnapshot, EngineStats
from segue.errors import EngineDead
from segue.host.client import EngineState
from segue.server.shared.serving import Serving, serving_of
from segue.server.shared.sse import json_response

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/web/style.css": ("style.css", "text/css; charset=utf-8"),
    "/web/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/web/engine.js": ("engine.js", "text/javascript; charset=utf-8"),
    "/web/session.js": ("session.js", "text/javascript; charset=utf-8"),
}
"""By path: the file and its type."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
MAX_AGE_S = 0.1
"""However many look at the engine, it is not asked more often than this."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """What `/engine` answers."""

    engine: EngineState
    model: str
    block_size: int
    """Tokens in a KV block."""
    max_model_len: int
    stats: EngineStats | None = None
    """None while the engine is being started again."""
    snapshot: EngineSnapshot | None = None


class _Watch:
    """The last view, for all who look within MAX_AGE_S."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._view: EngineView | None = None
        self._made_s = 0.0

    async def view(self, serving: Serving) -> EngineView:
        async with self._lock:
            if self._view is None or time.monotonic() - self._made_s > MAX_AGE_S:
                self._view = await _look(serving)
                self._made_s = time.monotonic()
            return self._view


def web_routes() -> tuple[BaseRoute, ...]:
    """To be added to the application."""
    pages = [Route(path, _file(name, kind), methods=["GET"]) for path, (name, kind) in FILES.items()]
    return (*pages, Route("/engine", partial(_engine, _Watch()), methods=["GET"]))


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    """Answers with a file of the package."""
    body = resources.files("segue.server.page").joinpath("static", name).read_bytes()
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    return answer


async def _engine(watch: _Watch, request: Request) -> Response:
    return json_response(await watch.view(serving_of(request)))


async def _look(serving: Serving) -> EngineView:
    config, loop = serving.llm.config, serving.llm.engine_loop
    view = EngineView(
        engine=loop.state,
        model=serving.model_name,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
    )
    if view.engine != "running":
        return view
    try:
        stats, snapshot = await asyncio.gather(serving.llm.stats(), serving.llm.snapshot())
    except EngineDead:
        return msgspec.structs.replace(view, engine="dead")
    return msgspec.structs.replace(view, stats=stats, snapshot=snapshot)
