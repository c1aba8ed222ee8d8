"""Server-sent events, and work that ends when its client goes away: what every answer is sent with."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from segue.server.shared.http_errors import ErrorResponse, error_of

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns. Cancels it when the client goes away, and raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def json_when_done(request: Request, work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """The work's result as JSON, if the client is still there by then."""
    try:
        return json_response(await while_connected(request.receive, work))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def json_response(body: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def data_event(body: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(name: str, body: msgspec.Struct) -> bytes:
    return b"event: " + name.encode() + b"\n" + data_event(body)


async def until_done(chunks: AsyncGenerator[msgspec.Struct, None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream that ends with [DONE]. An error becomes its last chunk."""
    async with contextlib.aclosing(chunks):
        try:
            async for chunk in chunks:
                yield data_event(chunk)
        except Exception as error:
            yield data_event(stream_error(error))
    yield DONE


def stream_error(error: Exception) -> ErrorResponse:
    """For a stream whose status has been sent: the status becomes the code where there is none."""
    status, body = error_of(error)
    if body.error.code is not None:
        return body
    return ErrorResponse(msgspec.structs.replace(body.error, code=str(status.value)))


class EventStream(Response):
    """Sends events as they come. Closes their generator when the client goes away or reads no more."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = HTTPStatus.OK
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
