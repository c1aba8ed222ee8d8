"""`EngineLoop`: an engine on a thread of its own, for callers on event loops.

    event loop                          │ engine thread
    open, add_chunk, truncate, abort … ─┼─▶ queue ─▶ client commands, in order
                                        │            client.step()
    handler(output), one batch a step ◀─┼─ call_soon_threadsafe ◀─ outputs, by request

A `Channel` is one request's line: commands go out in the order of the calls, outputs come to its handler.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from segue.contract.reports import EngineOutput, EngineSnapshot, EngineStats, FinishReason
from segue.engine.submission import Submission
from segue.errors import EngineDead, ParameterError, UsageError
from segue.host.client import EngineClient, EngineState
from segue.sample.params import SamplingParams

Handler = Callable[[EngineOutput | EngineDead], None]
"""Takes a request's outputs as they come. EngineDead is the last thing it gets."""

IDLE_CHECK_S = 0.5
"""How often an engine without work is asked whether it still lives."""

log = logging.getLogger("segue.engine")

T = TypeVar("T")


class Channel:
    """One request's line to the engine. Any thread may call.

    A command that the engine refuses fails the request: its handler gets an output with `FinishReason.ERROR`. A chunk
    that does not fit after the history is only left out, and the output is not `finished`. Nothing comes after an
    output that is `finished`, after `abort`, or after EngineDead.
    """

    def __init__(
        self,
        loop: "EngineLoop",
        request_id: str,
        handler: Handler,
        event_loop: asyncio.AbstractEventLoop,
        *,
        on_engine_thread: bool,
    ) -> None:
        self.request_id = request_id
        self.event_loop = event_loop
        self.is_open = True
        """Until the request has finished, was aborted, or the engine died; its last output may still be on its way."""
        self._silent = False
        self._loop = loop
        self._handler = handler
        self._on_engine_thread = on_engine_thread

    def start(self, submission: Submission) -> None:
        """The first command. Raises EngineDead; then nothing was started."""
        assert submission.request_id == self.request_id
        self._check_open()
        self._loop.open_command(self, lambda: self._loop.client.add_request(submission))

    def add_chunk(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        """More input; without `params` it is only prefilled. Raises ParameterError, CapacityError, EngineDead."""
        self._check_open()
        ids = self._loop.intake.chunk(token_ids, params)
        self._loop.command(self, lambda: self._loop.client.add_chunk(self.request_id, ids, params))

    def truncate(self, num_tokens: int) -> None:
        """Cut the history to its first `num_tokens` tokens; a running turn ends with `FinishReason.ABORT`."""
        self._check_open()
        self._loop.command(self, lambda: self._loop.client.truncate(self.request_id, num_tokens))

    def fork(
        self,
        handler: Handler,
        *,
        name: str | None = None,
        num_tokens: int | None = None,
        on_engine_thread: bool = False,
    ) -> "Channel":
        """Another resumable request that starts with the first `num_tokens` tokens (None: all) of the history."""
        self._check_open()
        intake, client = self._loop.intake, self._loop.client
        new = self._loop.register(intake.new_id(name), handler, on_engine_thread=on_engine_thread)
        seed = intake.next_seed()
        self._loop.open_command(
            new, lambda: client.fork(self.request_id, new.request_id, num_tokens, default_seed=seed)
        )
        return new

    def end_input(self) -> None:
        """No more chunks will come: the request finishes when the queued ones are answered."""
        if self.is_open:
            with contextlib.suppress(EngineDead):  # of which the handler hears
                self._loop.command(self, lambda: self._loop.client.end_input(self.request_id))

    def abort(self) -> None:
        """Drop the request. An ended one is left alone."""
        self._silent = True
        if self.is_open:
            self._loop.release(self)
            self._loop.abort_command(self)

    def post(self, callback: Callable[[], object]) -> None:
        """From a handler on the engine thread: run this on the event loop, together with what else this step brings."""
        self._loop.post(self, callback)

    def deliver(self, output: EngineOutput | EngineDead) -> None:
        """Engine thread: hand an output to the handler."""
        if self._on_engine_thread:
            self._handler(output)
        else:
            self.post(partial(self._receive, output))

    def _receive(self, output: EngineOutput | EngineDead) -> None:
        if not self._silent:
            self._handler(output)

    def _check_open(self) -> None:
        self._loop.check_alive()
        if not self.is_open:
            raise ParameterError("request_id", self.request_id, "is no request with open input")


class EngineLoop:
    """Owns an engine and the thread that steps it. Any thread may call."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        """Outside the engine thread, only what any thread may ask."""
        self.intake = client.intake
        self._stats = client.stats
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # reentrant, for destructors
        self._open: dict[str, Channel] = {}
        """By request id; under the lock."""
        self._calls: set[Future[Any]] = set()
        """Not answered yet."""
        self._dead: EngineDead | None = None
        """Set once, under the lock."""
        self._routes: dict[str, Channel] = {}
        """Where outputs go, as the engine sees it; engine thread only, like the ones below."""
        self._posts: dict[asyncio.AbstractEventLoop, list[Callable[[], object]]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="segue-engine", daemon=True)
        self._thread.start()

    # --- any thread -------------------------------------------------------------------------------------------

    def open(self, submission: Submission, handler: Handler, *, on_engine_thread: bool = False) -> Channel:
        """Start a request of `intake`, from a running event loop, on which its handler is called; on the engine thread
        with `on_engine_thread`. Raises ParameterError when its id is in use, and EngineDead; then nothing was started.
        """
        channel = self.register(submission.request_id, handler, on_engine_thread=on_engine_thread)
        try:
            channel.start(submission)
        except BaseException:
            self.release(channel)
            raise
        return channel

    def register(self, request_id: str, handler: Handler, *, on_engine_thread: bool = False) -> Channel:
        """A channel whose request is started later. Its id is taken: ParameterError if it was already."""
        event_loop = asyncio.get_running_loop()
        with self._lock:
            self.check_alive()
            if request_id in self._open:
                raise ParameterError("request_id", request_id, "is in use by an unfinished request")
            channel = Channel(self, request_id, handler, event_loop, on_engine_thread=on_engine_thread)
            self._open[request_id] = channel
        return channel

    def call(self, function: Callable[[EngineClient], T]) -> "Future[T]":
        """Run this on the engine thread, between steps, after the commands before it."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self.client))
            except BaseException as error:
                future.set_exception(error)
                if isinstance(error, EngineDead):
                    raise

        with self._lock:
            if self._dead is not None:
                future.set_exception(EngineDead(str(self._dead)))
            else:
                self._calls.add(future)
                future.add_done_callback(self._calls.discard)
                self._put(run)
        return future

    def ask_snapshot(self, request_id: str | None = None) -> "Future[EngineSnapshot]":
        """As `EngineClient.ask_snapshot`, after the commands before it."""
        answer: Future[EngineSnapshot] = Future()

        def pass_on(source: "Future[EngineSnapshot]") -> None:
            if not answer.set_running_or_notify_cancel():
                return
            error = source.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(source.result())

        def asked(question: "Future[Future[EngineSnapshot]]") -> None:
            error = question.exception()
            if error is None:
                question.result().add_done_callback(pass_on)
            elif answer.set_running_or_notify_cancel():
                answer.set_exception(error)

        self.call(lambda client: client.ask_snapshot(request_id)).add_done_callback(asked)
        return answer

    @property
    def stats(self) -> EngineStats:
        """Where the engine stood after its last step. Raises EngineDead."""
        if self._dead is not None:
            raise EngineDead(str(self._dead))
        return self._stats

    def close(self) -> None:
        """Drop all requests and give back the engine. Waits for a step that runs in this process, for none in another.
        May be called again."""
        with self._lock:
            if self._dead is None:
                self._put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def state(self) -> EngineState:
        """Whether requests are answered, will be in a moment, or never again."""
        return self.client.state if self._dead is None else "dead"

    def check_alive(self) -> None:
        """Raises EngineDead if no request can be answered now."""
        if self._dead is not None:
            raise EngineDead(str(self._dead))
        self.client.check_alive()

    # --- for channels -----------------------------------------------------------------------------------------

    def release(self, channel: Channel) -> None:
        """The channel's request has ended: its id may be used again."""
        with self._lock:
            channel.is_open = False
            if self._open.get(channel.request_id) is channel:
                del self._open[channel.request_id]

    def open_command(self, channel: Channel, command: Callable[[], None]) -> None:
        """Queue the command that starts the channel's request."""

        def run() -> None:
            self._routes[channel.request_id] = channel
            self._carry_out(channel, command)

        self._queue(run)

    def command(self, channel: Channel, command: Callable[[], None]) -> None:
        """Queue a command about the channel's request."""

        def run() -> None:
            if self._routes.get(channel.request_id) is channel:
                self._carry_out(channel, command)

        self._queue(run)

    def abort_command(self, channel: Channel) -> None:
        """Queue the abort of the channel's request."""
        with contextlib.suppress(EngineDead):
            self._queue(partial(self._abort, channel))

    def post(self, channel: Channel, callback: Callable[[], object]) -> None:
        """Engine thread: run a callback on the channel's event loop, with the batch of this step."""
        self._posts.setdefault(channel.event_loop, []).append(callback)

    def _queue(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._dead is not None:
                raise EngineDead(str(self._dead))
            self._put(command)

    def _put(self, command: Callable[[], None]) -> None:
        """Under the lock, so that nothing is put in a queue that is not read any more."""
        self._commands.put(command)
        self.client.wake()

    # --- engine thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        error = EngineDead("the engine was shut down")
        try:
            while True:
                self._carry_out_commands()
                if self._closing:
                    break
                for output in self.client.step():
                    self._route(output)
                self._stats = self.client.stats
                self._flush()
        except EngineDead as dead:
            error = dead
        except Exception as unexpected:
            error = EngineDead(f"the engine failed: {type(unexpected).__name__}: {unexpected}")
            error.__cause__ = unexpected
        self._die(error)

    def _carry_out_commands(self) -> None:
        """Those that are queued. Waits for one if there is nothing else to do."""
        if not self.client.has_unfinished_requests():
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=IDLE_CHECK_S)()
        for _ in range(self._commands.qsize()):  # those that come meanwhile must not hold up the step
            if not self._closing:
                self._commands.get_nowait()()

    def _carry_out(self, channel: Channel, command: Callable[[], None]) -> None:
        try:
            command()
        except UsageError as error:
            self.client.abort_request(channel.request_id)
            self._route(
                EngineOutput(
                    request_id=channel.request_id,
                    finish_reason=FinishReason.ERROR,
                    finished=True,
                    error=str(error),
                )
            )

    def _abort(self, channel: Channel) -> None:
        if self._routes.get(channel.request_id) is channel:
            del self._routes[channel.request_id]
            self.client.abort_request(channel.request_id)

    def _route(self, output: EngineOutput) -> None:
        channel = self._routes.get(output.request_id)
        if channel is None:
            return
        if output.finished:
            del self._routes[output.request_id]
            self.release(channel)
        self._deliver(channel, output)

    def _deliver(self, channel: Channel, output: EngineOutput | EngineDead) -> None:
        """What a handler raises here is its request's end, and nobody else's."""
        try:
            channel.deliver(output)
        except Exception as error:
            log.error("request %s failed", channel.request_id, exc_info=error)
            self.release(channel)
            self._abort(channel)

    def _flush(self) -> None:
        """Hand this step's callbacks to their event loops, in one call each."""
        posts, self._posts = self._posts, {}
        for event_loop, callbacks in posts.items():
            try:
                event_loop.call_soon_threadsafe(_schedule, event_loop, callbacks)
            except RuntimeError:  # that event loop is closed: nobody waits there any more
                for channel in [each for each in self._routes.values() if each.event_loop is event_loop]:
                    self.release(channel)
                    self._abort(channel)
                    self._deliver(channel, EngineDead("the event loop of the request is closed"))

    def _stop(self) -> None:
        self._closing = True

    def _die(self, error: EngineDead) -> None:
        """Tell everybody who waits, and give back the engine."""
        with self._lock:
            self._dead = error
            channels, calls = list(self._open.values()), list(self._calls)
        # Nothing is queued from here on, and what still is will not be carried out.
        self._routes = {}
        for channel in channels:
            self.release(channel)
            self._deliver(channel, error)
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._flush()
        self.client.close()


def _schedule(event_loop: asyncio.AbstractEventLoop, callbacks: list[Callable[[], object]]) -> None:
    # One by one, so that an exception in one is reported and the others run.
    for callback in callbacks:
        event_loop.call_soon(callback)
