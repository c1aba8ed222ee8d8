"""The engine in a process of its own, so that JSON, tokenising and a busy event loop never hold up a step.

    EngineProcess                     child.py
      calls                 ──ipc──▶  Engine: the calls, in order, between two steps
      step() → outputs      ◀──ipc──  what each step brought, and how many calls came before it
      pipe, never written   ──────▶   stdin: at its end the parent is gone, and the child ends

Calls go one way. Nobody waits for a step: statistics come with what each step brought, and a question is answered
by a later `step`.
"""

import itertools
import pickle
import weakref
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec

from segue.contract.reports import EngineOutput, EngineSnapshot, EngineStats
from segue.engine.submission import Intake, Submission, TokenIds
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
        self._is_open: dict[str, bool] = {}
        """The unfinished requests, and whether more input may come. What comes from others was under way when they
        were aborted."""
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
        self.intake = Intake(ready.config, ready.vocab_size)
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

    def add_request(self, submission: Submission) -> None:
        """As `Engine.add_request`, with the same errors."""
        self._check_unused(submission.request_id)
        self._call("add_request", submission)
        self._is_open[submission.request_id] = submission.resumable

    def add_chunk(self, request_id: str, token_ids: TokenIds, params: SamplingParams | None) -> None:
        """As `Engine.add_chunk`."""
        self._check_open(request_id)
        self._call("add_chunk", request_id, token_ids, params)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """As `Engine.truncate`, but more tokens than there are fail the request."""
        self._check_open(request_id)
        self._call("truncate", request_id, num_tokens)

    def fork(
        self, request_id: str, new_request_id: str, num_tokens: int | None = None, *, default_seed: int
    ) -> None:
        """As `Engine.fork`, but more tokens than there are fail the new request."""
        self._check_open(request_id)
        self._check_unused(new_request_id)
        self._call("fork", request_id, new_request_id, num_tokens, default_seed)
        self._is_open[new_request_id] = True

    def end_input(self, request_id: str) -> None:
        """As `Engine.end_input`."""
        self._check_open(request_id)
        self._is_open[request_id] = False
        self._call("end_input", request_id)

    def abort_request(self, request_id: str) -> None:
        """As `Engine.abort_request`."""
        if self._is_open.pop(request_id, None) is not None:
            self._call("abort_request", request_id)

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._is_open:
            raise ParameterError("request_id", request_id, "is in use by an unfinished request")

    def _check_open(self, request_id: str) -> None:
        if not self._is_open.get(request_id, False):
            raise ParameterError("request_id", request_id, "is no request with open input")

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
        """False when the request was aborted meanwhile."""
        if output.request_id not in self._is_open:
            return False
        if output.finished:
            del self._is_open[output.request_id]
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
        if request_id is not None and request_id not in self._is_open:
            answer.set_result(EngineSnapshot(requests=[], cached_blocks=[]))
            return answer
        number = next(self._numbers)
        self._questions[number] = answer
        self._connection.send(wire.AskSnapshot(number, request_id))
        return answer

    def _answer(self, message: wire.Snapshot) -> None:
        known = [each for each in message.snapshot.requests if each.request_id in self._is_open]
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

    def _call(self, method: str, *arguments: object) -> None:
        self._check_alive()
        self._connection.send(wire.CALL_TYPES[method](*arguments))
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
