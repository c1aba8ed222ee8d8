"""How realtime sessions begin and end: lost and closed connections, bounds, the end of the server, disks."""

import asyncio
import json
import logging
import resource
import signal
import sqlite3
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from segue import AsyncLLM
from segue.server.ops import saved_sessions as state_store
from segue.server.ops.saved_sessions import StateStore, StateStoreError
from segue.server.realtime import event_log
from segue.server.realtime import saver as saving
from segue.server.realtime.conversation import ConversationState
from segue.server.realtime.registry import SessionRegistry
from segue.server.realtime.saver import SavedSession, SessionSaver
from segue.server.realtime.server_events import OutputTextDelta
from segue.server.realtime.session import RealtimeSession
from segue.server.shared.options import ServerOptions
from segue.server.shared.serving import Serving
from tests.server.realtime_client import client, run, text_of, url
from tests.server.running import RunningServer, serve_process, until

IDLE = "segue:num_requests_idle"


def test_a_lost_session_is_freed_in_time(tmp_path: Path, tiny_path: Path) -> None:
    with serve_process(tmp_path / "log", tiny_path, "--resume-timeout", "0.5") as server:

        async def test() -> None:
            async with client(server) as c:
                created = await c.until("session.created")
                await c.say("the hen")
                assert server.metric(IDLE) == 1
                c.socket.transport.abort()
            until(lambda: server.metric(IDLE) == 0)
            async with client(server, session_id=created["session"]["id"]) as c:
                assert (await c.until("error"))["error"]["code"] == "session_not_found"

        run(test())


@pytest.mark.parametrize("code", [1000, None])
def test_a_session_that_its_client_closed_is_freed_at_once(
    tmp_path: Path, tiny_path: Path, code: int | None
) -> None:
    with serve_process(tmp_path / "log", tiny_path, "--resume-timeout", "3600") as server:

        async def test() -> None:
            async with client(server) as lost:
                await lost.say("an inn")
                lost.socket.transport.abort()
            async with client(server) as c:
                created = await c.until("session.created")
                await c.say("the hen")
                await c.send("response.create", response={"max_output_tokens": 200})
                await c.until("response.created")
                if code is None:  # what a page's `socket.close()` sends
                    c.socket.transport.write(b"\x88\x80\0\0\0\0")
            until(lambda: server.metric("vllm:num_requests_running") == 0 and server.metric(IDLE) == 1)
            async with client(server, session_id=created["session"]["id"]) as c:
                assert (await c.until("error"))["error"]["code"] == "session_not_found"

        run(test())


def test_there_are_so_many_sessions_at_most(tmp_path: Path, tiny_path: Path) -> None:
    with serve_process(tmp_path / "log", tiny_path, "--max-sessions", "2") as server:

        async def test() -> None:
            async with client(server) as first, client(server) as second:
                ids = [(await c.until("session.created"))["session"]["id"] for c in (first, second)]
                async with client(server) as third:
                    error = (await third.until("error"))["error"]
                    assert error["code"] == "too_many_sessions"
                    assert "--max-sessions=2" in error["message"]
                    with pytest.raises(ConnectionClosed) as closed:
                        await third.next()
                    assert closed.value.rcvd is not None
                    assert closed.value.rcvd.code == 1013
                # One whose client is gone makes place.
                second.socket.transport.abort()
                await second.socket.wait_closed()
                while True:
                    async with client(server) as third:
                        if (await third.next())["type"] == "session.created":
                            break
                async with client(server, session_id=ids[1]) as again:
                    assert (await again.until("error"))["error"]["code"] == "session_not_found"
                await first.say("the hen")

        run(test())


def test_a_silent_session_times_out(tmp_path: Path, tiny_path: Path) -> None:
    with serve_process(tmp_path / "log", tiny_path, "--session-timeout", "0.5") as server:

        async def test() -> None:
            async with client(server) as c:
                await c.say("the hen")
                with pytest.raises(ConnectionClosed) as closed:
                    await c.until("never")
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 4002
            until(lambda: server.metric(IDLE) == 0)

        run(test())


# --- on disk --------------------------------------------------------------------------------------------------


def saved(directory: Path) -> list[bytes]:
    """The states of the sessions there."""
    with closing(sqlite3.connect(directory / state_store.FILE_NAME)) as database:
        return [row[0] for row in database.execute("SELECT state FROM session")]


