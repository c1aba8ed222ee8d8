"""The engine in a process of its own, so that JSON, tokenising and a busy event loop never hold up a step.

    EngineProcess                     child.py
      calls, checked here   ──ipc──▶  Engine: the calls, in order, between two steps
      step() → outputs      ◀──ipc──  what each step brought, and how many calls came before it
      pipe, never written   ──────▶   stdin: at its end the parent is gone, and the child ends

Calls go one way: nobody waits for a step, except to ask for `stats` or `metrics_of`.
"""

import contextlib
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

import segue
from segue.engine import wire
from segue.engine.check import check_chunk, check_request
from segue.engine.client import EngineState
from segue.engine.outputs import EngineOutput, EngineSnapshot, EngineStats, RequestMetrics
from segue.engine.request import Keep, default_seed
from segue.errors import EngineDead, ParameterError, SegueError
from segue.sample.params import SamplingParams

if TYPE_CHECKING:
    from segue.args import EngineArgs

CHILD_MODULE = "segue.engine.child"
LIFE_CHECK_S = 0.2
"""How often a wait looks whether the other process still lives."""
ANSWER_TIMEOUT_S = 60.0
"""An answer comes after the step that runs."""
CLOSE_TIMEOUT_S = 1.0
MAX_SOCKET_PATH = 100
"""Bytes; the system's limit is 104 or 108."""


class _Remote(msgspec.Struct, eq=False):
    """An unfinished request of the child's engine."""

    request_id: str
    wire_id: str
    """Never used again, so that outputs that were under way at an abort reach nobody else."""
    input_open: bool
    default_seed: int


