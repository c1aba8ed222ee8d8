"""What commands write beside errors and tables."""

import json
import sys

import msgspec

from segue.display import terminal_text


def write_answer(text: str) -> None:
    """What a model wrote, to stdout, at once; as it is when that is not a terminal."""
    sys.stdout.write(terminal_text(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def tell(text: str) -> None:
    """A line, or some, to stderr."""
    print(terminal_text(text), file=sys.stderr)


def print_json(record: object) -> None:
    """On one line of stdout, in which everything is printable."""
    encoded = msgspec.json.encode(record).decode()
    print(encoded if encoded.isprintable() else "".join(map(_escaped, encoded)))


def _escaped(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]