def test_sessions_outlive_the_server(tmp_path: Path, tiny_path: Path) -> None:
    seed = {"temperature": 1.0, "seed": 3, "max_output_tokens": 15}
    answers: dict[bool, list[str]] = {}

    async def first(server: RunningServer) -> tuple[str, list[str]]:
        async with client(server) as c:
            created = await c.until("session.created")
            await c.send("session.update", session={"instructions": "rain", "max_output_tokens": 15})
            await c.say("the hen")
            texts = [text_of(await c.answer(**seed))]
            await c.send("input_text.append", text="an in")
            await c.until("input_text.progress")
            # What is typed is written a moment later.
            until(lambda: any(b"an in" in state for state in saved(directory)))
            return created["session"]["id"], texts

    async def second(server: RunningServer, session_id: str) -> list[str]:
        async with client(server, session_id=session_id) as c:
            event = await c.next()
            while event["type"] not in ("session.created", "session.resumed"):
                event = await c.next()
            assert event["session"]["instructions"] == "rain"
            assert event["session"]["max_output_tokens"] == 15
            await c.send("input_text.append", text="n")
            return [text_of(await c.answer(**seed))]

    for restarts in (False, True):
        directory = tmp_path / f"state {restarts}"
        arguments = ("--state-dir", str(directory))
        with serve_process(tmp_path / "log", tiny_path, *arguments) as server:
            session_id, texts = asyncio.run(first(server))
            if not restarts:
                texts += asyncio.run(second(server, session_id))
        if restarts:  # after a SIGKILL
            with serve_process(tmp_path / "log", tiny_path, *arguments) as server:
                texts += asyncio.run(second(server, session_id))
        answers[restarts] = texts
    assert answers[True] == answers[False]


def test_the_file_is_private(tmp_path: Path, tiny_path: Path) -> None:
    directory = tmp_path / "state"
    with serve_process(tmp_path / "log", tiny_path, "--state-dir", str(directory)) as server:

        async def test() -> None:
            async with client(server) as c:
                await c.say("the hen")
            until(lambda: len(saved(directory)) == 1)

        run(test())
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
        assert len(modes) == 3  # with SQLite's own
        assert set(modes.values()) == {0o600}
    (directory / state_store.FILE_NAME).chmod(0o644)  # one of before
    store(directory).close()
    assert stat.S_IMODE((directory / state_store.FILE_NAME).stat().st_mode) == 0o600


def store(directory: Path, clock: Callable[[], float] = lambda: 0.0) -> StateStore:
    return StateStore(directory, "tiny", max_sessions=3, max_age_days=2, clock=clock)


def test_old_sessions_are_deleted(tmp_path: Path) -> None:
    now_s = 0.0
    sessions = store(tmp_path, lambda: now_s)
    for number in range(5):
        now_s = number
        sessions.save([(f"{number}", b"state")])
    assert [sessions.load(f"{number}") is not None for number in range(5)] == [False, False, True, True, True]
    now_s = 3 + 2 * 86400.0
    sessions.save([("2", b"changed")])
    assert [sessions.load(f"{number}") for number in range(5)] == [None, None, b"changed", b"state", b"state"]
    now_s += 2 * 86400
    sessions.close()
    with closing(store(tmp_path, lambda: now_s)) as sessions:
        assert sessions.load("2") == b"changed"
        assert sessions.load("3") is None


class FullDisk:
    """A `Store` that takes nothing until there is room."""

    def __init__(self) -> None:
        self.has_room = False
        self.num_tries = 0
        self.sessions: dict[str, bytes] = {}

    def save(self, sessions: Sequence[tuple[str, bytes]]) -> None:
        self.num_tries += 1
        if not self.has_room:
            raise StateStoreError("sessions cannot be saved: the disk is full")
        self.sessions.update(sessions)

    def load(self, session_id: str) -> bytes | None:
        return self.sessions.get(session_id)


async def until_so(condition: Callable[[], bool]) -> None:
    """Lets others run until it is."""
    while not condition():
        await asyncio.sleep(0.005)


def saved_session(input_text: str = "") -> SavedSession:
    return SavedSession(conversation=ConversationState(now=datetime.now(), input_text=input_text))


def test_what_is_not_written_yet_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "RETRY_S", 0.01)

    async def test() -> None:
        disk = FullDisk()
        saver = SessionSaver(disk)
        saver.changed("a", saved_session(), at_once=True)
        await until_so(lambda: disk.num_tries > 2)
        saver.changed("a", saved_session("later"), at_once=True)
        loaded = await saver.load("a")
        assert loaded is not None
        assert loaded.conversation.input_text == "later"
        assert await saver.load("b") is None
        disk.has_room = True
        await until_so(lambda: "a" in disk.sessions)
        loaded = await saver.load("a")
        assert loaded is not None
        assert loaded.conversation.input_text == "later"
        await saver.close()

    with caplog.at_level(logging.WARNING, "segue.server"):
        run(test())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2  # and not one for each try
    assert "the disk is full" in messages[0]
    assert "saved again" in messages[1]


