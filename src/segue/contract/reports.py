"""What the engine says after a step: new tokens of requests, token ids only."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from segue.contract.step import TokenLogprobs


class FinishReason(StrEnum):
    STOP = "stop"
    """End of sequence, or a stop token (then `stop_reason` is its id)."""
    LENGTH = "length"
    """`max_tokens` or `max_model_len`."""
    ABORT = "abort"
    ERROR = "error"
    """The request failed; or, where the output is not `finished`, a chunk of its input was left out."""


class RequestMetrics(msgspec.Struct, kw_only=True):
    """How a request has been served so far."""

    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when it was first admitted."""
    num_computed_tokens: int = 0
    """Tokens computed for it, recomputed and rejected ones included."""
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Drafts verified."""
    num_accepted_tokens: int = 0
    """Drafts kept."""


class EngineOutput(msgspec.Struct, kw_only=True):
    """One request's news after a step."""

    request_id: str
    token_ids: Sequence[int] = ()
    """New since the last output, the stop token included."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One for each of `token_ids`."""
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """Once, with the first output: one for each prompt token, None for the first."""
    finish_reason: FinishReason | None = None
    """Set when a turn ends. For a request that is not resumable that is its end."""
    stop_reason: int | None = None
    finished: bool = False
    """No more outputs will come for this request."""
    metrics: RequestMetrics | None = None
    """So far."""
    error: str | None = None
    """With `FinishReason.ERROR`: one line."""


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Where one unfinished request stands."""

    request_id: str
    state: Literal["waiting", "running", "idle"]
    num_tokens: int
    """Of its history: prompt and output."""
    num_computed: int
    """How many of these have KV. When it waits for more input, all but the last one is complete."""
    blocks: list[int]


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds what, to be looked at."""

    requests: list[RequestSnapshot]
    """Oldest first."""
    cached_blocks: list[int]
    """Held by nobody, and still usable as a prefix hit; least recently used first."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine stands: requests by state, blocks of the pool, totals since it was started."""

    num_running: int
    num_waiting: int
    num_idle: int
    num_steps: int
    num_kv_blocks: int
    num_free_blocks: int
    """Cached ones included."""
    num_cached_blocks: int
    """Free, and still usable as a prefix hit."""
    num_preemptions: int
    num_computed_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_restarts: int = 0
    """How often the process that it runs in was started again."""
