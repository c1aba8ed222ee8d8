"""The engine in a process that is started again when it ends, without its callers seeing more than a pause.

    running ──the child ends──▶ starting ──loaded──▶ on trial? ──▶ running
                                    what the journal holds is told to the new child; it goes on from there

A request may be why the child ends. Of the requests in flight at two ends in a row, without anything said in
between, the only one is refused; several are put on trial: each is computed alone until it has said something, and
the one that ends the child then is refused.
"""

import contextlib
import time
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, NoReturn

import msgspec

from segue.engine import wire
from segue.engine.client import EngineState
from segue.engine.journal import Journal
from segue.engine.outputs import EngineOutput, FinishReason
from segue.engine.process import EngineProcess
from segue.errors import EngineDead

if TYPE_CHECKING:
    from segue.args import EngineArgs

DEFAULT_MAX_RESTARTS = 5
MAX_STRIKES = 2
"""A request that was in flight at so many ends, and said nothing in between, is suspected."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0
STABLE_S = 10.0
"""A child that has run for so long did not end because it was started."""


class _Phase(Enum):
    FIRST_START = auto()
    """Whatever goes wrong is the caller's to know."""
    RUNNING = auto()
    STARTING = auto()
    """The child is loading the model. Calls are only noted."""
    TRIAL = auto()
    """The child computes one suspected request. Calls are only noted."""
    OVER = auto()


