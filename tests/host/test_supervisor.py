"""The engine's process is killed, again and again, and nobody who reads an answer can tell."""

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue import AsyncLLM, EngineArgs, EngineDead, RequestFailed, SamplingParams
from segue.answers.outputs import CompletionOutput, RequestOutput, TokensPrompt
from segue.contract.reports import EngineOutput, FinishReason
from segue.host import connection, supervisor
from segue.host.build import build
from segue.host.process import EngineProcess
from segue.host.supervisor import RestartingConnection
from tests.engine.calls import add_chunk, add_request, fork
from tests.host.deadly_child import DEADLY
from tests.host.processes import drain, kill, pid_of, snapshot_of, stopped, tokens_of


def args(path: Path, **options: Any) -> EngineArgs:
    return EngineArgs(model=str(path), runtime="reference", max_num_seqs=8, **options)


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[EngineProcess]:
    with contextlib.closing(EngineProcess(args(tiny_path), max_restarts=5)) as engine:
        yield engine


def strikes(engine: EngineProcess) -> dict[str, int]:
    assert isinstance(engine._connection, RestartingConnection)
    return engine._connection._strikes


# --- whole streams --------------------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "seed": 7, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.7, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "n": 3, "min_tokens": 30, "logit_bias": {7: 2.0}},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 1.0, "stop": ["e"], "min_tokens": 20},
]
KILLS = 20


async def ask(llm: AsyncLLM, number: int) -> RequestOutput:
    params = SamplingParams(max_tokens=100, ignore_eos=True, **VARIANTS[number % len(VARIANTS)])
    prompt = TokensPrompt(prompt_token_ids=[5 + number % 90, 6, 7, 8 + number % 7] * (1 + number % 12))
    return [output async for output in llm.generate(prompt, params)][-1]


async def talk(llm: AsyncLLM, number: int) -> list[CompletionOutput]:
    """A session in which input comes in parts and is revised, and that is forked between two answers."""
    answers = []
    params = SamplingParams(max_tokens=30, temperature=0.9, logprobs=1, seed=number)
    session = llm.session([{"role": "system", "content": "the hen"}] if number % 2 else None)
    for turn in range(3):
        for word in ("an ", "inn ", "in the ", "rain "):
            session.append(word)
            await asyncio.sleep(0)
        session.revise(f"an inn in the sun {turn}")
        answer = session.respond(params)
        await answer.text()
        answers.append(answer.delivered(None))
        fork = session.fork()
        session.close()
        session = fork
    session.close()
    return answers


def shown(output: RequestOutput) -> tuple[object, ...]:
    """All that a reader sees, but not how it was computed."""
    return output.prompt_token_ids, output.outputs, output.prompt_logprobs, output.finished


async def all_of_it(llm: AsyncLLM, num_streams: int, num_sessions: int) -> tuple[list[Any], list[Any]]:
    sessions = [asyncio.create_task(talk(llm, number)) for number in range(num_sessions)]
    streams = [asyncio.create_task(ask(llm, number)) for number in range(num_streams)]
    outputs = [shown(await stream) for stream in streams]
    return outputs, [await session for session in sessions]


@pytest.mark.parametrize("mode", [{}, {"async_scheduling": True, "num_kv_blocks": 40}], ids=["sync", "async"])
def test_killed_at_random_moments_under_load(tiny_path: Path, mode: dict[str, Any]) -> None:
    rng = random.Random(1)
    num_kills = 0

    async def kill_again_and_again(llm: AsyncLLM) -> None:
        nonlocal num_kills
        client = llm.engine_loop.client
        assert isinstance(client, EngineProcess)
        while num_kills < KILLS:
            await asyncio.sleep(rng.uniform(0.0, 0.15))
            # Who is killed twice before having said anything may be refused.
            while llm.engine_loop.state != "running" or strikes(client):
                await asyncio.sleep(0.005)
            kill(client)
            num_kills += 1

    async def run(*, killing: bool) -> tuple[list[Any], list[Any]]:
        async with AsyncLLM(args(tiny_path, engine_process=True, **mode)) as llm:
            killer = asyncio.create_task(kill_again_and_again(llm)) if killing else None
            outputs = await all_of_it(llm, 28, 4)
            if killer is not None:
                killer.cancel()
            return outputs

    quiet = asyncio.run(run(killing=False))
    while num_kills < KILLS:  # on a fast machine it takes several runs
        assert asyncio.run(run(killing=True)) == quiet


