"""A plain WebSocket client of the realtime API, for tests."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.server.running import RunningServer

Event = dict[str, Any]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def url(server: RunningServer, **query: str) -> str:
    text = "&".join(f"{name}={value}" for name, value in {"model": server.model, **query}.items())
    return f"{server.url.replace('http', 'ws')}/v1/realtime?{text}"


class Client:
    """A plain WebSocket client."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[Event] = []

    async def send(self, kind: str, **fields: object) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> Event:
        event: Event = json.loads(await self.socket.recv())
        self.events.append(event)
        return event

    async def until(self, kind: str) -> Event:
        while True:
            event = await self.next()
            if event["type"] == kind:
                return event
            assert event["type"] != "error" or kind == "error", event

    async def say(self, text: str, role: str = "user") -> str:
        """Add an item. Its id."""
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        await self.send("conversation.item.create", item=item)
        done = await self.until("conversation.item.done")
        item_id: str = done["item"]["id"]
        return item_id

    async def answer(self, **fields: object) -> Event:
        await self.send("response.create", response=fields)
        done = await self.until("response.done")
        response: Event = done["response"]
        return response


@asynccontextmanager
async def client(server: RunningServer, **query: str) -> AsyncIterator[Client]:
    async with connect(url(server, **query)) as socket:
        yield Client(socket)


def text_of(response: Event) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    text: str = part["text"]
    return text


GREEDY = {"temperature": 0, "max_output_tokens": 12}
