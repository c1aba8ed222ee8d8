"""The messages between an `EngineProcess` and its child, as msgpack.

A call's message has the name and the parameters of the engine's method, so a new method is one name in `CALLS`.
"""

import inspect
import os
from array import array
from functools import reduce
from operator import or_
from typing import Any, get_type_hints

import msgspec
import zmq

from segue.engine.config import EngineConfig
from segue.engine.engine import Engine
from segue.engine.outputs import EngineOutput, EngineSnapshot, EngineStats, RequestMetrics

CALLS = (
    "add_request",
    "add_chunk",
    "truncate",
    "fork",
    "end_input",
    "abort_request",
    "reset_prefix_cache",
    "metrics_of",
    "snapshot",
)
"""Methods of `Engine` that are called from outside; those that return something are answered."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """To the child, when it is connected: the fields of `EngineArgs`."""

    args: dict[str, Any]


class AskStats(msgspec.Struct, frozen=True, tag=True):
    """To the child: answered by `EngineStats`."""


class Connected(msgspec.Struct, frozen=True, tag=True):
    """From the child, first: messages will reach it, and the socket's address is not needed any more."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the child: the model is loaded."""

    config: EngineConfig
    vocab_size: int


class NotLoaded(msgspec.Struct, frozen=True, tag=True):
    """From the child, which then ends: the model cannot be loaded. A pickled SegueError."""

    error: bytes


class Progress(msgspec.Struct, frozen=True, tag=True):
    """From the child, after each step."""

    outputs: list[EngineOutput]
    num_carried_out: int
    """How many messages were carried out before the step."""
    has_unfinished: bool


class Stats(msgspec.Struct, frozen=True, tag=True):
    """From the child: the answer to `AskStats`."""

    stats: EngineStats


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """From the child: the answer to `metrics_of`; None if the engine does not know the request any more."""

    metrics: RequestMetrics | None


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """From the child: the answer to `snapshot`."""

    snapshot: EngineSnapshot


Answer = Stats | Metrics | Snapshot


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


CALL_TYPES = {method: _call_type(method) for method in CALLS}
QUESTIONS = (AskStats, CALL_TYPES["metrics_of"], CALL_TYPES["snapshot"])
"""Answered at once; all other calls by nothing, or by outputs."""

encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
decode_to_child = msgspec.msgpack.Decoder(reduce(or_, CALL_TYPES.values(), Start | AskStats)).decode
decode_from_child = msgspec.msgpack.Decoder(Connected | Ready | NotLoaded | Progress | Answer | Failed).decode


NOTE_HEAD_BYTES = 4

_encode_ids = msgspec.msgpack.Encoder().encode
_decode_ids = msgspec.msgpack.Decoder(list[str]).decode


def pair_socket(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A socket without limits on what is queued: neither process waits for the other to read."""
    pair = context.socket(zmq.PAIR)
    pair.linger = 0
    pair.sndhwm = pair.rcvhwm = 0
    return pair


class Notes:
    """A file in which the child says which requests are in the steps in flight. What was written stays readable
    however the child ends, which a message that was not sent yet would not."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._ids: list[str] = []

    def write(self, ids: list[str]) -> None:
        if ids != self._ids:
            self._ids = ids
            text = _encode_ids(ids)
            os.pwrite(self._file, len(text).to_bytes(NOTE_HEAD_BYTES, "little") + text, 0)


def read_notes(file: int) -> list[str]:
    """What the child wrote last; nothing, if that is not complete."""
    size = int.from_bytes(os.pread(file, NOTE_HEAD_BYTES, 0), "little")
    try:
        return _decode_ids(os.pread(file, size, NOTE_HEAD_BYTES))
    except msgspec.DecodeError:
        return []