def test_typing_is_written_now_and_then_and_the_rest_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SAVE_DELAY_S", 3600.0)

    async def test() -> None:
        disk = FullDisk()
        disk.has_room = True
        saver = SessionSaver(disk)
        for number in range(1000):
            saver.changed("a", saved_session(f"{number}"), at_once=False)
            await asyncio.sleep(0)
        assert disk.num_tries == 0
        saver.changed("b", saved_session(), at_once=True)  # which takes the others along
        await until_so(lambda: disk.num_tries == 1)
        saver.changed("a", saved_session("last"), at_once=False)
        await saver.close()
        assert b"last" in disk.sessions["a"]
        assert disk.num_tries == 2

    run(test())


def test_a_full_disk_stops_nobody(tmp_path: Path, tiny_path: Path) -> None:
    directory = tmp_path / "state"
    with serve_process(tmp_path / "log", tiny_path, "--state-dir", str(directory)) as server:

        async def test() -> None:
            async with client(server) as c:
                await c.say("the hen")
                until(lambda: len(saved(directory)) == 1)
                # From here on, no file may be longer than SQLite's longest is; the log is far shorter.
                size = (directory / f"{state_store.FILE_NAME}-wal").stat().st_size
                resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
                response = await c.answer(max_output_tokens=5)
                assert response["usage"]["output_tokens"] == 5
                until(lambda: "cannot be saved" in server.log)
                await c.say("an inn")
                assert (await c.answer(max_output_tokens=5))["status"] == "incomplete"
                resource.prlimit(
                    server.process.pid,
                    resource.RLIMIT_FSIZE,
                    (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
                )
                until(lambda: any(b"an inn" in state for state in saved(directory)))
            until(lambda: server.metric(IDLE) == 0)

        run(test())
        assert server.stop() == 0
        assert "Traceback" not in server.log


# --- the end of the server ------------------------------------------------------------------------------------


def test_answers_outlive_the_signal_to_end(tmp_path: Path, long_path: Path) -> None:
    with serve_process(
        tmp_path / "log", long_path, "--max-model-len", "4096", "--shutdown-timeout", "60"
    ) as server:

        async def test() -> None:
            async with client(server) as quiet, client(server) as c:
                await quiet.until("session.created")
                await c.say("the hen")
                await c.send("response.create", response={"max_output_tokens": 1500, "temperature": 0})
                await c.until("response.output_text.delta")
                server.process.send_signal(signal.SIGTERM)
                # Who waits for nothing is told to go, and nobody comes in.
                with pytest.raises(ConnectionClosed) as closed:
                    await quiet.until("never")
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1012
                with pytest.raises(InvalidStatus) as refused:
                    await connect(url(server))
                assert refused.value.response.status_code == 503
                with server.client() as http:
                    response = http.get("/v1/models")
                    assert response.status_code == 503
                    assert response.json()["error"]["code"] == "server_shutting_down"
                    assert int(response.headers["retry-after"]) > 0
                done = (await c.until("response.done"))["response"]
                assert done["usage"]["output_tokens"] == 1500
                with pytest.raises(ConnectionClosed) as closed:
                    await c.until("never")
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1012

        run(test())
        assert server.process.wait() == 0
    assert "Traceback" not in server.log
    assert "cut off" not in server.log


@pytest.mark.parametrize("where", [[], ["--in-process"]])
def test_an_answer_that_takes_too_long_is_cut_off(tmp_path: Path, long_path: Path, where: list[str]) -> None:
    directory = tmp_path / "state"
    arguments = ["--runtime", "reference", "--shutdown-timeout", "0.2", "--state-dir", str(directory), *where]
    with serve_process(tmp_path / "log", long_path, *arguments) as server:

        async def test() -> None:
            async with client(server) as c:
                await c.say("the hen")
                await c.send("response.create", response={"temperature": 0})
                await c.until("response.output_text.delta")
                server.process.send_signal(signal.SIGTERM)
                done = (await c.until("response.done"))["response"]
                assert done["status"] == "failed"
                assert done["status_details"]["error"]["code"] == "engine_unavailable"
                assert text_of(done).startswith(c.events[-1].get("delta", ""))
                with pytest.raises(ConnectionClosed) as closed:
                    await c.until("never")
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1012

        run(test())
        assert server.process.wait() == 0
    assert "Traceback" not in server.log
    # What was said of it is kept.
    (state,) = saved(directory)
    assert b"assistant" in state


# --- what goes wrong ------------------------------------------------------------------------------------------


def test_a_connection_that_ends_while_it_takes_over_holds_nothing(long_path: Path) -> None:
    async def test() -> None:
        async with AsyncLLM(long_path, max_model_len=256) as llm:
            serving = Serving(llm, "tiny", ServerOptions())
            registry = SessionRegistry(ServerOptions(resume_timeout_s=0.01))
            entered = asyncio.Event()

            async def hold(session_id: str | None) -> None:
                async with registry.attached(serving, session_id, None) as attachment:
                    ids.append(attachment.session.id)
                    entered.set()
                    await asyncio.Event().wait()

            ids: list[str] = []
            first = asyncio.create_task(hold(None))
            await entered.wait()
            others = [asyncio.create_task(hold(ids[0])) for _ in range(3)]
            await asyncio.sleep(0)
            # The first has not let go yet; of those that wait, one after the other is gone.
            for task in [others[1], others[2], first, others[0]]:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            while registry.num_sessions:
                await asyncio.sleep(0.005)

    run(test())


class Told:
    """What a session's client would read."""

    def __init__(self, session: RealtimeSession) -> None:
        self.session = session

    async def until(self, kind: str) -> dict[str, Any]:
        while True:
            event: dict[str, Any] = json.loads(await self.session.log.next())
            self.session.log.sent()
            if event["type"] == kind:
                return event


def with_session(
    path: Path, test: Callable[[AsyncLLM, Serving, RealtimeSession, Told], Awaitable[None]]
) -> None:
    async def run_it() -> None:
        async with AsyncLLM(path, max_model_len=2048) as llm:
            serving = Serving(llm, "tiny", ServerOptions())
            session = RealtimeSession(serving, "sess", saved_session(), lambda _, /, is_border: None)
            await test(llm, serving, session, Told(session))
            session.close()

    run(run_it())


def test_an_answer_of_an_engine_that_is_gone_ends(long_path: Path) -> None:
    async def test(llm: AsyncLLM, serving: Serving, session: RealtimeSession, told: Told) -> None:
        await session.receive('{"type": "input_text.append", "text": "the hen"}')
        await session.receive('{"type": "response.create", "response": {"max_output_tokens": 2000}}')
        await told.until("response.output_text.delta")
        await session.receive('{"type": "input_text.append", "text": "waits for the end"}')
        await asyncio.to_thread(llm.shutdown)
        done = (await told.until("response.done"))["response"]
        assert done["status"] == "failed"
        assert done["status_details"]["error"]["code"] == "engine_unavailable"
        lines = serving.metrics.exposition(None, llm.config).decode().splitlines()
        ended = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines if "requests_" in line}
        assert ended["segue:requests_failed_total"] == "1.0"
        assert ended["segue:requests_cancelled_total"] == "0.0"
        for event in ('{"type": "input_text.append", "text": "a"}', '{"type": "response.create"}'):
            await session.receive(event)
            assert (await told.until("error"))["error"]["code"] == "engine_unavailable"
        await session.receive('{"type": "input_text.clear"}')
        await told.until("input_text.cleared")

    with_session(long_path, test)


