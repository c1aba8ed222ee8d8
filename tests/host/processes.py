"""Looking into an `EngineProcess` from outside, and doing to its process what the world does."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

from segue.contract.reports import EngineOutput, EngineSnapshot
from segue.host.client import EngineClient
from segue.host.connection import ChildProcess
from segue.host.process import EngineProcess
from segue.host.supervisor import RestartingConnection


def child_of(engine: EngineClient) -> ChildProcess:
    """The one that it has now."""
    assert isinstance(engine, EngineProcess)
    connection = engine._connection
    if isinstance(connection, RestartingConnection):
        connection = connection._inner
    assert isinstance(connection, ChildProcess)
    return connection


def process_of(engine: EngineClient) -> "subprocess.Popen[bytes]":
    return child_of(engine).process


def pid_of(engine: EngineClient) -> int:
    return process_of(engine).pid


def kill(engine: EngineClient) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid_of(engine), signal.SIGKILL)


@contextlib.contextmanager
def stopped(engine: EngineClient) -> Iterator[int]:
    """Its process stands still. Gives its id."""
    pid = pid_of(engine)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def drain(engine: EngineClient) -> list[EngineOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def tokens_of(outputs: list[EngineOutput], request_id: str) -> list[int]:
    return [token for each in outputs if each.request_id == request_id for token in each.token_ids]


def snapshot_of(engine: EngineClient, request_id: str | None = None) -> EngineSnapshot:
    """What it answers; outputs that come meanwhile are lost."""
    answer = engine.ask_snapshot(request_id)
    while not answer.done():
        engine.step()
    return answer.result()