# --- one by one -----------------------------------------------------------------------------------------------

PARAMS = SamplingParams(seed=5, max_tokens=40, ignore_eos=True)


def step_until_said(engine: EngineProcess, request_id: str, num_tokens: int) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while len(tokens_of(outputs, request_id)) < num_tokens:
        outputs += engine.step()
    return outputs


def test_what_was_told_and_not_carried_out_is_told_again(engine: EngineProcess) -> None:
    def calls() -> list[str]:
        a, b, c, gone = (engine.intake.new_id(name) for name in ("a", "b", "c", "c"))
        add_request(engine, a, [5, 6, 7], None, resumable=True, keep="all", cache_salt="s")
        add_chunk(engine, a, [8], PARAMS)
        add_chunk(engine, a, [9, 10], PARAMS)
        fork(engine, a, b, 3)
        engine.truncate(a, 2)
        add_chunk(engine, a, [12], PARAMS)
        add_request(engine, gone, [5], PARAMS)
        engine.abort_request(gone)
        add_request(engine, c, [6], PARAMS)
        engine.end_input(a)
        add_chunk(engine, b, [20], PARAMS)
        engine.end_input(b)
        return [a, b, c]

    quiet_ids = calls()
    quiet = drain(engine)
    with stopped(engine):  # so that nothing of it is carried out
        rough_ids = calls()
        kill(engine)
    rough = drain(engine)
    for before, after in zip(quiet_ids, rough_ids, strict=True):
        # Of the turn that was cut off there may be more or less.
        assert tokens_of(rough, after)[-40:] == tokens_of(quiet, before)[-40:] != []
        assert [each.finish_reason for each in rough if each.request_id == after and each.finished]
    stats = engine.stats
    assert stats.num_running + stats.num_waiting + stats.num_idle == 0
    assert stats.num_free_blocks == stats.num_kv_blocks


def test_chunks_that_wait_behind_a_running_turn_are_kept(engine: EngineProcess) -> None:
    def calls() -> None:
        add_request(engine, "a", [5, 6, 7], PARAMS, resumable=True)
        for token in (8, 9):
            add_chunk(engine, "a", [token], PARAMS)
        engine.end_input("a")

    calls()
    quiet = tokens_of(drain(engine), "a")
    calls()
    outputs: list[EngineOutput] = []
    for num_tokens in (10, 50, 90):
        while len(tokens_of(outputs, "a")) < num_tokens:
            outputs += engine.step()
        kill(engine)
    outputs += drain(engine)
    assert tokens_of(outputs, "a") == quiet
    assert len(quiet) == 120
    assert [each.finish_reason for each in outputs if each.finish_reason] == [FinishReason.LENGTH] * 3


def test_prompt_logprobs_come_once(engine: EngineProcess) -> None:
    add_request(engine, "a", [5, 6, 7], msgspec.structs.replace(PARAMS, prompt_logprobs=1))
    outputs = step_until_said(engine, "a", 5)
    kill(engine)
    outputs += drain(engine)
    assert sum(each.prompt_logprobs is not None for each in outputs) == 1
    assert len(tokens_of(outputs, "a")) == 40


def test_questions_are_answered_by_the_next_one(engine: EngineProcess) -> None:
    add_request(engine, "a", [5, 6, 7], PARAMS)
    outputs = step_until_said(engine, "a", 5)
    with stopped(engine):  # so that it is not answered
        question, cancelled = engine.ask_snapshot(), engine.ask_snapshot()
        assert cancelled.cancel()
        kill(engine)
        while engine.state == "running":
            outputs += engine.step()
    while not question.done():
        outputs += engine.step()
    (request,) = question.result().requests
    assert (request.request_id, question.result().cached_blocks) == ("a", [])
    outputs += drain(engine)
    assert len(tokens_of(outputs, "a")) == 40
    assert engine.stats.num_restarts == 1


