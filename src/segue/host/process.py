"""The engine in a process of its own, so that JSON, tokenising and a busy event loop never hold up a step.

    EngineProcess                     child.py
      calls, checked here   ──ipc──▶  Engine: the calls, in order, between two steps
      step() → outputs      ◀──ipc──  what each step brought, and how many calls came before it
      pipe, never written   ──────▶   stdin: at its end the parent is gone, and the child ends

Calls go one way. Nobody waits for a step: statistics come with what each step brought, and a question is answered
by a later `step`.
"""

import itertools
import pickle
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec

from segue.contract.reports import EngineOutput, EngineSnapshot, EngineStats
from segue.engine.check import check_chunk, check_request
from segue.engine.request import Keep, default_seed
from segue.errors import EngineDead, ParameterError, SegueError
from segue.host import wire
from segue.host.client import EngineState
from segue.host.connection import ChildProcess, Connection, Waker
from segue.host.supervisor import RestartingConnection
from segue.sample.params import SamplingParams

if TYPE_CHECKING:
    from segue.args import EngineArgs

WAIT_S = 0.2
"""The longest that a `step` waits, and how often it looks whether the other process still lives."""


class _Remote(msgspec.Struct, eq=False):
    """An unfinished request of the child's engine."""

    request_id: str
    wire_id: str
    """Never used again, so that outputs that were under way at an abort reach nobody else."""
    input_open: bool
    default_seed: int


