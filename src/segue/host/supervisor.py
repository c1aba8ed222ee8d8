"""A connection that outlives its engine: another one is started, and callers see no more than a pause.

    running ──it ends──▶ pause ──▶ starting ──loaded──▶ on trial? ──▶ running
                                    what the journal holds is told to the new engine; it goes on from there

A request may be why the engine ends. Of the requests in flight at two ends in a row, without anything said in
between, the only one is refused; several are put on trial: each is computed alone until it has said something, and
the one that ends the engine then is refused.

An engine that cannot be started is given up after so many times; or, where there is to be no end to it, those who
wait are refused then, and it is tried again with growing pauses.
"""

import logging
import pickle
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from segue.contract.reports import EngineOutput, EngineStats, FinishReason
from segue.errors import EngineDead
from segue.host import wire
from segue.host.client import EngineState
from segue.host.connection import Connection, Waker
from segue.host.journal import Journal

if TYPE_CHECKING:
    from segue.args import EngineArgs

log = logging.getLogger("segue.engine")

DEFAULT_MAX_RESTARTS = 5
MAX_STRIKES = 2
"""A request that was in flight at so many ends, and said nothing in between, is suspected."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 30.0
STABLE_S = 10.0
"""An engine that has run for so long did not end because it was started."""


class _Phase(Enum):
    FIRST_START = auto()
    """Whatever goes wrong is the caller's to know."""
    RUNNING = auto()
    PAUSE = auto()
    """Until the next try. Calls are only noted, as in the two phases that follow."""
    STARTING = auto()
    """The engine is loading the model."""
    TRIAL = auto()
    """The engine computes one suspected request."""
    OVER = auto()


