"""The WebSocket at /v1/realtime.

    reader   receives an event, carries it out, receives the next     waits for the log, and so for the writer
    writer   sends what is in the session's log, in order              waits for the client to read

A connection may end at any moment; unless its client closed it, the session stays for a while. See `SessionRegistry`.
"""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from segue.errors import UsageError
from segue.server.realtime.event_log import FIRST_ID
from segue.server.realtime.registry import Attachment, SessionRegistry
from segue.server.realtime.server_events import error_event
from segue.server.realtime.session import RealtimeSession
from segue.server.shared.http_errors import HttpError
from segue.server.shared.serving import serving_of

PATH = "/v1/realtime"
SUBPROTOCOL = "realtime"
BETA_SUBPROTOCOL = "openai-beta.realtime-v1"

NORMAL = 1000
NO_CODE = 1005
POLICY_VIOLATION = 1008
INTERNAL_ERROR = 1011
SERVICE_RESTART = 1012
TRY_AGAIN_LATER = 1013
BETA_CLIENT = 4000
"""OpenAI's own."""
SUPERSEDED = 4001
"""For a client whose session another connection has taken over."""
TIMED_OUT = 4002

CLOSE_S = 5.0
"""How long a client may take to read that it is over."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Why a connection ends."""

    code: int | None = None
    """To close with; None: it is closed."""
    reason: str = ""
    frees: bool = False
    """Whether the session ends too."""


def realtime_routes(registry: SessionRegistry) -> tuple[BaseRoute, ...]:
    """To be added to the application."""
    return (WebSocketRoute(PATH, partial(_realtime, registry)),)


async def _realtime(registry: SessionRegistry, socket: WebSocket) -> None:
    protocols = socket.scope.get("subprotocols", [])
    await socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in protocols else None)
    serving = serving_of(socket)
    query = socket.query_params
    try:
        if BETA_SUBPROTOCOL in protocols or "realtime=v1" in socket.headers.get("openai-beta", ""):
            raise HttpError(
                "this server has the Realtime API as it is, not its beta interface: use a newer client, "
                'or leave out "OpenAI-Beta: realtime=v1" (the subprotocol openai-beta.realtime-v1)',
                code="beta_api_shape_disabled",
            )
        serving.check_model(query.get("model"))
        async with registry.attached(
            serving, query.get("session_id"), query.get("last_event_id")
        ) as attachment:
            await _serve(socket, registry, attachment)
    except WebSocketDisconnect:
        pass
    except Exception as error:
        await _refuse(socket, error)


async def _refuse(socket: WebSocket, error: Exception) -> None:
    """Say why, in an event, and close."""
    event = error_event(error)
    event.event_id = FIRST_ID
    match error:
        case HttpError(code="beta_api_shape_disabled"):
            code = BETA_CLIENT
        case HttpError(status=HTTPStatus.TOO_MANY_REQUESTS):
            code = TRY_AGAIN_LATER
        case UsageError():
            code = POLICY_VIOLATION
        case _:
            code = INTERNAL_ERROR
    await _close(socket, code, event=msgspec.json.encode(event).decode())


async def _close(socket: WebSocket, code: int, reason: str = "", *, event: str | None = None) -> None:
    """Close with this code, after an event, if the client still listens."""
    if socket.client_state is not WebSocketState.CONNECTED:
        return
    with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            if event is not None:
                await socket.send_text(event)
            await socket.close(code, reason)


async def _serve(socket: WebSocket, registry: SessionRegistry, attachment: Attachment) -> None:
    """Until one side ends the connection, or another connection takes the session."""
    session = attachment.session
    sources: tuple[Coroutine[Any, Any, Ending], ...] = (
        _read(socket, session),
        _write(socket, session),
        _superseded(attachment),
        _silent(session, registry.options.session_timeout_s),
        _drained(registry, session),
    )
    tasks = [asyncio.create_task(source) for source in sources]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        attachment.released.set()
    (ending, *_) = [task.result() for task in tasks if task in done]
    attachment.frees = ending.frees
    if ending.code is not None:
        await _close(socket, ending.code, ending.reason)


async def _read(socket: WebSocket, session: RealtimeSession) -> Ending:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            # A close frame, which has a reason, be it empty: the client is done. Without one the connection was lost.
            is_deliberate = message.get("code") in (NORMAL, NO_CODE) and message.get("reason") is not None
            return Ending(frees=is_deliberate)
        data = message.get("text")
        if data is None:
            session.tell_error(HttpError("events are text, not binary messages", code="invalid_json"))
            await session.log.room()
        else:
            await session.receive(data)
        await asyncio.sleep(0)  # many small events in one packet are not to be carried out at one go


async def _write(socket: WebSocket, session: RealtimeSession) -> Ending:
    log = session.log
    while True:
        data = await log.next()
        try:
            await socket.send_text(data.decode())
        except WebSocketDisconnect:
            return Ending()
        log.sent()


async def _superseded(attachment: Attachment) -> Ending:
    await attachment.lost.wait()
    return Ending(code=SUPERSEDED, reason="the session was taken up by another connection")


async def _silent(session: RealtimeSession, timeout_s: float) -> Ending:
    """When its client has said nothing, and no answer was given, for so long."""
    session.touch()
    while (rest_s := session.last_used_s + timeout_s - time.monotonic()) > 0:
        await asyncio.sleep(rest_s)
        await session.idle.wait()
    return Ending(code=TIMED_OUT, reason=f"no event for {timeout_s:g} s", frees=True)


async def _drained(registry: SessionRegistry, session: RealtimeSession) -> Ending:
    """When the server is about to end and the client has all of its answer."""
    await registry.draining.wait()
    await session.idle.wait()
    await session.log.all_sent()
    return Ending(code=SERVICE_RESTART, reason="the server is being shut down")