class EngineProcess:
    """An engine in a child process; an `EngineClient`.

    The child ends with this object and with this process, however that ends. If the child ends by itself, every call
    and a `step` that waits raise EngineDead.
    """

    def __init__(self, args: "EngineArgs") -> None:
        """Waits until the model is loaded. Raises what loading it raises, and EngineDead."""
        self._start_child()
        self._remotes: dict[str, _Remote] = {}
        """By request id."""
        self._remotes_by_wire: dict[str, _Remote] = {}
        self._num_remotes = 0
        self._num_sent = 0
        """Messages, and of these carried out before the last step that `step` returned:"""
        self._num_carried_out = 0
        self._has_unfinished = False
        """Whether the child had work left after that step."""
        self._progress: deque[wire.Progress] = deque()
        """Received and not yet returned by `step`: until then, nothing of it has happened."""
        self._answers: deque[wire.Answer] = deque()
        try:
            ready = self._load(args)
        except BaseException:
            self.close()
            raise
        self.config = ready.config
        self.vocab_size = ready.vocab_size

    def _start_child(self) -> None:
        self._child = Child()
        self._release = weakref.finalize(self, self._child.close)
        self._dead: str | None = None

    def _load(self, args: "EngineArgs") -> wire.Ready:
        while True:
            message = self._receive()
            match message:
                case wire.Connected():
                    self._child.remove_files()
                    self._send(wire.Start(msgspec.to_builtins(args)))
                case wire.Ready():
                    self._num_sent = 0
                    return message
                case wire.NotLoaded():
                    error = pickle.loads(message.error)
                    assert isinstance(error, SegueError)
                    raise error
                case _:
                    self._take(message)

    # --- requests ---------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        resumable: bool = False,
        keep: Keep = "computed",
    ) -> None:
        """As `Engine.add_request`, with the same errors."""
        self._check_unused(request_id)
        ids = check_request(
            self.config, self.vocab_size, prompt_token_ids, params, resumable=resumable, keep=keep
        )
        remote = self._add_remote(request_id, input_open=resumable)
        self._call(
            "add_request",
            request_id=remote.wire_id,
            prompt_token_ids=ids,
            params=_with_seed(params, remote),
            priority=priority,
            cache_salt=cache_salt,
            resumable=resumable,
            keep=keep,
            num_output_tokens=0,
        )

    def add_chunk(self, request_id: str, token_ids: Sequence[int], params: SamplingParams | None) -> None:
        """As `Engine.add_chunk`."""
        remote = self._open_remote(request_id)
        ids = check_chunk(self.config, self.vocab_size, token_ids, params)
        params = _with_seed(params, remote)
        self._call("add_chunk", request_id=remote.wire_id, token_ids=ids, params=params)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """As `Engine.truncate`, but more tokens than there are fail the request."""
        self._call("truncate", request_id=self._open_remote(request_id).wire_id, num_tokens=num_tokens)

    def fork(self, request_id: str, new_request_id: str, num_tokens: int | None = None) -> None:
        """As `Engine.fork`, but more tokens than there are fail the new request."""
        source = self._open_remote(request_id)
        self._check_unused(new_request_id)
        self._call(
            "fork",
            request_id=source.wire_id,
            new_request_id=self._add_remote(new_request_id, input_open=True).wire_id,
            num_tokens=num_tokens,
        )

    def end_input(self, request_id: str) -> None:
        """As `Engine.end_input`."""
        remote = self._open_remote(request_id)
        remote.input_open = False
        self._call("end_input", request_id=remote.wire_id)

    def abort_request(self, request_id: str) -> None:
        """As `Engine.abort_request`."""
        remote = self._remotes.get(request_id)
        if remote is not None:
            self._forget(remote)
            self._call("abort_request", request_id=remote.wire_id)

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._remotes:
            raise ParameterError("request_id", request_id, "is in use by an unfinished request")

    def _open_remote(self, request_id: str) -> _Remote:
        remote = self._remotes.get(request_id)
        if remote is None or not remote.input_open:
            raise ParameterError("request_id", request_id, "is no request with open input")
        return remote

    def _add_remote(self, request_id: str, *, input_open: bool) -> _Remote:
        self._check_alive()
        seed = default_seed(self.config.seed, self._num_remotes)
        remote = _Remote(request_id, str(self._num_remotes), input_open, seed)
        self._num_remotes += 1
        self._remotes[request_id] = self._remotes_by_wire[remote.wire_id] = remote
        return remote

    def _forget(self, remote: _Remote) -> None:
        del self._remotes[remote.request_id]
        del self._remotes_by_wire[remote.wire_id]

    # --- the step ---------------------------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to wait for or to report."""
        return bool(self._progress) or self._has_unfinished or self._num_sent > self._num_carried_out

    def step(self) -> list[EngineOutput]:
        """Waits for the child's next step and returns what is new; nothing if `wake` came first."""
        self._check_alive()
        if not self._progress and self.has_unfinished_requests():
            self._take(self._receive())
        if not self._progress:
            return []
        progress = self._progress.popleft()
        self._num_carried_out = progress.num_carried_out
        self._has_unfinished = progress.has_unfinished
        return [output for output in progress.outputs if self._take_output(output)]

    def _take_output(self, output: EngineOutput) -> bool:
        """Puts the caller's id in. False when the request was aborted meanwhile."""
        remote = self._remotes_by_wire.get(output.request_id)
        if remote is None:
            return False
        output.request_id = remote.request_id
        if output.finished:
            self._forget(remote)
        return True

    def wake(self) -> None:
        """Lets a `step` that waits in another thread return early."""
        self._child.wake()

    # --- state ------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """As `Engine.reset_prefix_cache`."""
        self._call("reset_prefix_cache")

    @property
    def state(self) -> EngineState:
        """Any thread may ask."""
        return "running" if self._dead is None else "dead"

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.process.pid

    @property
    def stats(self) -> EngineStats:
        """As `Engine.stats`, after all that was sent. Waits for the step that runs."""
        self._send(wire.AskStats())
        answer = self._answer()
        assert isinstance(answer, wire.Stats)
        return answer.stats

    def metrics_of(self, request_id: str) -> RequestMetrics:
        """As `Engine.metrics_of`; the child may be ahead of the outputs that `step` has returned."""
        remote = self._remotes.get(request_id)
        if remote is None:
            raise ParameterError("request_id", request_id, "is no unfinished request")
        self._call("metrics_of", request_id=remote.wire_id)
        answer = self._answer()
        assert isinstance(answer, wire.Metrics)
        if answer.metrics is not None:
            return answer.metrics
        # It has finished there, and the output that says so has come before this answer.
        outputs = (output for progress in self._progress for output in progress.outputs)
        last = next(each for each in outputs if each.finished and each.request_id == remote.wire_id)
        return last.metrics or RequestMetrics()

    def snapshot(self, request_id: str | None = None) -> EngineSnapshot:
        """As `Engine.snapshot`, after all that was sent. Requests that have ended are left out."""
        remote = self._remotes.get(request_id) if request_id is not None else None
        if request_id is not None and remote is None:
            return EngineSnapshot(requests=[], cached_blocks=[])
        self._call("snapshot", request_id=remote.wire_id if remote is not None else None)
        answer = self._answer()
        assert isinstance(answer, wire.Snapshot)
        known = [
            msgspec.structs.replace(each, request_id=self._remotes_by_wire[each.request_id].request_id)
            for each in answer.snapshot.requests
            if each.request_id in self._remotes_by_wire
        ]
        return msgspec.structs.replace(answer.snapshot, requests=known)

    def close(self) -> None:
        """Ends the child, in the middle of a step if there is one. May be called again."""
        self._dead = self._dead or "the engine was closed"
        self._release()

    # --- messages ---------------------------------------------------------------------------------------------

    def _call(self, method: str, **arguments: object) -> None:
        self._send(wire.CALL_TYPES[method](**arguments))

    def _send(self, message: msgspec.Struct) -> None:
        self._check_alive()
        self._transmit(message)
        self._num_sent += 1

    def _transmit(self, message: msgspec.Struct) -> None:
        try:
            self._child.socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # there is no queue limit, so nobody is connected any more
            self._die(self._child.kill())

    def _receive(self, deadline_s: float = math.inf) -> object:
        """The next message; None when `wake` or the deadline, of the monotonic clock, came first."""
        while time.monotonic() < deadline_s:
            ready = self._child.poll(LIFE_CHECK_S)
            if ready.message:
                return wire.decode_from_child(self._child.socket.recv())
            if ready.woken:
                return None
            self._check_alive()
        return None

    def _take(self, message: object) -> None:
        match message:
            case wire.Progress():
                self._progress.append(message)
            case wire.Stats() | wire.Metrics() | wire.Snapshot():
                self._answers.append(message)
            case wire.Failed():
                self._die(message.error)
            case _:
                assert message is None, message

    def _answer(self) -> wire.Answer:
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while not self._answers:
            if time.monotonic() > deadline_s:
                self._child.kill()
                self._die(f"the engine's process did not answer for {ANSWER_TIMEOUT_S:g} s and was ended")
            self._take(self._receive(deadline_s))
        return self._answers.popleft()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)
        end = self._child.end()
        if end is None:
            return
        # What it sent before it ended may say why.
        while self._child.poll(LIFE_CHECK_S).message:
            self._take(wire.decode_from_child(self._child.socket.recv()))
        self._die(end)

    def _die(self, why: str) -> NoReturn:
        self._dead = why
        self._release()
        raise EngineDead(why)


