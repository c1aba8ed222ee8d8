"""From what a user typed to values. Everything wrong is a UsageError of one line."""

import sys

import msgspec

from segue.errors import ParameterError, UsageError


def parse_logit_bias(name: str, entries: list[str]) -> dict[int, float]:
    """The biases of a list of "ID=BIAS"."""
    biases: dict[int, float] = {}
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ParameterError(name, entry, "must look like 42=-1.5") from None
    return biases


def parse_object(name: str, text: str) -> dict[str, object]:
    """A JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ParameterError(name, text, f"must be a JSON object ({error})") from None


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument, or stdin for "-" and for no argument when stdin is not a terminal."""
    if argument is not None and argument != "-":
        if any("\ud800" <= char <= "\udfff" for char in argument):
            raise UsageError("the prompt is not valid UTF-8: pass it as UTF-8")
        text = argument
    elif argument is None and sys.stdin.isatty():
        raise UsageError("there is no prompt: give one, or - to read it from stdin")
    else:
        text = decode_utf8(sys.stdin.buffer.read(), "stdin")
    if not text:
        raise UsageError("the prompt is empty")
    return text


def decode_utf8(data: bytes, where: str) -> str:
    """The text, or a UsageError that says which byte is wrong."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None
