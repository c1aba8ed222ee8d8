"""What the user types: lines that go on, blocks of lines, and the history of the lines."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from segue.errors import UsageError

HISTORY_LINES: Final = 1000
_BLOCK: Final = '"""'


class Entry(msgspec.Struct, frozen=True):
    """A command or a turn."""

    text: str
    is_block: bool
    """Then it is said as it is, and never a command."""


def read_entry(*, is_interactive: bool) -> Entry | None:
    """The next one from stdin; None at the end. Raises UsageError when it is not UTF-8, KeyboardInterrupt."""
    first, more = ("> ", "... ") if is_interactive else ("", "")
    line = _read_line(first)
    if line is None:
        return None
    is_block = line.strip() == _BLOCK
    lines = list(_block_lines(more)) if is_block else list(_continued(line, more))
    text = "\n".join(lines)
    if any("\udc80" <= char <= "\udcff" for char in text):
        raise UsageError("the line is not valid UTF-8")
    return Entry(text, is_block)


def _continued(line: str, prompt: str) -> Iterator[str]:
    """The lines that belong together: all but the last end in a backslash. The end of the input ends them."""
    while line.endswith("\\"):
        yield line[:-1]
        following = _read_line(prompt)
        if following is None:
            return
        line = following
    yield line


def _block_lines(prompt: str) -> Iterator[str]:
    """The lines up to the one that ends the block. The end of the input ends it too."""
    while (line := _read_line(prompt)) is not None and line.strip() != _BLOCK:
        yield line


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None


@contextmanager
def undisturbed_output() -> Iterator[None]:
    """Ctrl-C leaves no ^C in what is shown, and loses nothing of it: a terminal would throw away what was written and
    is not on the screen yet (`ECHOCTL` and `NOFLSH` in termios(3)). On a terminal only."""
    try:
        import termios
    except ImportError:
        yield
        return
    try:
        before = termios.tcgetattr(sys.stdin)
    except termios.error:  # it is gone
        yield
        return
    local = 3
    changed = [*before]
    changed[local] = (before[local] & ~termios.ECHOCTL) | termios.NOFLSH
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def line_history() -> Iterator[None]:
    """Line editing, and a history of the lines that is kept for the next time, for this user only. A history that
    cannot be read or written is done without: it is not worth an error. Where there is no readline, neither."""
    try:
        import readline
    except ImportError:
        yield
        return
    from segue.weights.hub import cache_dir

    path = cache_dir() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            _make_private(path)
            readline.write_history_file(path)


def _make_private(path: Path) -> None:
    """An existing file keeps its mode when it is written, so it gets it before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
