"""The messages between an `EngineProcess` and its child, as msgpack.

A call's message has the name and the parameters of the engine's method, so a new method is one name in `CALLS`.
"""

import inspect
import os
import tempfile
from array import array
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, get_type_hints

import msgspec
import zmq

from segue.contract.reports import EngineOutput, EngineSnapshot, EngineStats
from segue.engine.config import EngineConfig
from segue.engine.engine import Engine

CALLS = (
    "add_request",
    "add_chunk",
    "truncate",
    "fork",
    "end_input",
    "abort_request",
    "reset_prefix_cache",
)
"""Methods of `Engine` that are called from outside. None returns anything."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """To the child, when it is connected: the fields of `EngineArgs`."""

    args: dict[str, Any]


class AskSnapshot(msgspec.Struct, frozen=True, tag=True):
    """To the child: a question, which is answered by `Snapshot` and does not count as a call."""

    number: int
    request_id: str | None


class Connected(msgspec.Struct, frozen=True, tag=True):
    """From the child, first: messages will reach it, and the socket's address is not needed any more."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the child: the model is loaded."""

    config: EngineConfig
    vocab_size: int
    stats: EngineStats


class NotLoaded(msgspec.Struct, frozen=True, tag=True):
    """From the child, which then ends: the model cannot be loaded. A pickled SegueError."""

    error: bytes


class Progress(msgspec.Struct, frozen=True, tag=True):
    """From the child, after each step."""

    outputs: list[EngineOutput]
    num_carried_out: int
    """How many calls were carried out before the step."""
    has_unfinished: bool
    stats: EngineStats
    """After the step."""


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """From the child: the answer to the `AskSnapshot` of this number."""

    number: int
    snapshot: EngineSnapshot


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the child, which then ends: the engine failed, and not because of a request."""

    error: str


def _call_type(method: str) -> type[msgspec.Struct]:
    """A struct that is named like the method and has its parameters."""
    function = getattr(Engine, method)
    hints = get_type_hints(function)
    fields = [(name, hints[name]) for name in inspect.signature(function).parameters if name != "self"]
    return msgspec.defstruct(method, fields, frozen=True, tag=True)


def _encode_array(value: object) -> object:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError(type(value))


def _decode_array(kind: type, value: object) -> object:
    assert kind is array
    assert isinstance(value, list)
    return array("i", value)


CALL_TYPES = {method: _call_type(method) for method in CALLS}
FromChild = Connected | Ready | NotLoaded | Progress | Snapshot | Failed

encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
decode_to_child = msgspec.msgpack.Decoder(
    reduce(or_, CALL_TYPES.values(), Start | AskSnapshot), dec_hook=_decode_array
).decode
decode_from_child: "Callable[[bytes], FromChild]" = msgspec.msgpack.Decoder(FromChild).decode


def pair_socket(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A socket without limits on what is queued: neither process waits for the other to read."""
    pair = context.socket(zmq.PAIR)
    pair.linger = 0
    pair.sndhwm = pair.rcvhwm = 0
    return pair


# --- the notes ------------------------------------------------------------------------------------------------
#
# A file that both processes have open, in memory where there is such a thing. What the child wrote stays readable
# however it ends, which a message that was not sent yet would not.
#
#     0        8       12
#     │ beat   │ size  │ ids of the requests in the steps in flight │

BEAT_BYTES = 8
SIZE_BYTES = 4

_encode_ids = msgspec.msgpack.Encoder().encode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


def make_notes() -> int:
    """The file's descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("segue-notes")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Notes:
    """What the child writes there."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._ids: list[str] = []
        self._num_beats = 0

    def write(self, ids: list[str]) -> None:
        if ids != self._ids:
            self._ids = ids
            text = _encode_ids(ids)
            os.pwrite(self._file, len(text).to_bytes(SIZE_BYTES, "little") + text, BEAT_BYTES)

    def beat(self) -> None:
        """Any thread: the process still moves."""
        self._num_beats += 1
        os.pwrite(self._file, self._num_beats.to_bytes(BEAT_BYTES, "little"), 0)


def read_notes(file: int) -> list[str]:
    """What the child wrote last; nothing, if that is not complete."""
    size = int.from_bytes(os.pread(file, SIZE_BYTES, BEAT_BYTES), "little")
    try:
        return _decode_ids(os.pread(file, size, BEAT_BYTES + SIZE_BYTES))
    except msgspec.DecodeError:
        return []


def read_beat(file: int) -> int:
    """How often the child has beaten."""
    return int.from_bytes(os.pread(file, BEAT_BYTES, 0), "little")
