"""The way to an engine that runs elsewhere, and the one to a child process.

    send   ──▶  calls and questions, in order
    poll   ◀──  what the engine says
    end         how it ended, once all that it said has been polled

Nothing here waits for a step. An engine that is busy is not taken for dead: the child counts beats beside its step,
and only a process without a beat for FROZEN_S is ended. While it loads the model it may hold its beats up, and is
given the time that it takes. A parent that was itself stopped has not looked meanwhile, and does not hold that time
against the child.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

import segue
from segue.errors import EngineDead
from segue.host import wire
from segue.host.client import EngineState

if TYPE_CHECKING:
    from segue.args import EngineArgs

CHILD_MODULE = "segue.host.child"
FROZEN_S = 60.0
"""A process without a beat for so long is stopped, or deadlocked in Python, and will not answer."""
LONGEST_LOOK_S = 1.0
"""Time between two looks counts as silence up to this."""
LAST_WORDS_S = 0.2
"""What a process said before it ended comes within this time."""
CLOSE_TIMEOUT_S = 1.0
MAX_SOCKET_PATH = 100
"""Bytes; the system's limit is 104 or 108."""


class Connection(Protocol):
    """A way to an engine. One thread calls; any may read `state`, `trouble` and `num_restarts`."""

    @property
    def state(self) -> EngineState: ...

    @property
    def trouble(self) -> str | None:
        """Why it is "dead": for good, or until it could be started again."""
        ...

    @property
    def num_restarts(self) -> int: ...

    def send(self, message: msgspec.Struct) -> None:
        """Never waits and never fails: that an engine has ended is for `end` to tell."""
        ...

    def poll(self, timeout_s: float) -> wire.FromChild | None:
        """The next message. None when there was none in this time, or when it was woken."""
        ...

    def end(self) -> str | None:
        """Why nothing more will come. None as long as something may."""
        ...

    def ids_in_flight(self) -> list[str]:
        """Once it has ended: the requests that were in the steps in flight, by their ids on the wire."""
        ...

    def close(self) -> None:
        """Ends the engine, in the middle of a step if there is one. May be called again."""
        ...


class Waker:
    """Lets any thread end a wait of the engine's thread."""

    def __init__(self) -> None:
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: nobody waits
            self._waker.send(b"\0")

    def wait(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self.fileno(), zmq.POLLIN)
        if poller.poll(int(timeout_s * 1000)):
            self.clear()

    def fileno(self) -> int:
        return self._woken.fileno()

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self._woken.recv(4096)

    def close(self) -> None:
        self._woken.close()
        self._waker.close()


class Silence:
    """For how long a number that should change has not, over the looks at it."""

    def __init__(self, now_s: float) -> None:
        self._last: int | None = None
        self._looked_s = now_s
        self._silent_s = 0.0

    def look(self, number: int, now_s: float) -> float:
        """Seconds; the time between two looks counts up to LONGEST_LOOK_S."""
        self._silent_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        if number != self._last:
            self._last, self._silent_s = number, 0.0
        return self._silent_s


class ChildProcess:
    """An engine in a child process. The child ends with this object and with this process, however that ends."""

    state: EngineState = "running"
    trouble: str | None = None
    num_restarts = 0

    def __init__(self, args: "EngineArgs", waker: Waker) -> None:
        """Starts it; that it has loaded the model is its first message. Raises EngineDead if that fails."""
        self._args = args
        self._waker = waker
        self._failure: str | None = None
        """What it said was the reason why it ends."""
        self._end: str | None = None
        with contextlib.ExitStack() as undo:
            try:
                self._directory = _private_directory()
                undo.callback(shutil.rmtree, self._directory, ignore_errors=True)
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                undo.callback(context.destroy, linger=0)
                self._socket = wire.pair_socket(context)
                address = f"ipc://{self._directory / 'engine'}"
                self._socket.bind(address)
                self._notes = wire.make_notes()
                undo.callback(os.close, self._notes)
                self.process = _spawn(address, self._notes)
            except (OSError, zmq.ZMQError) as error:
                raise EngineDead(f"the engine's process could not be started: {error}") from None
            self._close = weakref.finalize(self, _close, self.process, os.getpid(), undo.pop_all())
        self._silence: Silence | None = None
        """Once the model is loaded."""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(waker.fileno(), zmq.POLLIN)

    def send(self, message: msgspec.Struct) -> None:
        # There is no queue limit: when it cannot be sent, nobody is connected any more.
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(message), zmq.NOBLOCK)

    def poll(self, timeout_s: float) -> wire.FromChild | None:
        events = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._waker.fileno() in events:
            self._waker.clear()
        if self._socket not in events:
            return None
        message = wire.decode_from_child(self._socket.recv())
        match message:
            case wire.Connected():
                # The socket's file is of no use any more.
                shutil.rmtree(self._directory, ignore_errors=True)
                self.send(wire.Start(msgspec.to_builtins(self._args)))
                return None
            case wire.Failed():
                self._failure = message.error
                return None
            case wire.Ready():
                self._silence = Silence(time.monotonic())
        return message

    def end(self) -> str | None:
        if self._end is not None:
            return self._end
        if self.process.poll() is None and not self._is_frozen():
            return None
        if self._socket.poll(int(LAST_WORDS_S * 1000)):
            return None  # it may say why
        self._end = self._failure or _how_it_ended(self.process.poll())
        return self._end

    def _is_frozen(self) -> bool:
        """If so, it is killed."""
        if self._silence is None:
            return False
        if self._silence.look(wire.read_beat(self._notes), time.monotonic()) < FROZEN_S:
            return False
        self._failure = f"the engine's process stood still for {FROZEN_S:g} s and was ended"
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_TIMEOUT_S)
        return True

    def ids_in_flight(self) -> list[str]:
        return wire.read_notes(self._notes)

    def close(self) -> None:
        self._end = self._end or "the engine was closed"
        self._close()


def _close(process: "subprocess.Popen[bytes]", parent_pid: int, resources: contextlib.ExitStack) -> None:
    """Ends a child: the end of its stdin is its sign to exit at once."""
    if os.getpid() != parent_pid:
        return  # in a fork of the parent, whose copy of this is of no use
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # the system holds it; it runs no more of its code
            process.wait(CLOSE_TIMEOUT_S)
    resources.close()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "the engine's process was ended"
    if code >= 0:
        return f"the engine's process ended with exit code {code}"
    if -code == signal.SIGKILL:
        return "the engine's process was ended by SIGKILL; if nobody sent it, memory ran out"
    known = {number.value: number.name for number in signal.Signals}
    return f"the engine's process was ended by {known.get(-code, f'signal {-code}')}"


def _private_directory() -> Path:
    """A new directory that only this user may enter, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="segue-"))
    if len(os.fsencode(directory)) < MAX_SOCKET_PATH - len("/engine"):
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="segue-", dir="/tmp"))


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
