"""What front ends need of an engine, wherever it runs: `Engine` and `EngineProcess` both have it."""

from concurrent.futures import Future
from typing import Literal, Protocol

from segue.contract.reports import EngineOutput, EngineSnapshot, EngineStats
from segue.engine.config import EngineConfig
from segue.engine.submission import Intake, Submission, TokenIds
from segue.sample.params import SamplingParams

EngineState = Literal["running", "restarting", "dead"]


class EngineClient(Protocol):
    """The engine's own interface; see `Engine` for what the calls mean. One thread calls, except for `wake`. No call
    waits for a step that runs elsewhere.

    Every call may raise EngineDead when the engine runs in another process, which may have ended. There, what only
    the engine can check (whether a history has so many tokens) is not raised by the call: the request fails, and an
    output says so.
    """

    @property
    def config(self) -> EngineConfig: ...

    @property
    def intake(self) -> Intake:
        """Any thread may ask it for the submissions, chunks and ids that the calls below take."""
        ...

    @property
    def state(self) -> EngineState:
        """Any thread may ask. While it is "restarting", calls are taken and carried out later. A "dead" one whose
        calls do not raise EngineDead refuses requests by outputs, and may yet run again."""
        ...

    def check_alive(self) -> None:
        """Any thread may ask. Raises EngineDead while the state is "dead"."""
        ...

    @property
    def stats(self) -> EngineStats:
        """After the last step. Waits for nothing."""
        ...

    def add_request(self, submission: Submission) -> None: ...

    def add_chunk(self, request_id: str, token_ids: TokenIds, params: SamplingParams | None) -> None: ...

    def truncate(self, request_id: str, num_tokens: int) -> None: ...

    def fork(
        self, request_id: str, new_request_id: str, num_tokens: int | None = None, *, default_seed: int
    ) -> None: ...

    def end_input(self, request_id: str) -> None: ...

    def abort_request(self, request_id: str) -> None: ...

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> list[EngineOutput]: ...

    def wake(self) -> None:
        """Let a `step` that waits in another thread return early."""
        ...

    def reset_prefix_cache(self) -> None: ...

    def ask_snapshot(self, request_id: str | None = None) -> "Future[EngineSnapshot]":
        """Answered at once, or by a later `step`."""
        ...

    def close(self) -> None: ...
