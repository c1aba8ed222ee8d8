"""A request: a timeline, the turn that is being answered, and the input that waits for the next one."""

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import Literal

import msgspec

from segue.contract.reports import FinishReason, RequestMetrics, RequestSnapshot
from segue.contract.step import Sampling, TokenLogprobs
from segue.engine.config import EngineConfig
from segue.engine.submission import Submission, TokenIds
from segue.engine.timeline import Timeline
from segue.sample.params import SamplingParams
from segue.speculate.adaptive import AdaptiveDrafts


class State(Enum):
    WAITING = auto()
    """Has work and is not admitted. May hold blocks, which can be taken from it."""
    RUNNING = auto()
    """Admitted: part of every step in which it has something to compute."""
    UNREADY = auto()
    """Has work that cannot begin: the runtime cannot draw for its turn yet. Holds blocks as if it waited."""
    IDLE = auto()
    """Resumable and without work. Its blocks are the first to be taken."""
    FINISHED = auto()


_STATE_NAMES: dict[State, Literal["waiting", "running", "idle"]] = {
    State.WAITING: "waiting",
    State.UNREADY: "waiting",
    State.RUNNING: "running",
    State.IDLE: "idle",
}


class Chunk(msgspec.Struct, frozen=True):
    """Input that arrives at once. Without `params` it is only prefilled."""

    token_ids: TokenIds
    params: SamplingParams | None
    arrival: int
    num_output_tokens: int = 0
    """How many of the last ids are output of the answer, given before."""


class Stop(msgspec.Struct, frozen=True):
    """Why a turn ended."""

    reason: FinishReason
    stop_reason: int | None = None


class Turn(msgspec.Struct, frozen=True, eq=False):
    """One answer: how it is sampled and where it ends."""

    sampling: Sampling
    output_start: int
    """Position of the answer's first token."""
    limit: int
    """No more than this many tokens, history included."""
    min_end: int
    """Nothing but the limit ends it below this many tokens."""
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    num_prompt_logprobs: int | None

    @classmethod
    def begin(cls, params: SamplingParams, start: int, config: EngineConfig, default_seed: int) -> "Turn":
        limit = config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, start + params.max_tokens)
        return cls(
            sampling=params.resolve(
                output_start=start, eos_token_ids=config.eos_token_ids, default_seed=default_seed
            ),
            output_start=start,
            limit=limit,
            min_end=min(start + params.min_tokens, limit),
            eos_token_ids=frozenset() if params.ignore_eos else config.eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            num_prompt_logprobs=params.prompt_logprobs,
        )

    def trim(self, position: int, token_ids: Sequence[int]) -> tuple[Sequence[int], Stop | None]:
        """What of these ids, sampled from `position` on, belongs to the answer, and why it ends there.

        Within one id the order is vLLM's: below `min_tokens` nothing stops; end of sequence and stop ids
        come before length.
        """
        if position + len(token_ids) < self.limit and not (self.eos_token_ids or self.stop_token_ids):
            return token_ids, None
        for i, token in enumerate(token_ids):
            length = position + i + 1
            if length < self.min_end:
                continue
            stop = None
            if token in self.eos_token_ids:
                stop = Stop(FinishReason.STOP)
            elif token in self.stop_token_ids:
                stop = Stop(FinishReason.STOP, token)
            elif length >= self.limit:
                stop = Stop(FinishReason.LENGTH)
            if stop is not None:
                return token_ids[: i + 1], stop
        return token_ids, None


class Request:
    """One request. The scheduler moves it between states; its timeline says how far it is."""

    __slots__ = (
        "adaptive",
        "admitted_len",
        "arrival",
        "chunks",
        "input_open",
        "metrics",
        "num_prompt_tokens",
        "prompt_logprobs",
        "reserve",
        "state",
        "submission",
        "timeline",
        "turn",
    )

    def __init__(
        self, submission: Submission, timeline: Timeline, *, arrival: int, adaptive: AdaptiveDrafts | None
    ) -> None:
        self.submission = submission
        self.timeline = timeline
        self.arrival = arrival
        """Of the chunk that is being served: the order under FCFS."""
        self.input_open = submission.resumable
        self.adaptive = adaptive
        self.chunks: deque[Chunk] = deque()
        """Input for later turns, in order."""
        self.turn: Turn | None = None
        self.state = State.IDLE
        self.reserve = 0
        """Tokens that its blocks are guaranteed to reach until its first decode step is planned; 0 afterwards."""
        self.admitted_len: int | None = None
        """How many tokens were known when it was last admitted."""
        self.num_prompt_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """By position, until they are handed out with the turn's first token."""
        self.metrics = RequestMetrics()

    @property
    def id(self) -> str:
        return self.submission.request_id

    @property
    def priority(self) -> int:
        return self.submission.priority

    @property
    def target(self) -> int:
        """How far its known tokens are to be computed. The last one is left for the step that samples."""
        length = len(self.timeline.tokens)
        return length if self.turn is not None else length - 1

    @property
    def has_work(self) -> bool:
        """Whether anything is left to compute when all that flies has landed."""
        return self.turn is not None or self.timeline.kv_len < self.target

    def end_turn(self) -> None:
        """Leave the turn: what flies is stale, and history is cut to what outlives it."""
        timeline = self.timeline
        kept = timeline.kv_len if self.submission.keep == "computed" else len(timeline.tokens)
        self.turn = None
        self.prompt_logprobs = None
        timeline.cut(kept, kept)

    def truncate(self, num_tokens: int) -> None:
        """Cut history, and with it the turn and all queued input."""
        self.turn = None
        self.prompt_logprobs = None
        self.chunks.clear()
        self.timeline.cut(num_tokens, num_tokens)

    def fold(self, chunk: Chunk, config: EngineConfig) -> None:
        """Go on with this input after the history there is. Between turns only."""
        assert self.turn is None
        timeline = self.timeline
        timeline.extend(chunk.token_ids)
        length = len(timeline.tokens)
        if chunk.params is not None and timeline.kv_len >= length:
            # Nothing new to compute, and sampling needs the last token's logits: compute it again.
            timeline.cut(length, length - 1)
        self.arrival = chunk.arrival
        self.num_prompt_tokens = length
        if chunk.params is not None:
            start = length - chunk.num_output_tokens
            self.turn = Turn.begin(chunk.params, start, config, self.submission.default_seed)
            if self.turn.num_prompt_logprobs is not None:
                self.prompt_logprobs = [None] * length

    def drop_kv(self) -> None:
        """Forget all KV: the end, preemption and eviction."""
        self.timeline.cut(len(self.timeline.tokens), 0)

    def where_it_stands(self) -> RequestSnapshot:
        """For those who look at the engine. A finished request stands nowhere."""
        return RequestSnapshot(
            request_id=self.id,
            state=_STATE_NAMES[self.state],
            num_tokens=len(self.timeline.tokens),
            num_computed=self.timeline.kv_len,
            blocks=list(self.timeline.tables.blocks),
        )

    def snapshot(self) -> RequestMetrics:
        """The metrics so far, as a value that does not change any more."""
        return msgspec.structs.replace(self.metrics)