class SupervisedEngine(EngineProcess):
    """An `EngineProcess` that outlives its child. Open requests go on in the next one with the same bits."""

    def __init__(self, args: "EngineArgs", *, max_restarts: int = DEFAULT_MAX_RESTARTS) -> None:
        """Raises what loading the model raises, and EngineDead. Later EngineDead is raised when the child has ended
        more than `max_restarts` times in a row without having said anything."""
        self._phase = _Phase.FIRST_START
        self._max_restarts = max_restarts
        self._num_in_row = 0
        """How often it has ended since it said something."""
        self._ids_in_flight: list[str] = []
        """When it ended last."""
        self._strikes: dict[str, int] = {}
        """By wire id: at how many ends it was in flight, since it said something."""
        self._suspects: deque[str] = deque()
        """To be tried."""
        self._on_trial: str | None = None
        self._untold: list[str] = []
        """Requests that the child has not been told of yet."""
        self._loaded_s = time.monotonic()
        """When the child was ready, by the monotonic clock."""
        self._num_resubmitted = 0
        """Calls that the child was told first, which were confirmed before or are no caller's own."""
        self._num_confirmed_before = 0
        """How many calls were confirmed when the child was loaded."""
        super().__init__(args)
        # The next child must not choose anew what depends on the memory that is free.
        self._args = msgspec.structs.replace(
            args, num_kv_blocks=self.config.num_kv_blocks, max_model_len=self.config.max_model_len
        )
        self._journal = Journal(self.config)
        self._phase = _Phase.RUNNING

    # --- as the caller sees it --------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        match self._phase:
            case _Phase.STARTING | _Phase.TRIAL:
                return "restarting"
            case _Phase.OVER:
                return "dead"
            case _:
                return "running"

    def has_unfinished_requests(self) -> bool:
        return self.state == "restarting" or super().has_unfinished_requests()

    def step(self) -> list[EngineOutput]:
        """As for `EngineProcess`; nothing while the child is being started again."""
        try:
            return super().step()
        except EngineDead as error:
            self._start_again(error)
            return []

    def close(self) -> None:
        self._phase = _Phase.OVER
        super().close()

    # --- messages ---------------------------------------------------------------------------------------------

    def _send(self, message: msgspec.Struct) -> None:
        if self._phase is _Phase.FIRST_START:
            super()._send(message)
            return
        self._check_alive()
        self._num_sent += 1
        self._journal.told(message)
        if self._phase is _Phase.RUNNING:
            try:
                self._transmit(message)
            except EngineDead as error:
                self._start_again(error)

    def _answer(self) -> wire.Answer:
        while True:
            try:
                return super()._answer()
            except EngineDead as error:
                self._start_again(error)

    def _take(self, message: object) -> None:
        match message:
            case wire.Connected():
                self._child.remove_files()
                self._transmit(wire.Start(msgspec.to_builtins(self._args)))
            case wire.Ready():
                self._resubmit()
            case wire.NotLoaded():
                self._die("the model could not be loaded again")
            case wire.Progress():
                super()._take(self._confirmed(message))
                self._end_trial(message)
            case wire.Stats() | wire.Metrics() | wire.Snapshot():
                self._journal.answered()
                super()._take(message)
            case _:
                super()._take(message)

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
        has_unfinished = progress.has_unfinished or self._phase is _Phase.TRIAL
        return wire.Progress(progress.outputs, num_confirmed, has_unfinished)

    # --- the child's end --------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        try:
            super()._check_alive()
        except EngineDead as error:
            self._start_again(error)

    def _die(self, why: str) -> NoReturn:
        self._ids_in_flight = self._child.ids_in_flight()
        super()._die(why)

    def _start_again(self, error: EngineDead) -> None:
        """The child has ended. Raises the error when there is to be no other."""
        if self._phase in (_Phase.FIRST_START, _Phase.OVER):
            raise error
        if self._phase is _Phase.RUNNING and time.monotonic() - self._loaded_s > STABLE_S:
            self._num_in_row = 0
        self._accuse()
        self._phase = _Phase.STARTING
        while True:
            self._num_in_row += 1
            if self._num_in_row > self._max_restarts:
                self._phase = _Phase.OVER
                self._dead = f"{error} (it has been started again {self._max_restarts} times in a row)"
                raise EngineDead(self._dead)
            if self._num_in_row > 1:
                time.sleep(min(FIRST_PAUSE_S * 2 ** (self._num_in_row - 2), MAX_PAUSE_S))
            with contextlib.suppress(EngineDead):
                self._start_child()
                return

    def _accuse(self) -> None:
        """Who was in flight may be why. Refuses the one of whom it is certain."""
        in_flight, self._ids_in_flight = self._ids_in_flight, []
        for each in in_flight:
            self._journal.was_carried_out(each)
            self._strikes[each] = self._strikes.get(each, 0) + 1
        guilty = in_flight[0] if len(in_flight) == 1 else self._on_trial
        if guilty in in_flight and self._strikes[guilty] >= MAX_STRIKES:
            self._refuse(guilty)
        self._on_trial = None

    def _refuse(self, wire_id: str) -> None:
        text = f"the engine's process ended {self._strikes.pop(wire_id)} times while it computed this request"
        self._journal.refuse(wire_id)
        self._num_in_row = 0
        refusal = EngineOutput(
            request_id=wire_id, finish_reason=FinishReason.ERROR, finished=True, error=text
        )
        self._progress.append(
            wire.Progress([refusal], self._journal.num_confirmed, bool(self._journal.requests))
        )

    # --- the next child ---------------------------------------------------------------------------------------

    def _resubmit(self) -> None:
        """The child is loaded: bring it to where the last one was."""
        self._loaded_s = time.monotonic()
        self._journal.start_over()
        self._num_confirmed_before = self._journal.num_confirmed
        self._num_resubmitted = 0
        self._untold = list(self._journal.requests)
        self._suspects = deque(each for each in self._untold if self._strikes.get(each, 0) >= MAX_STRIKES)
        self._go_on()

    def _go_on(self) -> None:
        """Try the next suspect; when there is none, tell the rest."""
        if self._suspects:
            self._phase, self._on_trial = _Phase.TRIAL, self._suspects.popleft()
            self._tell(self._on_trial)
            return
        self._on_trial = None
        for wire_id in [each for each in self._untold if each in self._journal.requests]:
            self._tell(wire_id)
        unconfirmed = self._journal.unconfirmed
        for call in unconfirmed:
            self._transmit(call)
        self._phase = _Phase.RUNNING
        self._has_unfinished = bool(self._journal.requests)
        if not self._journal.requests and not unconfirmed:
            # The child has nothing to do, and so will not say that all was carried out.
            self._progress.append(wire.Progress([], self._journal.num_confirmed, False))

    def _tell(self, wire_id: str) -> None:
        self._untold.remove(wire_id)
        for call in self._journal.requests[wire_id].calls():
            self._transmit(call)
            self._num_resubmitted += 1

    def _end_trial(self, progress: wire.Progress) -> None:
        """The one on trial has said something, or there was nothing for it to say."""
        if self._on_trial is None:
            return
        if progress.has_unfinished and all(each.request_id != self._on_trial for each in progress.outputs):
            return
        self._strikes.pop(self._on_trial, None)
        self._go_on()
