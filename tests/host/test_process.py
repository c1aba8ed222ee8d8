"""The engine in its own process: the same answers and errors, and an end with whichever process ends first."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue import (
    LLM,
    CapacityError,
    EngineArgs,
    EngineDead,
    ModelFileError,
    ParameterError,
    SamplingParams,
    SpeculativeConfig,
)
from segue.contract.reports import EngineOutput, EngineStats, FinishReason, RequestMetrics
from segue.contract.step import TokenLogprobs
from segue.engine.submission import KvScope, Submission
from segue.host import connection, wire
from segue.host import process as process_module
from segue.host.build import build
from segue.host.client import EngineClient
from segue.host.process import EngineProcess
from tests.engine.calls import add_chunk, add_request, fork
from tests.host.processes import (
    child_of,
    drain,
    kill,
    pid_of,
    process_of,
    snapshot_of,
    stopped,
    tokens_of,
)

PARAMS = SamplingParams(seed=5, max_tokens=12, ignore_eos=True, logprobs=2)
LONG = msgspec.structs.replace(PARAMS, max_tokens=200, logprobs=None)
NOTHING = EngineStats(**dict.fromkeys((f for f in EngineStats.__struct_fields__), 0))
PROMPTS = ["the hen", "an inn in the", "of", "she said on and on and on and on"]
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "ngram": {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
}


def args(path: Path, **options: Any) -> EngineArgs:
    return EngineArgs(model=str(path), runtime="reference", max_num_seqs=8, **options)


@pytest.fixture(scope="module")
def engine(tiny_path: Path) -> Iterator[EngineProcess]:
    """For tests that leave it alive."""
    with contextlib.closing(EngineProcess(args(tiny_path))) as engine:
        yield engine


@pytest.fixture
def mortal(tiny_path: Path) -> Iterator[EngineProcess]:
    """For tests that do not."""
    with contextlib.closing(EngineProcess(args(tiny_path))) as engine:
        yield engine


def step_for_ever(engine: EngineClient) -> None:
    while True:
        engine.step()


def wait_until_gone(pid: int) -> None:
    """Of a process that is not ours."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        # An orphan that has ended stays a zombie where no init collects it.
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.02)


# --- the same as in this process ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_an_engine_in_this_process(tiny_path: Path, tiny_llm: LLM, mode: str) -> None:
    params = [
        PARAMS,
        msgspec.structs.replace(PARAMS, n=2, temperature=0.7),
        msgspec.structs.replace(PARAMS, prompt_logprobs=1, logit_bias={5: 3.5}, presence_penalty=0.5),
        msgspec.structs.replace(PARAMS, temperature=0.0, stop_token_ids=(7, 8), min_tokens=3),
    ]
    here = tiny_llm.generate(PROMPTS, params, use_tqdm=False)
    with LLM(tiny_path, runtime="reference", engine_process=True, **MODES[mode]) as llm:
        there = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.outputs for output in there] == [output.outputs for output in here]
    assert [output.prompt_logprobs for output in there] == [output.prompt_logprobs for output in here]


def test_the_native_runtime_in_a_process(tiny_path: Path) -> None:
    outputs = []
    for engine_process in (False, True):
        with LLM(tiny_path, engine_process=engine_process) as llm:
            outputs.append([o.outputs for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)])
    assert outputs[0] == outputs[1]


@given(
    st.builds(
        SamplingParams,
        n=st.integers(1, 4),
        max_tokens=st.none() | st.integers(5, 2**31 - 1),
        min_tokens=st.integers(0, 5),
        temperature=st.floats(0, 10),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(-1, 100),
        repetition_penalty=st.floats(0.1, 2),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100)),
        seed=st.none() | st.integers(-(2**63), 2**64 - 1),
        stop=st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1)),
        stop_token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1)),
        logprobs=st.none() | st.integers(0, 1024),
        ignore_eos=st.booleans(),
    ),
    st.lists(st.integers(0, 2**31 - 1)),
    st.none() | st.text(),
)
def test_calls_survive_the_wire(params: SamplingParams, token_ids: list[int], salt: str | None) -> None:
    submission = Submission(
        request_id="0",
        token_ids=array("i", token_ids),
        params=params,
        default_seed=2**64 - 1,
        priority=-1,
        scope=KvScope(salt),
        resumable=True,
        keep="all",
        num_output_tokens=2,
    )
    call = wire.CALL_TYPES["add_request"](submission)
    received = wire.decode_to_child(wire.encode(call))
    assert type(received) is type(call)
    assert received == call
    assert msgspec.structs.asdict(received) == {"submission": submission}


