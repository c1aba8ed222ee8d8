"""Reads a model's text character by character and tells content from tool calls.

A format is written as a coroutine over `self.char`, the character at hand ("" at the end); each `yield` waits for the
next one. What a call says is passed on as it comes: first its name, then its arguments as the model writes them.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

import msgspec


class Content(msgspec.Struct):
    """Text that is no tool call."""

    text: str


class CallStart(msgspec.Struct):
    """Call number `index` begins."""

    index: int
    name: str


class CallArguments(msgspec.Struct):
    """More of the JSON text of its arguments."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments
Steps = Generator[None, None, None]
Sink = Callable[[str], None]

_T = TypeVar("_T")
_ARGUMENT_KEYS = ("arguments", "parameters")


class NotACall(Exception):
    """The text at hand does not go on like a call."""


class ToolReader(ABC):
    """Base of the formats."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are those of the tools that the model was told."""
        self.names = names
        self.char = ""
        self.num_calls = 0
        self._pieces: list[Piece] = []
        self._raw: list[str] = []
        """What was read since `_begin_raw`."""
        self._steps = self._run()
        next(self._steps)

    def push(self, text: str) -> list[Piece]:
        """What more text means."""
        for self.char in text:
            next(self._steps)
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back."""
        self.char = ""
        for _ in self._steps:
            pass
        return self._take()

    @abstractmethod
    def read(self) -> Steps:
        """All of the text, from the first character at hand to the end."""

    def _run(self) -> Steps:
        yield
        yield from self.read()
        while self.char:
            yield from self.content()

    def _take(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        return taken

    # --- for formats ------------------------------------------------------------------------------------------

    def emit(self, text: str) -> None:
        """This is content."""
        if not text:
            return
        if self._pieces and isinstance(last := self._pieces[-1], Content):
            last.text += text
        else:
            self._pieces.append(Content(text))

    def content(self) -> Steps:
        """The character at hand is content."""
        self.emit(self.char)
        yield

    def next(self) -> Steps:
        """Takes the character at hand."""
        self._raw.append(self.char)
        yield

    def space(self) -> Steps:
        """Takes white space."""
        while self.char.isspace():
            yield from self.next()

    def begin_raw(self, marker: str = "") -> None:
        """From here on the text is kept, after the marker, in case it turns out to be content."""
        self._raw = [marker]

    def raw(self) -> str:
        return "".join(self._raw)

    def literal(self, text: str) -> Generator[None, None, bool]:
        """Takes as much as is at hand of this text. Returns whether that is all."""
        for expected in text:
            if self.char != expected:
                return False
            yield from self.next()
        return True

    def content_until(self, marker: str) -> Generator[None, None, bool]:
        """Emits what comes before the marker and takes it; what may become one is held back. False: it ended."""
        held = ""
        while self.char:
            held += self.char
            yield
            if held == marker:
                return True
            while not marker.startswith(held):
                self.emit(held[0])
                held = held[1:]
        self.emit(held)
        return False

    def call(
        self, body: "Callable[[Call], Steps]", *, known_only: bool = False, end: str = ""
    ) -> Generator[None, None, bool]:
        """Reads a call. Returns False when it is none; what was read of it since `begin_raw` is then content.

        One whose name was passed on stays a call, with the arguments that could be read; what is left of it, past
        `end` (by default: all that there is), is no content.
        """
        call = Call(self, known_only=known_only)
        try:
            yield from body(call)
            call.end()
        except NotACall:
            if call.has_started:
                call.flush()
                yield from self._skip_past(end)
            else:
                self.emit(self.raw())
            return False
        return True

    def object_call(self, call: "Call") -> Steps:
        """{"name": "…", "arguments": {…}}, in any order, with other members ignored, and commas that are missing.

        Of several members with arguments the first counts that has some.
        """
        yield from self._expect("{")
        yield from self.space()
        while self.char != "}":
            key = yield from self._string()
            yield from self.space()
            yield from self._expect(":")
            yield from self.space()
            if key == "name":
                call.start((yield from self._string()))
            elif key in _ARGUMENT_KEYS and not call.has_arguments:
                yield from self.value(call.add)
                call.drop_empty()
            else:
                yield from self.value(_ignore)
            yield from self.space()
            if self.char == ",":
                yield from self.next()
                yield from self.space()
            elif self.char not in ("}", '"'):
                raise NotACall
        yield from self.next()

    def _skip_past(self, end: str) -> Steps:
        last = ""
        while self.char:
            last = (last + self.char)[-len(end) :]
            yield
            if last == end:
                return

    def value(self, sink: Sink) -> Steps:
        """One JSON value, as it is written; arguments that a model wrote as a string of JSON lose the quotes."""
        if self.char == '"':
            sink((yield from self._string()))
        elif self.char in ("{", "["):
            yield from self._nested(sink)
        else:
            while self.char and self.char not in ",]}" and not self.char.isspace():
                yield from self._pass(sink)

    def _nested(self, sink: Sink) -> Steps:
        depth = 0
        while self.char:
            if self.char == '"':
                yield from self._quoted(sink)
                continue
            depth += (self.char in "{[") - (self.char in "}]")
            yield from self._pass(sink)
            if depth == 0:
                return
        raise NotACall

    def _string(self) -> Generator[None, None, str]:
        """The text that a JSON string means."""
        parts: list[str] = []
        yield from self._quoted(parts.append)
        try:
            text = json.loads("".join(parts), strict=False)
        except ValueError:
            raise NotACall from None
        assert isinstance(text, str)
        return text

    def _quoted(self, sink: Sink) -> Steps:
        """A JSON string, as it is written."""
        yield from self._expect('"', sink)
        while self.char != '"':
            if self.char == "\\":
                yield from self._pass(sink)
            yield from self._pass(sink)
        yield from self._pass(sink)

    def _expect(self, char: str, sink: Sink | None = None) -> Steps:
        if self.char != char:
            raise NotACall
        yield from self._pass(sink or _ignore)

    def _pass(self, sink: Sink) -> Steps:
        if not self.char:
            raise NotACall
        sink(self.char)
        yield from self.next()

    def add_piece(self, piece: Piece) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            last.text += piece.text
        else:
            self._pieces.append(piece)


class Call:
    """A call that is being read. Arguments that come before the name wait for it, and `{}` until something follows."""

    def __init__(self, reader: ToolReader, *, known_only: bool) -> None:
        self.has_started = False
        self._reader = reader
        self._known_only = known_only
        self._index = reader.num_calls
        self._waiting = ""
        self.has_arguments = False
        """More than `{}`."""

    def start(self, name: str) -> None:
        """Raises NotACall for a name that cannot be."""
        if self.has_started or not name or (self._known_only and name not in self._reader.names):
            raise NotACall
        self.has_started = True
        self._reader.num_calls += 1
        self._reader.add_piece(CallStart(self._index, name))
        if self.has_arguments:
            self.flush()

    def add(self, text: str) -> None:
        """More of the arguments."""
        self._waiting += text
        if not self.has_arguments:
            self.has_arguments = "".join(self._waiting.split()) not in ("", "{", "{}")
        if self.has_arguments and self.has_started:
            self.flush()

    def flush(self) -> None:
        """Pass on what waits."""
        if self._waiting:
            self._reader.add_piece(CallArguments(self._index, self._waiting))
            self._waiting = ""

    def drop_empty(self) -> None:
        """The arguments are complete; if there were none, others may follow."""
        if not self.has_arguments:
            self._waiting = ""

    def end(self) -> None:
        """The call is complete. Raises NotACall without a name."""
        if not self.has_started:
            raise NotACall
        if not self.has_arguments:
            self._waiting = "{}"
        self.flush()


def _ignore(text: str) -> None:
    pass
