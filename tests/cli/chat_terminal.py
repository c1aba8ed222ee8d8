"""`segue chat` in a terminal of its own."""

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

TIMEOUT_S = 300.0
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """The user's side of it."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._descriptor = descriptor
        self.shown = b""
        """All that came, echoes included."""
        self._num_seen = 0

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def until(self, text: bytes) -> bytes:
        """Waits for this text behind what was waited for before. Returns what came up to its end."""
        end_s = time.monotonic() + TIMEOUT_S
        while not self._has(text):
            assert time.monotonic() < end_s, (text, self.shown)
            assert self._read(), (text, self.shown)
        begin, self._num_seen = self._num_seen, self.shown.index(text, self._num_seen) + len(text)
        return self.shown[begin : self._num_seen]

    def insist(self, keys: bytes, text: bytes) -> None:
        """Types until this text comes. At a prompt a Ctrl-C that meets readline between two keys waits for more."""
        end_s = time.monotonic() + TIMEOUT_S
        while not self._has(text):
            assert time.monotonic() < end_s, (text, self.shown)
            self.type(keys)
            patient_s = time.monotonic() + 0.5
            while not self._has(text) and (left_s := patient_s - time.monotonic()) > 0:
                if select.select([self._descriptor], [], [], left_s)[0]:
                    assert self._read(), (text, self.shown)
        self.until(text)

    def _has(self, text: bytes) -> bool:
        return text in self.shown[self._num_seen :]

    def until_shown(self, num_bytes: int) -> None:
        """Waits for so many in all."""
        while len(self.shown) < num_bytes:
            assert self._read(), self.shown

    def wait(self) -> int:
        """Its exit code."""
        while self._read():
            pass
        return self.process.wait(timeout=TIMEOUT_S)

    def _read(self) -> bool:
        """Returns whether there can be more."""
        if select.select([self._descriptor], [], [], TIMEOUT_S)[0]:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # Linux: the other side is closed
                return False
            self.shown += data
            return bool(data)
        raise AssertionError(("nothing came", self.shown))


@contextlib.contextmanager
def chat_terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """The command in a terminal, where keys like Ctrl-C mean what they mean to a user."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "segue", "chat", *arguments]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "TERM": "dumb", **environment},
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