class _Ready(msgspec.Struct, frozen=True):
    message: bool
    woken: bool


class Child:
    """The child process and the ways to it."""

    def __init__(self) -> None:
        """Starts it. Raises EngineDead if that fails."""
        self._parent_pid = os.getpid()
        with contextlib.ExitStack() as undo:
            try:
                self._directory = _private_directory()
                undo.callback(self.remove_files)
                self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                undo.callback(self._context.destroy, linger=0)
                self.socket = wire.pair_socket(self._context)
                address = f"ipc://{self._directory / 'engine'}"
                self.socket.bind(address)
                self._woken, self._waker = socket.socketpair()
                undo.callback(self._woken.close)
                undo.callback(self._waker.close)
                self._notes = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rest
                undo.callback(self._notes.close)
                self.process = _spawn(address, self._notes.fileno())
            except (OSError, zmq.ZMQError) as error:
                raise EngineDead(f"the engine's process could not be started: {error}") from None
            self._undo = undo.pop_all()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)

    def poll(self, timeout_s: float) -> _Ready:
        """What has come, or comes within this time."""
        events = dict(self._poller.poll(int(timeout_s * 1000)))
        woken = self._woken.fileno() in events
        if woken:
            self._woken.recv(4096)
        return _Ready(self.socket in events, woken)

    def wake(self) -> None:
        """Any thread: let a `poll` return."""
        with contextlib.suppress(OSError):  # full: it is awake; closed: nobody polls
            self._waker.send(b"\0")

    def end(self) -> str | None:
        """How the process ended; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"the engine's process ended with exit code {code}"
        if -code == signal.SIGKILL:
            return "the engine's process was ended by SIGKILL; if nobody sent it, memory ran out"
        known = {number.value: number.name for number in signal.Signals}
        return f"the engine's process was ended by {known.get(-code, f'signal {-code}')}"

    def ids_in_flight(self) -> list[str]:
        """Once it has ended: the requests that were in the steps in flight, by their ids on the wire."""
        return wire.read_notes(self._notes.fileno())

    def kill(self) -> str:
        """Makes an end, if it has not come by itself. Returns how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LIFE_CHECK_S)
        self.process.kill()
        self.process.wait()
        end = self.end()
        assert end is not None
        return end

    def remove_files(self) -> None:
        """Once it is connected, the socket's file is of no use."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Ends it: the end of its stdin is its sign to exit at once."""
        if os.getpid() != self._parent_pid:
            return  # in a fork of the parent, whose copy of this is of no use
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._undo.close()


def _private_directory() -> Path:
    """A new directory that only this user may enter, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="segue-"))
    if len(os.fsencode(directory)) < MAX_SOCKET_PATH - len("/engine"):
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="segue-", dir="/tmp"))


def _with_seed(params: SamplingParams | None, remote: _Remote) -> SamplingParams | None:
    """The same parameters with the seed that the child would choose: another child would choose another."""
    if params is None or params.seed is not None:
        return params
    return msgspec.structs.replace(params, seed=remote.default_seed)


def _spawn(address: str, notes: int) -> "subprocess.Popen[bytes]":
    package = str(Path(segue.__file__).parents[1])
    search_path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    # Ctrl-C reaches the child as well. It is blocked from the first instant, and ignored once `main` runs.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            # -P: what lies in the working directory must not be imported.
            [sys.executable, "-P", "-m", CHILD_MODULE, address, str(os.getpid()), str(notes)],
            pass_fds=(notes,),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": search_path},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
