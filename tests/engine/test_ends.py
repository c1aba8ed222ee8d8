"""Engines that are closed, or end, while everything else goes on: nobody waits for ever, and all hear of it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from segue import AsyncLLM, EngineArgs, EngineDead, RequestFailed, SamplingParams, StreamingInput
from segue.answers.processor import OutputProcessor, Processed
from segue.contract.reports import EngineOutput
from segue.host.build import build
from segue.host.client import EngineClient
from segue.host.loop import EngineLoop
from segue.host.process import EngineProcess
from tests.engine.calls import add_chunk, add_request, fork
from tests.host.processes import drain, kill, process_of, snapshot_of, stopped, tokens_of

PARAMS = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(seed=5, max_tokens=200, ignore_eos=True)


def args(path: Path, **options: Any) -> EngineArgs:
    return EngineArgs(model=str(path), runtime="reference", max_num_seqs=8, **options)


# --- killed at each kind of call ------------------------------------------------------------------------------

CALLS: dict[str, Callable[[EngineClient], object]] = {
    "add_request": lambda engine: add_request(engine, "new", [5, 6, 7], PARAMS),
    "add_chunk": lambda engine: add_chunk(engine, "open", [8], PARAMS),
    "truncate": lambda engine: engine.truncate("open", 2),
    "fork": lambda engine: fork(engine, "open", "new", 2),
    "end_input": lambda engine: engine.end_input("open"),
    "abort_request": lambda engine: engine.abort_request("open"),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "ask_snapshot": lambda engine: engine.ask_snapshot("open"),
    "step": lambda engine: engine.step(),
}


def begin(engine: EngineClient) -> None:
    add_request(engine, "open", [5, 6, 7], None, resumable=True, keep="all")
    drain(engine)
    add_request(engine, "busy", [9], LONG)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_around_a_call(tiny_path: Path, call: str, moment: str) -> None:
    """Whether the engine has heard of it or not, it comes out as if nothing had happened."""
    seen: list[dict[str, list[Any]]] = []
    with contextlib.closing(EngineProcess(args(tiny_path), max_restarts=5)) as engine:
        for kills in (False, True):
            begin(engine)
            with stopped(engine) if kills else contextlib.nullcontext():
                if kills and moment == "before":
                    kill(engine)
                result = CALLS[call](engine)
                if kills and moment == "after":
                    kill(engine)
            outputs = list(result) if isinstance(result, list) else []
            outputs += drain(engine)
            if isinstance(result, Future):
                (request,) = result.result(0).requests
                outputs.append(EngineOutput(request_id="asked", token_ids=[request.num_tokens]))
            names = ("open", "busy", "new", "asked")
            seen.append({name: tokens_of(outputs, name) for name in names})
            left = snapshot_of(engine).requests
            seen[-1]["left"] = [(each.request_id, each.num_tokens) for each in left]
            for each in left:
                engine.abort_request(each.request_id)
            drain(engine)
        assert engine.stats.num_restarts == 1
    assert seen[0] == seen[1]
    assert len(seen[0]["busy"]) == 200


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_call_of_an_engine_that_is_gone(tiny_path: Path, call: str, end: str) -> None:
    with contextlib.closing(EngineProcess(args(tiny_path))) as engine:
        begin(engine)
        if end == "closed":
            engine.close()
        else:
            kill(engine)
            process_of(engine).wait()
        with pytest.raises(EngineDead, match=r"SIGKILL|closed"):
            CALLS[call](engine)
        with pytest.raises(EngineDead, match=r"SIGKILL|closed"):
            engine.step()
        assert engine.state == "dead"
        assert engine.stats.num_kv_blocks == 64
        engine.wake()
        engine.close()


# --- closed from another thread -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in process", "own process", "restarting"])
def test_closed_from_another_thread_under_load(tiny_path: Path, kind: str) -> None:
    """Streams, sessions, questions and new requests, on two event loops."""
    llm = AsyncLLM(
        args(
            tiny_path,
            engine_process=kind != "in process",
            max_engine_restarts=5 if kind == "restarting" else 0,
        )
    )
    begun = threading.Semaphore(0)

    async def again_and_again(act: Callable[[], Coroutine[Any, Any, object]]) -> None:
        while True:
            await act()
            await asyncio.sleep(0)
            begun.release()

    async def stream() -> None:
        async for _ in llm.generate("the hen", LONG):
            begun.release()

    async def chunks() -> AsyncIterator[StreamingInput]:
        while True:
            yield StreamingInput([5])
            await asyncio.sleep(0)

    async def streaming_input() -> None:
        async for _ in llm.deltas(chunks(), SamplingParams(max_tokens=2, ignore_eos=True)):
            begun.release()

    async def stop_string() -> None:
        async for _ in llm.generate(
            "the hen", SamplingParams(max_tokens=200, ignore_eos=True, stop=["e", "a"])
        ):
            begun.release()

    async def idle() -> None:
        async def silent() -> AsyncIterator[StreamingInput]:
            begun.release()
            await asyncio.Event().wait()
            yield StreamingInput("never")

        async for _ in llm.generate(silent(), LONG):
            pass

    async def session() -> None:
        live = llm.session()
        try:
            live.append("an inn in the rain")
            await live.progress()
            async for _ in live.respond(PARAMS):
                pass
            live.fork().close()
        finally:
            live.close()

    acts = (
        stream,
        streaming_input,
        stop_string,
        idle,
        session,
        llm.stats,
        llm.snapshot,
        llm.reset_prefix_cache,
    )

    async def everything() -> None:
        ends = await asyncio.gather(*map(again_and_again, acts), return_exceptions=True)
        errors.extend(ends)

    errors: list[object] = []
    threads = [threading.Thread(target=asyncio.run, args=(everything(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        begun.acquire()
    if kind == "restarting":
        kill(llm.engine_loop.client)
    closers = [threading.Thread(target=llm.shutdown) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in (*closers, *threads):
        thread.join()
    assert [type(error) for error in errors] == [EngineDead] * 2 * len(acts)
    assert llm.engine_loop.state == "dead"
    assert not llm._answers


def test_a_process_is_closed_in_the_middle_of_a_step(tiny_path: Path) -> None:
    llm = AsyncLLM(args(tiny_path, engine_process=True))

    async def test() -> None:
        stream = llm.generate("the hen", LONG)
        await anext(stream)
        with stopped(llm.engine_loop.client):
            snapshot = asyncio.ensure_future(llm.snapshot())
            reset = asyncio.ensure_future(llm.reset_prefix_cache())
            late = llm.generate("of", LONG)
            assert (await llm.stats()).num_kv_blocks == 64  # while nothing moves there
            await llm.check_health()
            await asyncio.to_thread(llm.shutdown)

        async def read_on() -> None:
            async for _ in stream:
                pass

        for rest in (snapshot, read_on(), anext(late)):
            with pytest.raises(EngineDead, match=r"shut down|closed"):
                await rest
        with contextlib.suppress(EngineDead):  # what was told in time is told
            await reset

    asyncio.run(test())


def test_a_question_that_nobody_waits_for(tiny_path: Path) -> None:
    """Given up before and after the engine has heard of it."""

    async def test() -> None:
        async with AsyncLLM(args(tiny_path, engine_process=True)) as llm:
            with stopped(llm.engine_loop.client):
                questions = [asyncio.ensure_future(llm.snapshot()) for _ in range(5)]
                await asyncio.sleep(0)
                for question in questions[:4]:
                    question.cancel()
            assert (await questions[4]).requests == []
            assert (await llm.snapshot()).requests == []

    asyncio.run(test())


def test_an_answer_that_cannot_be_read_ends_alone(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = OutputProcessor.process

    def broken(self: OutputProcessor, outputs: Iterable[EngineOutput]) -> Processed:
        if "bad" in self._requests:
            raise ZeroDivisionError
        return process(self, outputs)

    async def test() -> None:
        async with AsyncLLM(args(tiny_path)) as llm:
            monkeypatch.setattr(OutputProcessor, "process", broken)
            good = llm.generate("of", PARAMS)
            with pytest.raises(RequestFailed, match=r"bad failed: an internal error \(ZeroDivisionError\)"):
                await anext(llm.generate("the hen", LONG, "bad"))
            assert [output.finished async for output in good][-1]
            assert (await llm.snapshot()).requests == []

    asyncio.run(test())


# --- handlers -------------------------------------------------------------------------------------------------


def test_what_a_handler_raises_ends_its_request_alone(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = EngineLoop(build(args(tiny_path)).engine)

    async def test() -> None:
        ended = asyncio.Event()
        tokens: list[int] = []

        def broken(output: EngineOutput | EngineDead) -> None:
            raise ZeroDivisionError("mine")

        def good(output: EngineOutput | EngineDead) -> None:
            if isinstance(output, EngineOutput):
                tokens.extend(output.token_ids)
            if isinstance(output, EngineDead) or output.finished:
                ended.set()

        bad = loop.open(loop.intake.submission([5, 6], LONG), broken, on_engine_thread=True)
        loop.open(loop.intake.submission([5, 6], PARAMS), good)
        await ended.wait()
        assert len(tokens) == 12
        assert not bad.is_open
        assert (await asyncio.wrap_future(loop.ask_snapshot())).requests == []

    asyncio.run(test())
    loop.close()
    assert [record.message for record in caplog.records] == ["request 0 failed"]
