"""How text that comes from outside is shown: a file's names, a user's values, what a model says.

Such text can hold anything, also codes that steer a terminal or hide what stands there.
"""

import os
import re
import reprlib

_LONGEST_NAME = 60
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but line break and tab."""


def escape(text: str) -> str:
    """With escapes for what is not printable, line breaks included."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def one_line(text: str) -> str:
    """As `escape`, with a space for each white space."""
    return escape(" ".join(text.split()))


def terminal_text(text: str) -> str:
    """What a model wrote, for a terminal: lines, tabs and every script stay, control characters are escaped."""
    return _CONTROLS.sub(lambda found: _escaped(found[0]), text)


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


def _escaped(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]
