"""The program of an `EngineProcess`'s child: an engine that is told what to do by messages."""

import os
import pickle
import select
import signal
import sys
import threading
import traceback

import msgspec
import zmq

from segue.contract.reports import EngineOutput, FinishReason
from segue.errors import SegueError, UsageError
from segue.host import wire
from segue.host.client import EngineClient
from segue.host.journal import subject

BEAT_S = 1.0


def main() -> None:
    """The program: its arguments are the socket's address, the parent's process id and the descriptor of the notes."""
    address, parent_pid, notes = sys.argv[1], int(sys.argv[2]), wire.Notes(int(sys.argv[3]))
    for number in (signal.SIGINT, signal.SIGTERM):  # they mean the parent, which decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent_pid, notes), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pair = wire.pair_socket(context)
    pair.connect(address)
    try:
        _serve(pair, notes)
    except Exception as error:
        traceback.print_exc()
        text = f"the engine failed: {type(error).__name__}: {error}".splitlines()[0]
        pair.send(wire.encode(wire.Failed(text)))
        sys.exit(1)
    finally:
        context.destroy(linger=1000)


def _watch(parent_pid: int, notes: wire.Notes) -> None:
    """Beside the steps: tells that this process moves, and ends it with its parent."""
    # Not PR_SET_PDEATHSIG: that signal comes when the *thread* ends which started this process. stdin ends with the
    # parent, unless a fork of it holds the other end; the parent's id then still tells.
    while os.getppid() == parent_pid:
        notes.beat()
        readable, _, _ = select.select([0], [], [], BEAT_S)
        if readable and not os.read(0, 1):
            break
    os._exit(0)


def _serve(pair: "zmq.Socket[bytes]", notes: wire.Notes) -> None:
    """Loads the model, then carries out calls and steps until the process is ended."""
    from segue.args import EngineArgs
    from segue.engine.engine import Engine
    from segue.host.build import build

    pair.send(wire.encode(wire.Connected()))
    start = wire.decode_to_child(pair.recv())
    assert isinstance(start, wire.Start)
    try:
        engine = build(EngineArgs(**start.args)).engine
    except SegueError as error:
        pair.send(wire.encode(wire.NotLoaded(pickle.dumps(error))))
        return
    assert isinstance(engine, Engine)
    engine.on_plan = notes.write
    pair.send(wire.encode(wire.Ready(engine.config, engine.intake.vocab_size, engine.stats)))
    num_carried_out = 0
    while True:
        outputs: list[EngineOutput] = []
        if not engine.has_unfinished_requests():
            notes.write([])
        for message in _waiting(pair, at_least_one=not engine.has_unfinished_requests()):
            if isinstance(message, wire.AskSnapshot):
                snapshot = engine.snapshot(message.request_id)
                pair.send(wire.encode(wire.Snapshot(message.number, snapshot)))
                continue
            num_carried_out += 1
            refusal = _carry_out(engine, message)
            if refusal is not None:
                outputs.append(refusal)
        outputs += engine.step()
        has_unfinished = engine.has_unfinished_requests()
        pair.send(wire.encode(wire.Progress(outputs, num_carried_out, has_unfinished, engine.stats)))


def _waiting(pair: "zmq.Socket[bytes]", *, at_least_one: bool) -> list[object]:
    """The messages that have come. Later ones come after the next step, so that questions cannot hold it up."""
    messages: list[object] = []
    while pair.poll(None if at_least_one and not messages else 0):
        messages.append(wire.decode_to_child(pair.recv()))
    return messages


def _carry_out(engine: EngineClient, call: object) -> EngineOutput | None:
    """Returns what is to be said if the engine refuses."""
    assert isinstance(call, msgspec.Struct)
    arguments = {name: getattr(call, name) for name in call.__struct_fields__}
    try:
        getattr(engine, type(call).__name__)(**arguments)
    except UsageError as error:
        # The parent has checked what it can, so the history is shorter than it thinks, or the request has just ended.
        # Nobody waits for an answer: the request fails, or it is not known any more and the output goes nowhere.
        request_id = subject(call)
        assert request_id is not None
        engine.abort_request(request_id)
        return EngineOutput(
            request_id=request_id, finish_reason=FinishReason.ERROR, finished=True, error=str(error)
        )
    return None


if __name__ == "__main__":
    main()
