"""Runs a server until a signal ends it.

SIGTERM, SIGINT ─▶ 503 to new requests ─▶ all answered, or the time-out: the others get an error ─▶ exit code 0
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from segue import __version__
from segue.llm.async_llm import AsyncLLM
from segue.server.app import create_app
from segue.server.ops.listen import address_of
from segue.server.ops.saved_sessions import StateStore
from segue.server.page.routes import web_routes
from segue.server.realtime.registry import SessionRegistry
from segue.server.realtime.route import realtime_routes
from segue.server.realtime.saver import SessionSaver
from segue.server.realtime.session import shutting_down
from segue.server.shared.http_errors import error_response
from segue.server.shared.options import ServerOptions
from segue.server.shared.serving import Serving

log = logging.getLogger("segue.server")

CUT_OFF_S = 5.0
"""How long requests that are cut off may take to say so."""
POLL_S = 0.05
LAST_S = 1
"""How long connections may take that say nothing."""
BACKLOG = 2048


def run_server(llm: AsyncLLM, model: str, options: ServerOptions, listener: socket.socket) -> None:
    """Serves on a bound socket. Closes the socket; the model is the caller's to shut down, again if need be."""
    _set_up_logging(options)
    serving = Serving(llm, model, options)
    store = _state_store(options, serving.model_name)
    registry = SessionRegistry(options, None if store is None else SessionSaver(store))
    door = Door(create_app(serving, more_routes=(*realtime_routes(registry), *web_routes())))
    config = uvicorn.Config(
        door,
        log_config=None,
        access_log=False,  # ours has the request's id
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        lifespan="off",
        ws_max_size=options.max_request_bytes,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_S,
    )
    try:
        _Server(config, serving, registry, door, address_of(listener, options)).run(sockets=[listener])
    finally:
        listener.close()
        if store is not None:
            store.close()
        if options.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(options.uds)


def _state_store(options: ServerOptions, model_name: str) -> StateStore | None:
    if options.state_dir is None:
        return None
    return StateStore(
        Path(options.state_dir),
        model_name,
        max_sessions=options.max_saved_sessions,
        max_age_days=options.saved_session_days,
    )


class Door:
    """Counts what is being answered. Once it is closed, it answers all that comes with 503."""

    def __init__(self, app: ASGIApp) -> None:
        self.num_open = 0
        self._app = app
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_closed:
            await error_response(shutting_down())(scope, receive, send)
            return
        self.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_open -= 1


class _Server(uvicorn.Server):
    """A server whose process ends with exit code 0 after a signal."""

    def __init__(
        self, config: uvicorn.Config, serving: Serving, registry: SessionRegistry, door: Door, address: str
    ) -> None:
        super().__init__(config)
        self._serving = serving
        self._registry = registry
        self._door = door
        self._address = address

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end.
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("Segue %s serves %s at %s", __version__, self._serving.model_name, self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("no new requests; open ones may take %g s", self._serving.options.shutdown_timeout_s)
        self._door.close()
        self._registry.drain()
        await self._answered(self._serving.options.shutdown_timeout_s)
        if self._door.num_open and not self.force_exit:
            log.warning("open requests are cut off")
            # Without an engine, what is open ends with an error that says so.
            await asyncio.to_thread(self._serving.llm.shutdown)
            await self._answered(CUT_OFF_S)
        await self._registry.close()
        await super().shutdown(sockets)

    async def _answered(self, timeout_s: float) -> None:
        """Waits until nothing is open, for so long at most; a second SIGINT ends it."""
        end_s = time.monotonic() + timeout_s
        while self._door.num_open and not self.force_exit and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)


def _set_up_logging(options: ServerOptions) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    logging.getLogger("segue").setLevel(level)
    for name in ("segue", "uvicorn"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    # What uvicorn tells of its life is told here.
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING))