class EngineProcess:
    """An engine in a child process; an `EngineClient`.

    The child ends with this object and with this process, however that ends. If the child ends by itself, it is
    started again; see `RestartingConnection`. When there is to be no other, every call raises EngineDead.
    """

    def __init__(self, args: "EngineArgs", *, max_restarts: int | None = 0) -> None:
        """Waits until the model is loaded. Raises what loading it raises, and EngineDead.

        `max_restarts` is how many times in a row the child is started again without it having said anything; None:
        for ever, with growing pauses.
        """
        self._waker = Waker()
        self._release = weakref.finalize(self, self._waker.close)
        self._remotes: dict[str, _Remote] = {}
        """By request id."""
        self._remotes_by_wire: dict[str, _Remote] = {}
        self._num_remotes = 0
        self._num_sent = 0
        """Calls, and of these carried out before the last step that `step` returned:"""
        self._num_carried_out = 0
        self._has_unfinished = False
        """Whether the child had work left after that step."""
        self._questions: dict[int, Future[EngineSnapshot]] = {}
        """Not answered yet, by their number."""
        self._numbers = itertools.count()
        self._dead: str | None = None
        connect = partial(ChildProcess, waker=self._waker)
        self._connection: Connection = (
            connect(args)
            if max_restarts == 0
            else RestartingConnection(connect, args, max_restarts=max_restarts, waker=self._waker)
        )
        try:
            ready = self._load()
        except BaseException:
            self.close()
            raise
        self.config = ready.config
        self.vocab_size = ready.vocab_size
        self._stats = ready.stats

    def _load(self) -> wire.Ready:
        while True:
            message = self._connection.poll(WAIT_S)
            match message:
                case wire.Ready():
                    return message
                case wire.NotLoaded():
                    error = pickle.loads(message.error)
                    assert isinstance(error, SegueError)
                    raise error
                case _:
                    assert message is None, message
                    self._check_alive()

    # --- requests ---------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        resumable: bool = False,
        keep: Keep = "computed",
    ) -> None:
        """As `Engine.add_request`, with the same errors."""
        self._check_unused(request_id)
        ids = check_request(
            self.config, self.vocab_size, prompt_token_ids, params, resumable=resumable, keep=keep
        )
        remote = self._add_remote(request_id, input_open=resumable)
        self._call(
            "add_request",
            request_id=remote.wire_id,
            prompt_token_ids=ids,
            params=_with_seed(params, remote),
            priority=priority,
            cache_salt=cache_salt,
            resumable=resumable,
            keep=keep,
            num_output_tokens=0,
        )

    def add_chunk(self, request_id: str, token_ids: Sequence[int], params: SamplingParams | None) -> None:
        """As `Engine.add_chunk`."""
        remote = self._open_remote(request_id)
        ids = check_chunk(self.config, self.vocab_size, token_ids, params)
        params = _with_seed(params, remote)
        self._call("add_chunk", request_id=remote.wire_id, token_ids=ids, params=params)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """As `Engine.truncate`, but more tokens than there are fail the request."""
        self._call("truncate", request_id=self._open_remote(request_id).wire_id, num_tokens=num_tokens)

    def fork(self, request_id: str, new_request_id: str, num_tokens: int | None = None) -> None:
        """As `Engine.fork`, but more tokens than there are fail the new request."""
        source = self._open_remote(request_id)
        self._check_unused(new_request_id)
        self._call(
            "fork",
            request_id=source.wire_id,
            new_request_id=self._add_remote(new_request_id, input_open=True).wire_id,
            num_tokens=num_tokens,
        )

    def end_input(self, request_id: str) -> None:
        """As `Engine.end_input`."""
        remote = self._open_remote(request_id)
        remote.input_open = False
        self._call("end_input", request_id=remote.wire_id)

    def abort_request(self, request_id: str) -> None:
        """As `Engine.abort_request`."""
        remote = self._remotes.get(request_id)
        if remote is not None:
            self._forget(remote)
            self._call("abort_request", request_id=remote.wire_id)

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._remotes:
            raise ParameterError("request_id", request_id, "is in use by an unfinished request")

    def _open_remote(self, request_id: str) -> _Remote:
        remote = self._remotes.get(request_id)
        if remote is None or not remote.input_open:
            raise ParameterError("request_id", request_id, "is no request with open input")
        return remote

    def _add_remote(self, request_id: str, *, input_open: bool) -> _Remote:
        self._check_alive()
        seed = default_seed(self.config.seed, self._num_remotes)
        remote = _Remote(request_id, str(self._num_remotes), input_open, seed)
        self._num_remotes += 1
        self._remotes[request_id] = self._remotes_by_wire[remote.wire_id] = remote
        return remote

    def _forget(self, remote: _Remote) -> None:
        del self._remotes[remote.request_id]
        del self._remotes_by_wire[remote.wire_id]

    # --- the step ---------------------------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to wait for or to report."""
        return (
            self._has_unfinished
            or self._num_sent > self._num_carried_out
            or bool(self._questions)
            or self.state == "restarting"
        )

    def step(self) -> list[EngineOutput]:
        """Waits for the child's next step, WAIT_S at most, and returns what is new."""
        self._check_alive()
        message = self._connection.poll(WAIT_S if self.has_unfinished_requests() else 0.0)
        match message:
            case wire.Progress():
                self._num_carried_out = message.num_carried_out
                self._has_unfinished = message.has_unfinished
                self._stats = message.stats
                return [output for output in message.outputs if self._take_output(output)]
            case wire.Snapshot():
                self._answer(message)
            case _:
                assert message is None, message
                self._check_alive()
        return []

    def _take_output(self, output: EngineOutput) -> bool:
        """Puts the caller's id in. False when the request was aborted meanwhile."""
        remote = self._remotes_by_wire.get(output.request_id)
        if remote is None:
            return False
        output.request_id = remote.request_id
        if output.finished:
            self._forget(remote)
        return True

    def wake(self) -> None:
        """Lets a `step` that waits in another thread return early."""
        self._waker.wake()

    # --- state ------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """As `Engine.reset_prefix_cache`."""
        self._call("reset_prefix_cache")

    @property
    def state(self) -> EngineState:
        """Any thread may ask."""
        return "dead" if self._dead is not None else self._connection.state

    def check_alive(self) -> None:
        """Any thread may ask. Raises EngineDead while the state is "dead"."""
        if self.state == "dead":
            raise EngineDead(self._dead or self._connection.trouble or "the engine was closed")

    @property
    def stats(self) -> EngineStats:
        """As `Engine.stats`, after the last step that `step` returned."""
        return msgspec.structs.replace(self._stats, num_restarts=self._connection.num_restarts)

    def ask_snapshot(self, request_id: str | None = None) -> "Future[EngineSnapshot]":
        """As `Engine.ask_snapshot`, after all that was sent: answered by a later `step`, or by EngineDead. Requests
        that have ended are left out."""
        self._check_alive()
        answer: Future[EngineSnapshot] = Future()
        remote = self._remotes.get(request_id) if request_id is not None else None
        if request_id is not None and remote is None:
            answer.set_result(EngineSnapshot(requests=[], cached_blocks=[]))
            return answer
        number = next(self._numbers)
        self._questions[number] = answer
        self._connection.send(wire.AskSnapshot(number, remote.wire_id if remote is not None else None))
        return answer

    def _answer(self, message: wire.Snapshot) -> None:
        known = [
            msgspec.structs.replace(each, request_id=self._remotes_by_wire[each.request_id].request_id)
            for each in message.snapshot.requests
            if each.request_id in self._remotes_by_wire
        ]
        answer = self._questions.pop(message.number)
        if answer.set_running_or_notify_cancel():
            answer.set_result(msgspec.structs.replace(message.snapshot, requests=known))

    def close(self) -> None:
        """Ends the child, in the middle of a step if there is one. May be called again."""
        self._dead = self._dead or "the engine was closed"
        self._connection.close()
        self._release()
        questions, self._questions = self._questions, {}
        for answer in questions.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineDead(self._dead))

    # --- messages ---------------------------------------------------------------------------------------------

    def _call(self, method: str, **arguments: object) -> None:
        self._check_alive()
        self._connection.send(wire.CALL_TYPES[method](**arguments))
        self._num_sent += 1

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)
        why = self._connection.end()
        if why is not None:
            self._die(why)

    def _die(self, why: str) -> NoReturn:
        self._dead = why
        self.close()
        raise EngineDead(why)


def _with_seed(params: SamplingParams | None, remote: _Remote) -> SamplingParams | None:
    """The same parameters with the seed that the child would choose: another child would choose another."""
    if params is None or params.seed is not None:
        return params
    return msgspec.structs.replace(params, seed=remote.default_seed)