def test_input_that_cannot_be_computed_is_told(long_path: Path) -> None:
    """Nobody waits in vain for its progress."""

    async def test(llm: AsyncLLM, serving: Serving, session: RealtimeSession, told: Told) -> None:
        await session.receive('{"type": "input_text.append", "text": "the hen"}')
        llm.shutdown()
        assert (await told.until("error"))["error"]["code"] == "engine_unavailable"

    with_session(long_path, test)


def test_an_event_is_carried_out_whole(long_path: Path) -> None:
    """Whenever its connection ends: here, while it waits for a client that does not read."""

    async def test(llm: AsyncLLM, serving: Serving, session: RealtimeSession, told: Told) -> None:
        while session.log._num_unsent_bytes < event_log.MAX_UNSENT_BYTES:
            session.log.put(OutputTextDelta(response_id="", item_id="", delta="x" * 10_000))
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hen"}]}
        reading = asyncio.create_task(
            session.receive(json.dumps({"type": "conversation.item.create", "item": item}))
        )
        await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert session.saved.conversation.items == ()
        session.log.sent()
        await session.receive(json.dumps({"type": "conversation.item.create", "item": item}))
        assert len(session.saved.conversation.items) == 1
        await told.until("conversation.item.done")

    with_session(long_path, test)
