"""An engine that several callers of one thread use: whoever steps it, everybody gets what is theirs."""

from collections.abc import Callable

from segue.contract.reports import EngineOutput
from segue.errors import EngineDead
from segue.host.client import EngineClient
from segue.interrupts import DeferredInterrupt

Handler = Callable[[EngineOutput | EngineDead], object]
"""Takes a request's outputs as they come. EngineDead is the last thing it gets."""


class SharedSteps:
    """Hands each request's outputs to its handler. A request is opened here before the engine hears of it."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._handlers: dict[str, Handler] = {}
        """Of the requests that have not ended."""

    def open(self, request_id: str, handler: Handler) -> None:
        """Its outputs go there, until one is `finished`."""
        self._handlers[request_id] = handler

    def close(self, request_id: str) -> None:
        """Nobody wants its outputs any more."""
        self._handlers.pop(request_id, None)

    def step(self) -> None:
        """One step of the engine, which Ctrl-C does not cut in two. Raises EngineDead, once all have heard of it."""
        with DeferredInterrupt():
            try:
                outputs = self.engine.step()
            except EngineDead as dead:
                handlers, self._handlers = self._handlers, {}
                for handler in handlers.values():
                    handler(dead)
                raise
            for output in outputs:
                wants = self._handlers.get(output.request_id)
                if output.finished:
                    self.close(output.request_id)
                if wants is not None:
                    wants(output)
