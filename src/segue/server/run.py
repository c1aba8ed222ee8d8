"""Runs a server until a signal ends it.

SIGTERM, SIGINT ─▶ no new requests ─▶ all answered, or the time-out: the others get an error ─▶ exit code 0
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from segue import __version__
from segue.async_llm import AsyncLLM
from segue.server.app import create_app
from segue.server.listen import address_of
from segue.server.options import ServerOptions
from segue.server.realtime.registry import SessionRegistry
from segue.server.realtime.route import realtime_routes
from segue.server.serving import Serving
from segue.server.state_store import StateStore
from segue.server.web.routes import web_routes

log = logging.getLogger("segue.server")

CUT_OFF_S = 5.0
"""How long requests that are cut off may take to say so."""
BACKLOG = 2048


def run_server(llm: AsyncLLM, model: str, options: ServerOptions, listener: socket.socket) -> None:
    """Serves on a bound socket. Closes the socket; the model is the caller's to shut down, again if need be."""
    _set_up_logging(options)
    serving = Serving(llm, model, options)
    store = None if options.state_dir is None else StateStore(Path(options.state_dir), serving.model_name)
    registry = SessionRegistry(resume_timeout_s=options.resume_timeout_s, store=store)
    config = uvicorn.Config(
        create_app(serving, more_routes=(*realtime_routes(registry), *web_routes())),
        log_config=None,
        access_log=options.access_log,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        lifespan="off",
        ws_max_size=options.max_request_bytes,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout_s + CUT_OFF_S),
    )
    try:
        _Server(config, serving, address_of(listener, options)).run(sockets=[listener])
    finally:
        listener.close()
        if store is not None:
            store.close()
        if options.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(options.uds)


class _Server(uvicorn.Server):
    """A server whose process ends with exit code 0 after a signal."""

    def __init__(self, config: uvicorn.Config, serving: Serving, address: str) -> None:
        super().__init__(config)
        self._serving = serving
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
        cut_off = asyncio.ensure_future(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cut_off.cancel()

    async def _cut_off(self) -> None:
        await asyncio.sleep(self._serving.options.shutdown_timeout_s)
        log.warning("open requests are cut off")
        # Without an engine, what is open ends with an error that says so.
        await asyncio.to_thread(self._serving.llm.shutdown)


def _set_up_logging(options: ServerOptions) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    for name in ("segue", "uvicorn.access"):
        logging.getLogger(name).setLevel(level)
    for name in ("segue", "uvicorn"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    # What uvicorn tells of its life is told here.
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING))