def test_an_idle_engine_is_started_again_and_says_so(tiny_path: Path) -> None:
    async def test() -> None:
        async with AsyncLLM(args(tiny_path, engine_process=True)) as llm:
            client = llm.engine_loop.client
            assert isinstance(client, EngineProcess)
            pid = pid_of(client)
            kill(client)
            seen = set()
            while pid_of(client) == pid or llm.engine_loop.state != "running":
                seen.add(llm.engine_loop.state)
                await asyncio.sleep(0.005)
            assert seen == {"running", "restarting"}
            assert (await ask(llm, 0)).finished

    asyncio.run(test())


def test_a_process_that_stands_still_is_replaced(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_request(engine, "a", [5, 6, 7], PARAMS)
    outputs = step_until_said(engine, "a", 5)
    with stopped(engine), monkeypatch.context() as patch:
        patch.setattr(connection, "FROZEN_S", 0.5)
        while engine.state == "running":
            outputs += engine.step()
    outputs += drain(engine)
    assert len(tokens_of(outputs, "a")) == 40


# --- the end of it --------------------------------------------------------------------------------------------


@pytest.fixture
def deadly_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process ends when it computes DEADLY."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(connection, "CHILD_MODULE", "tests.host.deadly_child")


@pytest.fixture
def deadly(tiny_path: Path, deadly_children: None) -> Iterator[EngineProcess]:
    with contextlib.closing(
        EngineProcess(args(tiny_path, max_num_batched_tokens=64), max_restarts=5)
    ) as engine:
        yield engine


def test_a_request_that_ends_the_process_is_refused(deadly: EngineProcess) -> None:
    add_request(deadly, "bad", [5, DEADLY], PARAMS)
    (refusal,) = drain(deadly)
    assert (refusal.request_id, refusal.finish_reason, refusal.finished) == ("bad", FinishReason.ERROR, True)
    assert refusal.error == "the engine's process ended 2 times while it computed this request"
    add_request(deadly, "good", [5, 6], PARAMS)
    assert len(tokens_of(drain(deadly), "good")) == 40


def test_those_that_were_computed_with_it_go_on(deadly: EngineProcess, tiny_path: Path) -> None:
    names = [f"good {number}" for number in range(4)]
    for number, name in enumerate(names):
        add_request(deadly, name, [20 + number, 6], PARAMS, resumable=number == 0)
    outputs = step_until_said(deadly, "good 3", 3)
    for name in ("bad", "worse"):
        add_request(deadly, name, [5, DEADLY], PARAMS)
    add_request(deadly, "listens", [30] * 100, None, resumable=True)
    outputs += drain(deadly)
    for name in ("good 0", "listens"):
        deadly.end_input(name)
    outputs += drain(deadly)
    for name in ("bad", "worse"):
        (refusal,) = [each for each in outputs if each.request_id == name]
        assert refusal.finish_reason is FinishReason.ERROR
    plain = build(args(tiny_path)).engine
    for number, name in enumerate(names):
        add_request(plain, name, [20 + number, 6], PARAMS)
    expected = []
    while plain.has_unfinished_requests():
        expected += plain.step()
    plain.close()
    for name in names:
        assert tokens_of(outputs, name) == tokens_of(expected, name)
    assert [each.finish_reason for each in outputs if each.request_id == "listens"] == [FinishReason.STOP]


def test_a_stream_hears_of_a_refusal(deadly_children: None, tiny_path: Path) -> None:
    async def test() -> None:
        async with AsyncLLM(args(tiny_path, engine_process=True)) as llm:
            good = asyncio.create_task(ask(llm, 1))
            with pytest.raises(RequestFailed, match=r"ended . times while it computed this request"):
                async for _ in llm.generate(TokensPrompt(prompt_token_ids=[DEADLY])):
                    pass
            assert (await good).finished

    asyncio.run(test())


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The next engine's process cannot be started, until this is undone."""
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
        patch.setattr(connection, "CHILD_MODULE", "tests.engine.no_such_child")
        yield patch


def test_it_gives_up(tiny_path: Path, no_child: pytest.MonkeyPatch) -> None:
    no_child.undo()
    with contextlib.closing(EngineProcess(args(tiny_path), max_restarts=2)) as engine:
        no_child.setattr(connection, "CHILD_MODULE", "tests.engine.no_such_child")
        with stopped(engine):  # so that neither is answered
            add_request(engine, "a", [5, 6, 7], PARAMS)
            question = engine.ask_snapshot()
            kill(engine)
        with pytest.raises(EngineDead, match=r"started again 2 times in a row"):
            drain(engine)
        assert engine.state == "dead"
        assert engine.stats.num_restarts == 2
        with pytest.raises(EngineDead, match=r"started again 2 times in a row"):
            question.result(0)
        for call in (engine.check_alive, engine.ask_snapshot, lambda: add_request(engine, "b", [5], PARAMS)):
            with pytest.raises(EngineDead, match=r"started again 2 times in a row"):
                call()


def test_each_end_and_start_is_logged(
    tiny_path: Path, engine: EngineProcess, caplog: pytest.LogCaptureFixture
) -> None:
    add_request(engine, "a", [5, 6, 7], PARAMS)
    outputs = step_until_said(engine, "a", 5)
    kill(engine)
    drain(engine)
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        (
            "segue.engine",
            "WARNING",
            "the engine's process was ended by SIGKILL; if nobody sent it, memory ran out; it is started again",
        ),
        ("segue.engine", "WARNING", "the engine runs again; 1 open requests go on"),
    ]
    assert outputs


