"""How names that come from outside are shown in one-line messages."""

import os
import reprlib

_LONGEST_NAME = 60


def show_path(path: str | os.PathLike[str]) -> str:
    """The path as typed; escaped when it would break the line or cannot be printed."""
    text = os.fspath(path)
    return text if text and text.isprintable() else ascii(text)


def show_name(name: str) -> str:
    """A key or tensor name from a file, quoted, escaped and cut to a reasonable length."""
    return repr(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…")


def show_value(value: object) -> str:
    """A metadata value, cut to a reasonable length."""
    return reprlib.repr(value)
