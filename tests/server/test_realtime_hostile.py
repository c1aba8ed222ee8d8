"""Realtime clients that mean harm, or know no better."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.server.realtime_client import Client, client, run
from tests.server.running import serve_process, until

KINDS = {
    "session.update": 2,
    "conversation.item.create": 4,
    "conversation.item.delete": 1,
    "conversation.item.retrieve": 1,
    "response.create": 6,
    "response.cancel": 1,
    "input_text.append": 5,
    "input_text.revise": 2,
    "input_text.clear": 1,
    "input_text.commit": 2,
}
"""And how often."""


class Hostile:
    """Draws events, most of them possible."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.item_ids = ["root", "none"]

    def event(self) -> str:
        draw = self.random
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        event: dict[str, Any] = {"type": kind, "event_id": draw.choice(["a", None, "x" * 200])}
        fields_of: dict[str, Callable[[], dict[str, object]]] = {
            "session.update": lambda: {"session": self._settings()},
            "conversation.item.create": lambda: {"item": self._item(), "previous_item_id": self._id()},
            "conversation.item.delete": lambda: {"item_id": self._id()},
            "conversation.item.retrieve": lambda: {"item_id": self._id()},
            "response.create": lambda: {"response": {**self._settings(), **self._answer()}},
            "response.cancel": lambda: {"response_id": draw.choice([None, None, "resp_1"])},
            "input_text.append": lambda: {"text": self._text()},
            "input_text.revise": lambda: {"text": self._text()},
        }
        fields = fields_of[kind]() if kind in fields_of else {}
        event.update(fields)
        data = json.dumps(event)
        match draw.randrange(20):
            case 0:
                return data[: draw.randrange(len(data))]
            case 1:
                return data.replace('"', draw.choice(["'", "", "\\\\"]), draw.randrange(9))
            case 2:
                return json.dumps({**event, draw.choice([*event, *fields]): self._junk()})
        return data

    def _junk(self) -> object:
        nested: object = 1
        for _ in range(self.random.choice([1, 500])):
            nested = [nested]
        return self.random.choice(
            [None, 0, -1, 10**30, 1e308, "", "x", [], {}, [None], {"": None}, nested, True]
        )

    def _id(self) -> str | None:
        return self.random.choice([None, *self.item_ids])

    def _text(self) -> str:
        draw = self.random
        return draw.choice(
            ["the hen ", "é🦔", "\\0", "", "<|im_end|>", "a" * 3000, "the hen " * 100, "an inn " * 3000]
        )

    def _item(self) -> dict[str, object]:
        draw = self.random
        item: dict[str, object] = {
            "type": "function_call" if draw.random() < 0.05 else "message",
            "role": draw.choice(["user", "assistant", "system", "user", "user"]),
            "content": [{"type": draw.choice(["input_text", "text"]), "text": self._text()}],
        }
        if draw.random() < 0.5:
            item["id"] = f"item_{draw.randrange(8)}"
            self.item_ids.append(str(item["id"]))
        return item

    def _settings(self) -> dict[str, object]:
        draw = self.random
        every: dict[str, tuple[list[object], list[object]]] = {
            "instructions": (["", "rain"], ["an inn " * 3000, 5]),
            "max_output_tokens": ([1, 40, 400, "inf"], [0, 10**9, 10**25]),
            "temperature": ([0, 1.5], [-1]),
            "seed": ([1, -1, 2**63 - 1], [2**64]),
            "stop": ([["hen"], [""], []], [["a"] * 20000, "x"]),
            "top_k": ([1, 0, 5], [-9, 10**12]),
            "tools": ([[]], [[{}]]),
        }
        names = draw.sample(list(every), draw.choice([0, 0, 1, 2]))
        return {name: draw.choice(every[name][draw.random() < 0.15]) for name in names}

    def _answer(self) -> dict[str, object]:
        draw = self.random
        every: dict[str, list[object]] = {
            "conversation": ["auto", "none", "x"],
            "input": [[], [self._item()], [self._item()] * 3],
            "metadata": [{}, {"a": "b"}, {"a": 1}, {str(i): "" for i in range(20)}],
            "max_output_tokens": [20, 400],
        }
        return {
            name: draw.choice(every[name]) for name in draw.sample(list(every), draw.choice([0, 0, 1, 2]))
        }


