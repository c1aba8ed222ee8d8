"""The WebSocket at /v1/realtime.

    reader   receives an event, carries it out, receives the next     waits for the log, and so for the writer
    writer   sends what is in the session's log, in order              waits for the client to read

A connection may end at any moment; the session stays for a while. See `SessionRegistry`.
"""

import asyncio
from contextlib import suppress
from functools import partial

import msgspec
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from segue.errors import UsageError
from segue.server.errors import HttpError
from segue.server.realtime.registry import SUPERSEDED, Attachment, SessionRegistry
from segue.server.realtime.session import error_fields
from segue.server.serving import serving_of

PATH = "/v1/realtime"
SUBPROTOCOL = "realtime"
POLICY_VIOLATION = 1008


def realtime_routes(registry: SessionRegistry) -> tuple[BaseRoute, ...]:
    """To be added to the application."""
    return (WebSocketRoute(PATH, partial(_realtime, registry)),)


async def _realtime(registry: SessionRegistry, socket: WebSocket) -> None:
    protocols = socket.scope.get("subprotocols", [])
    await socket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in protocols else None)
    serving = serving_of(socket)
    query = socket.query_params
    try:
        serving.check_model(query.get("model"))
        attachment = await registry.attach(serving, query.get("session_id"), query.get("last_event_id"))
    except UsageError as error:
        await _refuse(socket, error)
        return
    try:
        await _serve(socket, attachment)
    finally:
        registry.detach(attachment)


async def _refuse(socket: WebSocket, error: UsageError) -> None:
    """Say why, in an event, and close."""
    event = {"type": "error", "event_id": "event_0", "error": error_fields(error)}
    await socket.send_text(msgspec.json.encode(event).decode())
    await socket.close(POLICY_VIOLATION)


async def _serve(socket: WebSocket, attachment: Attachment) -> None:
    """Until one side ends the connection, or another connection takes the session."""
    tasks = [
        asyncio.create_task(_read(socket, attachment)),
        asyncio.create_task(_write(socket, attachment)),
        asyncio.create_task(attachment.lost.wait()),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        attachment.released.set()
    if attachment.lost.is_set() and socket.client_state is WebSocketState.CONNECTED:
        with suppress(RuntimeError, WebSocketDisconnect):
            await socket.close(SUPERSEDED, "the session was taken up by another connection")
    for task in done:
        error = task.exception()
        if error is not None and not isinstance(error, WebSocketDisconnect):
            raise error


async def _read(socket: WebSocket, attachment: Attachment) -> None:
    session = attachment.session
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        data = message.get("text")
        if data is None:
            await session.tell_error(HttpError("events are text, not binary messages", code="invalid_json"))
            continue
        await session.receive(data)


async def _write(socket: WebSocket, attachment: Attachment) -> None:
    log = attachment.session.log
    while True:
        data = await log.next()
        await socket.send_text(data.decode())
        log.sent()