class RestartingConnection:
    """A `Connection` over others, one after the other. Open requests go on in the next one with the same bits."""

    def __init__(
        self,
        connect: "Callable[[EngineArgs], Connection]",
        args: "EngineArgs",
        *,
        max_restarts: int | None = DEFAULT_MAX_RESTARTS,
        waker: Waker,
    ) -> None:
        """It is over when the engine has ended more than `max_restarts` times in a row without having said anything;
        None: never. Raises EngineDead when none can be started now."""
        self.num_restarts = 0
        self._connect = connect
        self._args = args
        self._max_restarts = max_restarts
        self._waker = waker
        self._phase = _Phase.FIRST_START
        self._inner = connect(args)
        self._journal: Journal
        self._stats: EngineStats
        """Of the engine's last progress; these two are there once the first one is loaded."""
        self._said: deque[wire.FromChild] = deque()
        """What is said here, not by the engine."""
        self._questions: dict[int, wire.AskSnapshot] = {}
        """Not answered yet."""
        self._trouble: str | None = None
        """Why it does not start."""
        self._not_loaded: str | None = None
        """What the engine says why it cannot load the model."""
        self._num_in_row = 0
        """How often it has ended since it said something."""
        self._resume_s = 0.0
        """When the pause is over, by the monotonic clock; and when the engine was loaded:"""
        self._loaded_s = 0.0
        self._strikes: dict[str, int] = {}
        """By request id: at how many ends it was in flight, since it said something."""
        self._suspects: deque[str] = deque()
        """To be tried."""
        self._on_trial: str | None = None
        self._untold: list[str] = []
        """Requests that the engine has not been told of yet."""
        self._num_resubmitted = 0
        """Calls that the engine was told first, which were confirmed before or are no caller's own."""
        self._num_confirmed_before = 0
        """How many calls were confirmed when the engine was loaded."""

    # --- the connection ---------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        if self._phase is _Phase.OVER or self._trouble is not None:
            return "dead"
        return "running" if self._phase in (_Phase.FIRST_START, _Phase.RUNNING) else "restarting"

    @property
    def trouble(self) -> str | None:
        return self._trouble

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, wire.AskSnapshot):
            self._questions[message.number] = message
        else:
            self._journal.told(message)
            if self._trouble is not None:
                self._refuse_all(self._trouble)
        if self._phase is _Phase.RUNNING:
            self._inner.send(message)

    def poll(self, timeout_s: float) -> wire.FromChild | None:
        if self._said:
            return self._said.popleft()
        if self._phase is _Phase.PAUSE:
            self._wait_out_pause(timeout_s)
            return None
        message = self._inner.poll(timeout_s)
        if message is not None:
            return self._take(message)
        why = self._inner.end()
        if why is not None and self._phase not in (_Phase.FIRST_START, _Phase.OVER):
            self._ended(why)
        return None

    def end(self) -> str | None:
        if self._phase is _Phase.FIRST_START:
            return self._inner.end()
        return self._trouble if self._phase is _Phase.OVER else None

    def ids_in_flight(self) -> list[str]:
        return self._inner.ids_in_flight()

    def close(self) -> None:
        if self._phase is not _Phase.OVER:
            self._phase, self._trouble = _Phase.OVER, "the engine was closed"
        self._inner.close()

    def _take(self, message: wire.FromChild) -> wire.FromChild | None:
        match message:
            case wire.Ready():
                self._stats = message.stats
                if self._phase is not _Phase.FIRST_START:
                    self._resubmit()
                    return None
                # The next engine must not choose anew what depends on the memory that is free.
                config = message.config
                self._args = msgspec.structs.replace(
                    self._args, num_kv_blocks=config.num_kv_blocks, max_model_len=config.max_model_len
                )
                self._journal = Journal(config)
                self._loaded_s = time.monotonic()
                self._phase = _Phase.RUNNING
            case wire.NotLoaded() if self._phase is not _Phase.FIRST_START:
                self._not_loaded = f"the model could not be loaded again: {pickle.loads(message.error)}"
                return None
            case wire.Progress():
                self._stats = message.stats
                progress = self._confirmed(message)
                self._end_trial(message)
                return progress
            case wire.Snapshot():
                self._questions.pop(message.number)
        return message

    def _confirmed(self, progress: wire.Progress) -> wire.Progress:
        """The journal takes it in; the same with the calls counted as this object's caller does."""
        num_confirmed = self._num_confirmed_before + max(0, progress.num_carried_out - self._num_resubmitted)
        self._journal.progress(num_confirmed, progress.outputs)
        for output in progress.outputs:
            self._strikes.pop(output.request_id, None)
        if not progress.has_unfinished and self._phase is _Phase.RUNNING:
            self._strikes.clear()
        if progress.outputs:
            self._num_in_row = 0
        return msgspec.structs.replace(
            progress,
            num_carried_out=num_confirmed,
            has_unfinished=progress.has_unfinished or self._phase is _Phase.TRIAL,
        )

    # --- the engine's end -------------------------------------------------------------------------------------

    def _ended(self, why: str) -> None:
        why, self._not_loaded = self._not_loaded or why, None
        if self._phase is _Phase.RUNNING and time.monotonic() - self._loaded_s > STABLE_S:
            self._num_in_row = 0
        self._accuse(self._inner.ids_in_flight())
        self._inner.close()
        self._try_again(why)

    def _try_again(self, why: str) -> None:
        """Unless this was the last time."""
        self._num_in_row += 1
        most = DEFAULT_MAX_RESTARTS if self._max_restarts is None else self._max_restarts
        if self._num_in_row > most:
            self._trouble = f"{why} (it has been started again {most} times in a row)"
            if self._max_restarts is not None:
                self._phase = _Phase.OVER
                log.error("%s; it is given up", why)
                return
            self._refuse_all(self._trouble)
        pause_s = 0.0
        if self._num_in_row > 1:
            pause_s = min(FIRST_PAUSE_S * 2 ** min(self._num_in_row - 2, 20), MAX_PAUSE_S)
        log.warning("%s; it is started again%s", why, f" in {pause_s:g} s" if pause_s else "")
        self._phase, self._resume_s = _Phase.PAUSE, time.monotonic() + pause_s

    def _wait_out_pause(self, timeout_s: float) -> None:
        left_s = self._resume_s - time.monotonic()
        if left_s > 0:
            self._waker.wait(min(timeout_s, left_s))
            return
        self.num_restarts += 1
        try:
            self._inner = self._connect(self._args)
        except EngineDead as error:
            self._try_again(str(error))
        else:
            self._phase = _Phase.STARTING

    def _accuse(self, in_flight: list[str]) -> None:
        """Who was in flight may be why. Refuses the one of whom it is certain."""
        for each in in_flight:
            self._journal.was_carried_out(each)
            self._strikes[each] = self._strikes.get(each, 0) + 1
        guilty = in_flight[0] if len(in_flight) == 1 else self._on_trial
        if guilty in in_flight and self._strikes[guilty] >= MAX_STRIKES:
            num_ends = self._strikes[guilty]
            self._refuse(
                [guilty], f"the engine's process ended {num_ends} times while it computed this request"
            )
            self._num_in_row = 0
        self._on_trial = None

    def _refuse_all(self, why: str) -> None:
        self._refuse(self._journal.unfinished, why)

    def _refuse(self, request_ids: list[str], why: str) -> None:
        refusals = []
        for request_id in request_ids:
            self._strikes.pop(request_id, None)
            self._journal.refuse(request_id)
            refusals.append(
                EngineOutput(
                    request_id=request_id, finish_reason=FinishReason.ERROR, finished=True, error=why
                )
            )
        if refusals:
            self._say(refusals, has_unfinished=bool(self._journal.requests))

    def _say(self, outputs: list[EngineOutput], *, has_unfinished: bool) -> None:
        self._said.append(wire.Progress(outputs, self._journal.num_confirmed, has_unfinished, self._stats))

    # --- the next engine --------------------------------------------------------------------------------------

    def _resubmit(self) -> None:
        """The engine is loaded: bring it to where the last one was."""
        self._loaded_s = time.monotonic()
        self._trouble = None
        self._journal.start_over()
        self._num_confirmed_before = self._journal.num_confirmed
        self._num_resubmitted = 0
        self._untold = list(self._journal.requests)
        self._suspects = deque(each for each in self._untold if self._strikes.get(each, 0) >= MAX_STRIKES)
        log.warning("the engine runs again; %d open requests go on", len(self._untold))
        self._go_on()

    def _go_on(self) -> None:
        """Try the next suspect; when there is none, tell the rest."""
        if self._suspects:
            self._phase, self._on_trial = _Phase.TRIAL, self._suspects.popleft()
            self._tell(self._on_trial)
            return
        self._on_trial = None
        for request_id in [each for each in self._untold if each in self._journal.requests]:
            self._tell(request_id)
        unconfirmed = self._journal.unconfirmed
        for message in (*unconfirmed, *self._questions.values()):
            self._inner.send(message)
        self._phase = _Phase.RUNNING
        # Where it begins; and an engine that has nothing to do will not say that all was carried out.
        self._say([], has_unfinished=bool(self._journal.requests or unconfirmed))

    def _tell(self, request_id: str) -> None:
        self._untold.remove(request_id)
        for call in self._journal.requests[request_id].calls():
            self._inner.send(call)
            self._num_resubmitted += 1

    def _end_trial(self, progress: wire.Progress) -> None:
        """The one on trial has said something, or there was nothing for it to say."""
        if self._on_trial is None:
            return
        if progress.has_unfinished and all(each.request_id != self._on_trial for each in progress.outputs):
            return
        self._strikes.pop(self._on_trial, None)
        self._go_on()