def until(engine: EngineProcess, state: str) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.state != state:
        outputs += engine.step()
    return outputs


def test_a_file_that_is_damaged_and_whole_again(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine that is never given up: those who wait are told why, and the next are answered."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_path.read_bytes())
    with contextlib.closing(EngineProcess(args(path), max_restarts=None)) as engine:
        add_request(engine, "idle", [5, 6, 7], None, resumable=True)
        drain(engine)
        add_request(engine, "a", [5, 6, 7], PARAMS)
        step_until_said(engine, "a", 5)
        damaged = tmp_path / "damaged"
        damaged.write_bytes(b"no model")
        damaged.rename(path)  # the engine has the other one mapped
        kill(engine)
        outputs = until(engine, "dead")
        with pytest.raises(
            EngineDead, match=r"could not be loaded again: .*not a GGUF file.*5 times in a row"
        ):
            engine.check_alive()
        add_request(engine, "b", [5], PARAMS)
        fork(engine, "idle", "c")
        refused: list[EngineOutput] = []
        while len(refused) < 4:
            refused += [each for each in engine.step() if each.finish_reason is FinishReason.ERROR]
        assert {each.request_id for each in refused} == {"idle", "a", "b", "c"}
        assert all("could not be loaded again" in (each.error or "") for each in refused)
        assert not any(each.finished for each in outputs)
        whole = tmp_path / "whole"
        whole.write_bytes(tiny_path.read_bytes())
        whole.rename(path)
        until(engine, "running")
        engine.check_alive()
        add_request(engine, "a", [5, 6, 7], PARAMS)
        assert len(tokens_of(drain(engine), "a")) == 40
        assert snapshot_of(engine).requests == []
        assert engine.stats.num_restarts >= 6
    text = "\n".join(record.message for record in caplog.records)
    assert "the model could not be loaded again" in text
    assert "the engine runs again; 0 open requests go on" in text


@pytest.mark.parametrize("phase", ["starting", "pause"])
def test_close_while_it_is_started_again(
    tiny_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineProcess(args(tiny_path), max_restarts=5)
    add_request(engine, "a", [5, 6, 7], PARAMS)
    if phase == "pause":
        monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 600.0)
        monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 600.0)
        monkeypatch.setattr(connection, "CHILD_MODULE", "tests.host.no_such_child")
    with stopped(engine):
        question = engine.ask_snapshot()  # which it cannot answer any more
        kill(engine)
    until(engine, "restarting")
    if phase == "pause":
        assert isinstance(engine._connection, RestartingConnection)
        while engine._connection._num_in_row < 2:
            engine.step()
        engine.wake()
        assert engine.step() == []
    else:
        pid = pid_of(engine)
        while pid == pid_of(engine):
            engine.step()
    pid = pid_of(engine)
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for call in (engine.step, engine.check_alive, lambda: question.result(0)):
        with pytest.raises(EngineDead, match="closed"):
            call()