@given(st.lists(st.floats(allow_nan=False), max_size=3), st.lists(st.integers(0, 2**31 - 1), max_size=3))
def test_outputs_survive_the_wire_bit_for_bit(logprobs: list[float], token_ids: list[int]) -> None:
    entry = TokenLogprobs(-0.1, 3, tuple(token_ids), tuple(logprobs))
    output = EngineOutput(
        request_id="0",
        token_ids=token_ids,
        logprobs=[entry],
        prompt_logprobs=[None, entry],
        finish_reason=FinishReason.STOP,
        stop_reason=7,
        finished=True,
        metrics=RequestMetrics(num_cached_tokens=5),
        error="é",
    )
    progress = wire.Progress([output], 3, True, NOTHING)
    assert wire.decode_from_child(wire.encode(progress)) == progress


def test_requests_without_a_seed_get_the_same_one(tiny_path: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    texts = []
    for engine_process in (False, True):
        with LLM(tiny_path, runtime="reference", engine_process=engine_process) as llm:
            with pytest.raises(ParameterError):
                llm.generate(["", "the"], params, use_tqdm=False)  # takes no number
            texts.append([o.outputs[0].text for o in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_a_resumable_request_with_truncate_and_fork(engine: EngineProcess, tiny_path: Path) -> None:
    here = build(args(tiny_path)).engine
    seen = []
    for client in (here, engine):
        add_request(client, "a", [5, 6, 7], PARAMS, resumable=True, keep="all")
        outputs = drain(client)
        client.truncate("a", 9)
        fork(client, "a", "b", 4)
        for request_id in ("a", "b"):
            add_chunk(client, request_id, [9, 10], PARAMS)
            client.end_input(request_id)
        outputs += drain(client)
        seen.append({name: tokens_of(outputs, name) for name in ("a", "b")})
        assert [each.request_id for each in outputs if each.finished] == ["a", "b"]
    assert seen[0] == seen[1]
    assert len(seen[0]["a"]) == 24
    here.close()


@pytest.mark.parametrize(
    ("token_ids", "params", "options"),
    [
        ([], PARAMS, {}),
        ([320], PARAMS, {}),
        ([-1], PARAMS, {}),
        ([2**40], PARAMS, {}),
        (["a"], PARAMS, {}),
        ([5] * 256, PARAMS, {}),
        ([5], None, {}),
        ([5], PARAMS, {"keep": "some"}),
        ([5], msgspec.structs.replace(PARAMS, logit_bias={400: 1.0}), {}),
        ([5], msgspec.structs.replace(PARAMS, prompt_logprobs=1), {"resumable": True}),
    ],
)
def test_bad_requests_raise_at_the_call_and_as_the_engine_does(
    engine: EngineProcess, tiny_path: Path, token_ids: Any, params: Any, options: dict[str, Any]
) -> None:
    here = build(args(tiny_path)).engine
    with pytest.raises((ParameterError, CapacityError)) as expected:
        add_request(here, "a", token_ids, params, **options)
    with pytest.raises(type(expected.value)) as caught:
        add_request(engine, "a", token_ids, params, **options)
    assert str(caught.value) == str(expected.value)
    assert not engine.has_unfinished_requests()


def test_ids_are_known_here(engine: EngineProcess) -> None:
    add_request(engine, "a", [5], PARAMS, resumable=True)
    with pytest.raises(ParameterError, match="in use"):
        add_request(engine, "a", [5], PARAMS)
    with pytest.raises(ParameterError, match="in use"):
        fork(engine, "a", "a")
    engine.end_input("a")
    calls: list[Callable[[], object]] = [
        lambda: add_chunk(engine, "a", [5], PARAMS),
        lambda: engine.truncate("a", 0),
        lambda: fork(engine, "a", "b"),
        lambda: engine.end_input("a"),
        lambda: engine.end_input("unknown"),
    ]
    for call in calls:
        with pytest.raises(ParameterError, match="open input"):
            call()
    engine.abort_request("unknown")
    drain(engine)
    add_request(engine, "a", [5], PARAMS)
    assert len(tokens_of(drain(engine), "a")) == 12


def test_a_chunk_that_does_not_fit_is_left_out(engine: EngineProcess) -> None:
    add_request(engine, "a", [5] * 200, None, resumable=True)
    add_request(engine, "b", [5], PARAMS)
    add_chunk(engine, "a", [5] * 100, PARAMS)
    add_chunk(engine, "a", [6], PARAMS)
    outputs = drain(engine)
    (refused,) = [each for each in outputs if each.error is not None]
    assert (refused.request_id, refused.finish_reason) == ("a", FinishReason.ERROR)
    assert not refused.finished
    assert "maximum context length is 256 tokens" in (refused.error or "")
    assert len(tokens_of(outputs, "a")) == len(tokens_of(outputs, "b")) == 12
    assert snapshot_of(engine, "a").requests[0].num_tokens == 212
    engine.abort_request("a")


def test_a_fork_that_cannot_be_fails_the_new_request(engine: EngineProcess) -> None:
    add_request(engine, "a", [5, 6], None, resumable=True)
    fork(engine, "a", "b", 3)
    (failed,) = drain(engine)
    assert (failed.request_id, failed.finish_reason) == ("b", FinishReason.ERROR)
    engine.abort_request("a")
    drain(engine)


def test_an_aborted_request_says_nothing_to_the_next_of_its_name(engine: EngineProcess) -> None:
    first, second = (engine.intake.new_id("a") for _ in range(2))
    add_request(engine, first, [5, 6, 7], LONG)
    while not engine.step():
        pass
    engine.abort_request(first)
    add_request(engine, second, [5, 6, 7], PARAMS)
    outputs = drain(engine)
    assert len(tokens_of(outputs, second)) == 12
    assert {each.request_id for each in outputs} == {second}
    assert all(each.logprobs is not None for each in outputs)
    stats = engine.stats
    assert stats.num_free_blocks == stats.num_kv_blocks


def test_stats_and_the_prefix_cache(engine: EngineProcess) -> None:
    engine.reset_prefix_cache()
    drain(engine)
    assert engine.stats.num_cached_blocks == 0
    add_request(engine, "a", list(range(3, 40)), PARAMS)
    while not engine.step():
        pass
    assert engine.stats.num_running == 1
    drain(engine)
    assert engine.stats.num_cached_blocks > 0
    engine.reset_prefix_cache()
    drain(engine)
    assert engine.stats.num_cached_blocks == 0


def test_outputs_say_how_the_request_was_served_so_far(engine: EngineProcess) -> None:
    add_request(engine, "a", [5, 6, 7], PARAMS)
    computed = [each.metrics.num_computed_tokens for each in drain(engine) if each.metrics is not None]
    assert computed == list(range(3, 3 + 12))


def test_wake_ends_the_wait(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "WAIT_S", 600.0)
    with stopped(engine):
        add_request(engine, "a", [5], PARAMS)
        for _ in range(3):
            engine.wake()
            assert engine.step() == []
        waker = threading.Timer(0.1, engine.wake)
        waker.start()
        assert engine.step() == []
        waker.join()
    assert len(tokens_of(drain(engine), "a")) == 12


def test_signals_of_the_terminal_are_for_the_parent(engine: EngineProcess) -> None:
    os.kill(pid_of(engine), signal.SIGINT)
    os.kill(pid_of(engine), signal.SIGTERM)
    add_request(engine, "a", [5], PARAMS)
    assert len(tokens_of(drain(engine), "a")) == 12


# --- load -----------------------------------------------------------------------------------------------------


def test_load_errors_keep_their_type(tiny_path: Path) -> None:
    with pytest.raises(CapacityError, match="num_kv_blocks=3"):
        EngineProcess(args(tiny_path, num_kv_blocks=3))
    with pytest.raises(ParameterError) as caught:
        EngineProcess(args(tiny_path, max_model_len=300))
    assert (caught.value.parameter, caught.value.value) == ("max_model_len", 300)
    with pytest.raises(ModelFileError, match="no-such-model"):
        EngineProcess(EngineArgs(model="no-such-model"))


def test_a_process_that_cannot_start(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(EngineDead, match="exit code 1"):
        EngineProcess(args(tiny_path))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EngineDead, match="could not be started"):
        EngineProcess(args(tiny_path))


def test_no_file_is_left_even_while_it_runs(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.closing(EngineProcess(args(tiny_path))) as engine:
        assert list(tmp_path.iterdir()) == []
        add_request(engine, "a", [5], PARAMS)
        assert drain(engine)


def test_a_temporary_folder_with_a_long_path(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    EngineProcess(args(tiny_path)).close()
    assert list(deep.iterdir()) == []


# --- the end --------------------------------------------------------------------------------------------------


def test_killed_while_a_step_waits(mortal: EngineProcess) -> None:
    with stopped(mortal):
        add_request(mortal, "a", [5], LONG)
        question = mortal.ask_snapshot()
        killer = threading.Timer(0.1, kill, (mortal,))
        killer.start()
        with pytest.raises(EngineDead, match="SIGKILL"):
            step_for_ever(mortal)
        killer.join()
    with pytest.raises(EngineDead, match="SIGKILL"):
        question.result(0)
    for call in (
        lambda: mortal.step(),
        lambda: add_request(mortal, "b", [5], PARAMS),
        lambda: mortal.end_input("a"),
        lambda: mortal.reset_prefix_cache(),
        lambda: mortal.ask_snapshot(),
    ):
        with pytest.raises((EngineDead, ParameterError), match=r"SIGKILL|open input"):
            call()
    mortal.wake()
    mortal.close()
    mortal.close()


def test_killed_while_idle_is_seen_by_the_next_call(mortal: EngineProcess) -> None:
    kill(mortal)
    process_of(mortal).wait()
    with pytest.raises(EngineDead, match="SIGKILL"):
        add_request(mortal, "a", [5], PARAMS)


def test_an_error_of_the_engine_itself_is_told(mortal: EngineProcess) -> None:
    child_of(mortal)._socket.send(b"\xc1")
    with pytest.raises(EngineDead, match="the engine failed: DecodeError"):
        step_for_ever(mortal)


# --- life -----------------------------------------------------------------------------------------------------


def test_nothing_waits_for_a_step(engine: EngineProcess) -> None:
    with stopped(engine):
        add_request(engine, "a", [5, 6, 7], PARAMS, resumable=True)
        add_chunk(engine, "a", [8], PARAMS)
        fork(engine, "a", "b", 2)
        engine.truncate("a", 1)
        engine.end_input("a")
        engine.abort_request("b")
        engine.reset_prefix_cache()
        assert engine.stats.num_kv_blocks == 64
        assert engine.state == "running"
        engine.check_alive()
        answer = engine.ask_snapshot("a")
        nothing = engine.ask_snapshot("b")
        assert engine.step() == []
        assert not answer.done()
        assert nothing.result(0).requests == []
    drain(engine)
    assert [each.request_id for each in answer.result(0).requests] in (["a"], [])


def test_an_answer_is_of_the_moment_after_the_calls(engine: EngineProcess) -> None:
    add_request(engine, "a", list(range(3, 43)), None, resumable=True)
    snapshot_of(engine)
    drain(engine)
    (a,) = snapshot_of(engine, "a").requests
    assert (a.request_id, a.state, a.num_tokens, a.num_computed) == ("a", "idle", 40, 39)
    everything = snapshot_of(engine)
    assert [each.request_id for each in everything.requests] == ["a"]
    abandoned = engine.ask_snapshot()
    assert abandoned.cancel()
    engine.abort_request("a")
    drain(engine)
    assert snapshot_of(engine).requests == []


def test_a_process_that_stands_still_is_ended(mortal: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped(mortal):
        add_request(mortal, "a", [5], LONG)
        question = mortal.ask_snapshot("a")
        monkeypatch.setattr(connection, "FROZEN_S", 0.5)
        with pytest.raises(EngineDead, match=r"stood still for 0\.5 s"):
            step_for_ever(mortal)
    with pytest.raises(EngineDead, match="stood still"):
        question.result(0)


def test_an_idle_process_that_stands_still_is_ended(
    mortal: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(mortal)
    with stopped(mortal):
        monkeypatch.setattr(connection, "FROZEN_S", 0.5)
        with pytest.raises(EngineDead, match="stood still"):
            step_for_ever(mortal)


def test_a_process_in_a_long_step_moves(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(connection, "CHILD_MODULE", "tests.host.patient_child")
    monkeypatch.setenv("SEGUE_TEST_GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("SEGUE_TEST_BEGUN", str(tmp_path / "begun"))
    with contextlib.closing(EngineProcess(args(tiny_path))) as engine:
        add_request(engine, "a", [5], PARAMS)
        while not (tmp_path / "begun").exists():
            assert engine.step() == []
        notes = child_of(engine)._notes
        first = wire.read_beat(notes)
        while wire.read_beat(notes) < first + 3:
            assert engine.step() == []
            assert engine.stats.num_steps == 0
        (tmp_path / "gate").touch()
        assert len(tokens_of(drain(engine), "a")) == 12


def test_silence_counts_only_while_somebody_looks() -> None:
    silence = connection.Silence(100.0)
    assert silence.look(1, 101.0) == 0
    assert silence.look(1, 101.5) == 0.5
    assert silence.look(1, 102.0) == 1.0
    assert silence.look(1, 9000.0) == 1.0 + connection.LONGEST_LOOK_S  # this process was stopped itself
    assert silence.look(2, 9001.0) == 0
    assert silence.look(2, 9001.5) == 0.5


# --- the end, by itself ---------------------------------------------------------------------------------------


def test_close_ends_it_in_the_middle_of_its_work(mortal: EngineProcess) -> None:
    add_request(mortal, "a", [5], LONG)
    pid = pid_of(mortal)
    mortal.close()
    mortal.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineDead, match="closed"):
        mortal.step()


def test_dropping_it_ends_it(tiny_path: Path) -> None:
    engine = EngineProcess(args(tiny_path))
    pid = pid_of(engine)
    del engine
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SCRIPT = """
import os, signal, sys, threading, time
from segue import LLM, SamplingParams

def main():
    global llm
    llm = LLM(sys.argv[1], runtime="reference", engine_process=True)

thread = threading.Thread(target=main)
thread.start()
thread.join()
(output,) = llm.generate("the hen", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
print(len(output.outputs[0].token_ids), llm._steps.engine._connection._inner.process.pid, flush=True)
"""


def run_script(more: str, path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + more, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_script_without_a_main_guard_from_a_thread_and_never_closed(tiny_path: Path) -> None:
    with run_script("", tiny_path) as script:
        out, err = script.communicate()
    assert (script.returncode, err) == (0, "")
    number, pid = map(int, out.split())
    assert number == 3
    wait_until_gone(pid)


def test_a_fork_of_the_parent_that_exits_leaves_it_alone(tiny_path: Path) -> None:
    more = """
pid = os.fork() or sys.exit(0)
assert os.waitpid(pid, 0) == (pid, 0)
llm.generate("the hen", SamplingParams(max_tokens=3))
"""
    with run_script(more, tiny_path) as script:
        _, err = script.communicate()
    assert (script.returncode, err) == (0, "")


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.fork() or time.sleep(30) or os._exit(0); os.kill(os.getpid(), signal.SIGKILL)",
    ],
    ids=["alone", "a fork of the parent lives on"],
)
def test_killed_parent_takes_it_along(tiny_path: Path, end: str) -> None:
    with run_script(end, tiny_path) as script:
        assert script.stdout is not None
        _, pid = map(int, script.stdout.readline().split())
        script.wait()
        assert script.returncode == -signal.SIGKILL
        wait_until_gone(pid)
        script.kill()
