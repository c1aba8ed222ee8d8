"""The contract between the engine and what executes a step.

Two levels, one vocabulary:

    engine  ──StepPlan──▶  Runtime  ──concrete SeqSteps──▶  Executor   native | reference | oracle
            ◀─StepResult─           ◀───ForwardResult────

* A `StepPlan` may hold *references* into steps that are not finished yet (`SeqStep.after`).
* The `Runtime` (`segue.runtime.runtime`) executes plans strictly in the order of their numbers. It
  resolves references, asks an `Executor` for one forward pass, keeps the drafts that equal what
  was sampled and lets a drafter propose the next ones.
* An `Executor` owns weights and KV memory, runs one forward pass and samples. It sees no references,
  keeps nothing between calls but KV, and a row's results depend on nothing but that row's own
  sequence: not on the batch, the chunking, the threads, the block size.

Ids are token ids in `[0, vocab_size)`; positions count from 0 within a sequence; ranges are half open.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

MAX_STEPS_IN_FLIGHT = 8
"""References (`SeqStep.after`) may not reach further back than this many steps."""


class Sampling(msgspec.Struct, frozen=True, eq=False, kw_only=True, dict=True):
    """How one request's tokens are drawn: its `SamplingParams`, resolved. Compared by identity.

    An executor may keep what it made of it in its `__dict__`, which lives exactly as long as the request.

    The token for position `p` is drawn from the logits computed at position `p - 1` by steps in this
    order: `logit_bias`, `banned` and the mask of `grammar` → penalties → `temperature` → `min_p` → `top_k` →
    `top_p` → one uniform number from Philox4x32-10 with key `seed` and counter `p`.
    Log-probabilities are of the raw logits, before any of that (vLLM's `raw_logprobs`).
    """

    temperature: float = 0.0
    """0 is greedy (the lowest id among equals); then nothing after the penalties applies."""
    top_k: int = 0
    """Keep this many of the most likely ids; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output."""
    presence_penalty: float = 0.0
    """Over the output: positions from `output_start` on."""
    frequency_penalty: float = 0.0
    output_start: int = 0
    """Position of the first output token; below it is prompt."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    """Ids that cannot be drawn for positions below `banned_until` (`min_tokens`)."""
    last_resort: tuple[int, ...] = ()
    """With a grammar, in place of `banned`: ids that are drawn below `banned_until` only where the grammar allows
    nothing else. The runtime works them into the masks."""
    banned_until: int = 0
    seed: int = 0
    """Unsigned 64 bit."""
    num_logprobs: int | None = None
    """None: no logprobs. n ≥ 0: the drawn id's, and the n most likely ids'."""

    grammar: str | None = None
    """What the answer must match, in the notation of the runtime's guides; None: anything."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether drawing needs the sequence's earlier ids."""
        return self.grammar is not None or self.has_penalties


class After(msgspec.Struct, frozen=True, gc=False):
    """Names one sequence's part of an earlier step that may still be in flight."""

    step: int
    index: int


class SeqStep(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step.

    The inputs are `tokens + drafts` at consecutive positions from `start`; their KV is written to
    `blocks`. With `sampling`, the last input of `tokens` and every draft get a sampled id: row `i`'s
    id is drawn as if drafts `[0, i)` were right.

        position   start ........ start+len(tokens)-1 | ... drafts ...  |
        input      tokens[0] ...  tokens[-1]          | d0    d1   d2   |
        sampled                   s0                  | s1    s2   s3   |     d0 is right if d0 == s0

    With `after`, the sequence goes on where that part ends: `tokens` is empty, the one input is the
    last id sampled there, `start` is the *lowest* position this can be, and the drafts are the first
    `max_drafts` of what was proposed there.
    """

    start: int
    tokens: Sequence[int]
    blocks: list[int]
    """Block ids in order of position: position p is slot `p % block_size` of `blocks[p // block_size]`.
    Append-only while a plan that names it is in flight; whoever must change it replaces the list."""
    drafts: Sequence[int] = ()
    after: After | None = None
    max_drafts: int = 0
    """Only with `after`: the most proposals of that step to verify."""
    sampling: Sampling | None = None
    propose: int = 0
    """How many drafts to propose for the next step, from this step's outcome."""
    history: "array[int] | None" = None
    """The request's committed ids (typecode 'i', append-only like `blocks`), for penalties and drafters."""
    history_len: int = 0
    """How many of them count; with `after`, the ids of the parts in flight follow them. Without
    `after`: `start + len(tokens)`."""
    draft_start: int | None = None
    """With a draft model: the first position whose draft KV is missing, at the lowest; it is then computed for
    all ids known after this step. None: leave its KV alone."""
    masks: Sequence[bytes | None] = ()
    """Set by the runtime, with a grammar: for each sampled row the ids that may be drawn, bit `i % 8` of byte
    `i // 8` for id `i`; None: all."""
    prompt_targets: Sequence[int] = ()
    """Ids to score for `prompt_logprobs`: `prompt_targets[i]` by the logits of the i-th input."""
    num_prompt_logprobs: int = 0


class StepPlan(msgspec.Struct, frozen=True):
    """All that one step computes. Steps are numbered 0, 1, 2, … and executed in that order."""

    step: int
    seqs: list[SeqStep]
    copies: Sequence[tuple[int, int]] = ()
    """(source, destination) block ids, copied before anything is computed, in this order; also when all sequences of
    the step come back with errors."""


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The log-probability (nats) of one id at one position, and of the most likely ids there."""

    logprob: float
    rank: int
    """1 for the most likely id: 1 + how many ids are strictly more likely."""
    top_ids: tuple[int, ...]
    """Most likely first; among equals the lower id first."""
    top_logprobs: tuple[float, ...]


NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
"""The error of a sequence one of whose wanted rows of logits has a NaN or an infinity."""


class ForwardResult(msgspec.Struct):
    """What one forward pass gave. Sampled rows are numbered in order: each sequence with `sampling`
    that has no error has `1 + len(drafts)` of them, the others none."""

    tokens: list[int]
    """The id sampled for each row."""
    logprobs: dict[int, TokenLogprobs]
    """By row, for rows whose `sampling.num_logprobs` is not None."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    """By index in `seqs`, for sequences with `prompt_targets` and no error, one for each target."""
    errors: dict[int, str]
    """By index in `seqs`, in one line: why a sequence was refused (it does not fit the model or its KV memory;
    nothing of it was computed or written), or `NOT_FINITE`."""


class Executor(Protocol):
    """Weights, KV memory and one forward pass. Calls are never concurrent."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """The most positions the model can be given."""
        ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks × block_size` positions. Raises CapacityError when there is none."""
        ...

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        """Copy blocks, then compute all inputs of all sequences and sample. No `after` may be left.

        Within one call every sequence's KV writes happen before its own reads; sequences that share
        blocks only share positions written by earlier calls. Releases the GIL while it computes.
        What is wrong with one sequence becomes its error and leaves the others as they are; an exception means
        that nothing of the call counts.
        """
        ...

    def close(self) -> None: ...


class SeqResult(msgspec.Struct, kw_only=True):
    """What one sequence's part of a step came to. With `error`, nothing else counts."""

    start: int = 0
    """The resolved first position."""
    tokens: Sequence[int] = ()
    """The ids this part adds: the drafts that were right, then the one id that was drawn after them.
    Empty when nothing was sampled. KV is valid below `start + (inputs not drafts) + len(tokens) - 1`."""
    num_drafts: int = 0
    """How many drafts were verified."""
    drafts: Sequence[int] = ()
    """Proposals for the ids that follow `tokens`."""
    draft_kv_len: int | None = None
    """Below this position the draft model's KV is complete and right; None: it was left alone."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One for each of `tokens`."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    error: str | None = None


class StepResult(msgspec.Struct):
    step: int
    seqs: list[SeqResult]
    """In the order of the plan's."""
    unfilled: Sequence[int] = ()
    """Blocks that the plan's copies were to fill and have not: what they hold means nothing."""


class StepHandle(Protocol):
    """A step that was submitted."""

    def result(self) -> StepResult:
        """Wait for what the step came to. Never raises for a step that failed: that is a result like any other, with
        an error for each sequence. Whoever was interrupted while waiting may ask again."""
        ...


class Runtime(Protocol):
    """Executes steps in the order in which they are submitted. One thread calls, and asks for results in that order."""

    @property
    def vocab_size(self) -> int: ...

    def is_ready(self, sampling: Sampling, *, wait_s: float = 0.0) -> bool:
        """Whether a step may draw with this. What takes long (its grammar is compiled) begins when this is asked
        first, beside the steps; waits for it no longer than `wait_s`."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Take on one step and return; where and when it is executed is the runtime's own matter. What fails a step as
        a whole fails every sequence in it and leaves its copies unfilled; parts of later steps that refer to a failed
        one come back with `error` set."""
        ...

    def close(self) -> None:
        """Wait for the step that executes, and release all. Steps that have not begun are dropped."""
        ...