async def comes_to_rest(c: Client) -> None:
    """The session answers, and can be brought into a state in which it answers what is asked."""
    await c.send("response.cancel")
    await c.send("conversation.item.retrieve", item_id="-", event_id="ping")
    while (event := await c.next())["type"] != "error" or event["error"]["event_id"] != "ping":
        pass
    fields = {"instructions": "", "temperature": 0, "stop": [], "top_k": 0}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hen"}]}
    answer = {"conversation": "none", "input": [item], "max_output_tokens": 3, "metadata": {"is": "last"}}
    while True:
        await c.send("input_text.clear")
        await c.send("session.update", session=fields)
        await c.send("response.create", response=answer, event_id="last")
        while True:
            event = await c.next()
            if event["type"] == "response.done" and event["response"]["metadata"] == {"is": "last"}:
                return
            if event["type"] == "error" and event["error"]["event_id"] == "last":
                assert event["error"]["code"] == "conversation_already_has_active_response", event
                break


async def visit(hostile: Hostile, c: Client) -> str:
    """Does harm, and leaves. The id of the session."""
    while (first := await c.next())["type"] not in ("session.created", "session.resumed"):
        pass
    with contextlib.suppress(ConnectionClosed):
        for _ in range(hostile.random.randrange(40)):
            await c.socket.send(hostile.event())
            if hostile.random.random() < 0.2:
                await asyncio.sleep(0.01)
        match hostile.random.randrange(4):
            case 0:
                c.socket.transport.abort()
            case 1:
                await c.socket.close()
            case _:
                await comes_to_rest(c)
                c.socket.transport.abort()
    session_id: str = first["session"]["id"]
    return session_id


@pytest.mark.parametrize("seed", range(2))
def test_whatever_they_send_and_whenever_they_leave(tmp_path: Path, long_path: Path, seed: int) -> None:
    """Sessions go on, their own and those of others."""
    arguments = ("--resume-timeout", "1", "--max-model-len", "1024", "--state-dir", str(tmp_path / "state"))
    with serve_process(tmp_path / "log", long_path, *arguments) as server:
        session_ids: list[str] = []

        async def clients_of(number: int) -> None:
            hostile = Hostile(100 * seed + number)
            for _ in range(5):
                query = {}
                if session_ids and hostile.random.random() < 0.7:
                    query["session_id"] = hostile.random.choice(session_ids)
                    if hostile.random.random() < 0.5:
                        event_ids = ["event_0", "event_3", "event_" + "1" * 40, "x"]
                        query["last_event_id"] = hostile.random.choice(event_ids)
                ends: list[int] = []
                try:
                    async with client(server, **query) as c:
                        session_ids.append(await visit(hostile, c))
                except ConnectionClosed as closed:
                    ends = [] if closed.rcvd is None else [closed.rcvd.code]
                if c.socket.close_code is not None and c.socket.protocol.close_rcvd is not None:
                    ends.append(c.socket.protocol.close_rcvd.code)
                # Only another connection may end it, or the client itself; and sessions without events are not kept.
                assert set(ends) <= {1000, 1008, 4001}, (c.events[-3:], ends)

        async def test() -> None:
            await asyncio.gather(*map(clients_of, range(3)))
            async with client(server) as c:
                await c.say("the hen")
                assert (await c.answer(max_output_tokens=5))["usage"]["output_tokens"] == 5
            until(
                lambda: (
                    server.metric("vllm:num_requests_running") + server.metric("segue:num_requests_idle") == 0
                )
            )

        run(test())
        assert server.stop() == 0
        for sign in ("Traceback", "internal error", "never retrieved"):
            assert sign not in server.log
