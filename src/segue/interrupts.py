"""Ctrl-C that does not cut a step of the engine in two."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Holds SIGINT back while a block runs, then handles it. A second one is handled at once: it means that
    the block hangs. Does nothing outside the main thread, where signals do not arrive."""

    def __init__(self) -> None:
        self._caught: tuple[int, FrameType | None] | None = None
        self._previous: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        assert self._previous is not None
        self._caught = (number, frame)
        signal.signal(signal.SIGINT, self._previous)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self._caught is not None:
            self._previous(*self._caught)
