"""One request's ledger: what is known, what is computed, what is in flight. All else is derived.

    tokens    1 2 3 10 11 12 13          committed ids, prompt and output
    kv        ■ ■ ■ ■  ■  ■  ·           kv_len = 6: computed for exactly these ids
    flights                 [step 7: from 6, one input and up to two drafts, samples]
                             [step 8: after step 7, from 7 or higher (slack 2) … ]

Four moves change it: `fly` (a step was planned), `settle` (its result came back), `extend` (new input) and `cut`
(history changed under work in flight: fold, revise, interrupt, preempt, abort).
"""

from array import array
from collections import deque
from collections.abc import Sequence

import msgspec

from segue.engine.tables import Tables


class Flight(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step that has been planned and not yet settled."""

    step: int
    index: int
    """Its place in the step's plan."""
    epoch: int
    """The timeline's when it was planned. Where the timeline has moved on, the result is stale."""
    start: int
    """First position computed, at the lowest; higher when flights before it keep drafts."""
    num_tokens: int
    """Inputs that are not drafts."""
    max_drafts: int
    """The most drafts it verifies, and so the most by which it moves the start of the next one."""
    samples: bool
    propose: int
    """How many drafts were asked for, for the step after."""
    draft_kv_end: int
    """Below this the draft model's KV will be right at least, once this flight has landed."""
    draft_kv_start: int | None = None
    """What it adds to the draft model's KV begins here, or below; None: the draft model does not run."""


class Timeline:
    """The ledger. `0 ≤ kv_len ≤ len(tokens)`; the tables reach `kv_len` and all flights."""

    __slots__ = (
        "draft_kv_len",
        "drafts",
        "epoch",
        "flights",
        "has_draft_model",
        "kv_len",
        "tables",
        "tokens",
    )

    def __init__(self, tables: Tables, *, has_draft_model: bool = False) -> None:
        self.tables = tables
        """Where the KV lies."""
        self.has_draft_model = has_draft_model
        self.tokens: array[int] = array("i")
        """Replaced, never shortened in place: plans in flight hold it."""
        self.kv_len = 0
        self.draft_kv_len = 0
        """The same for the draft model's KV, in the same blocks."""
        self.epoch = 0
        self.flights: deque[Flight] = deque()
        """Those of this epoch, oldest first."""
        self.drafts: Sequence[int] = ()
        """Proposed to follow `tokens`."""

    @property
    def publishable_len(self) -> int:
        """Only blocks wholly below this may be published."""
        return min(self.kv_len, self.draft_kv_len) if self.has_draft_model else self.kv_len

    @property
    def next_start(self) -> int:
        """Where the next part starts, at the lowest: after what flies, or where KV ends."""
        start = self.kv_len
        for flight in self.flights:
            start += flight.num_tokens
        return start

    @property
    def slack(self) -> int:
        """How much higher the next part can start: when all drafts in flight are kept."""
        slack = 0
        for flight in self.flights:
            slack += flight.max_drafts
        return slack

    @property
    def unknown_input(self) -> Flight | None:
        """The newest flight, if it samples: the id that is drawn there is the next part's input."""
        return self.flights[-1] if self.flights and self.flights[-1].samples else None

    def fly(self, flight: Flight) -> None:
        """A step was planned with this part."""
        self.flights.append(flight)

    def settle(
        self, flight: Flight, kept: Sequence[int], drafts: Sequence[int], draft_kv_len: int | None
    ) -> None:
        """The oldest flight landed; `kept` are the ids it adds, already trimmed at a stop.

        After sampling the last id is known but not computed, and a rejected or trimmed draft's KV is not counted:
        `kv_len = len(tokens) - 1`. Blocks that have become complete are published.
        """
        complete = self.publishable_len
        landed = self.flights.popleft()
        assert landed is flight, "results come back in order"
        if flight.samples:
            self.tokens.extend(kept)
            self.kv_len = len(self.tokens) - 1
            self.drafts = drafts
        else:
            self.kv_len = flight.start + flight.num_tokens
        # Where the drafter failed before it, there is a gap: what comes after does not count.
        is_gapless = flight.draft_kv_start is not None and flight.draft_kv_start <= self.draft_kv_len
        if draft_kv_len is not None and is_gapless:
            self.draft_kv_len = min(draft_kv_len, len(self.tokens))
        self.tables.publish(self.tokens, complete, self.publishable_len)

    def extend(self, token_ids: Sequence[int]) -> None:
        """New input after what is known. Nothing that samples is in flight."""
        assert not any(flight.samples for flight in self.flights)
        self.tokens.extend(token_ids)

    def cut(self, num_tokens: int, kv_len: int) -> None:
        """Keep the first `num_tokens` ids and the KV of at most `kv_len` of them; what flies is stale from here on.
        The blocks beyond go back to the pool."""
        self.epoch += 1
        self.flights.clear()
        self.drafts = ()
        if num_tokens < len(self.tokens):
            self.tokens = self.tokens[:num_tokens]
        self.kv_len = self.tables.resumable(min(self.kv_len, kv_len, num_tokens))
        self.draft_kv_len = min(self.draft_kv_len, self.kv_len)
        self.tables.cut(num_tokens, self.kv_len)

    def adopt(self, blocks: list[int]) -> None:
        """Start from a prefix hit."""
        assert not self.flights
        self.tables.adopt(blocks)
        self.kv_len = self.draft_kv_len = self.tables.capacity

    def fork(self, num_tokens: int, *, whole_blocks: bool) -> "Timeline":
        """Another ledger with the first `num_tokens` ids and their KV, in the same blocks.

        Only what is complete for the draft model too: its KV of shared positions would be written by both.
        `whole_blocks` leaves out a block that this timeline is still writing.
        """
        kv_len = min(self.publishable_len, num_tokens)
        if whole_blocks:
            kv_len -= kv_len % self.tables.block_size
        kv_len = self.tables.resumable(kv_len)
        other = Timeline(self.tables.fork(num_tokens, kv_len), has_draft_model=self.has_draft_model)
        other.tokens = self.tokens[:num_tokens]
        other.kv_len = kv_len
        other.draft_kv_len = kv_len if self.has_draft_model else 0
        return other

    def check(self) -> None:
        """Assert the ledger's invariants."""
        assert 0 <= self.kv_len <= len(self.tokens)
        assert 0 <= self.draft_kv_len <= len(self.tokens)
        assert self.kv_len <= self.tables.capacity
        self.tables.check(len(self.tokens))
        sampled = False
        for flight in self.flights:
            assert flight.epoch == self.epoch
            assert flight.start <= self.next_start
            assert not sampled or (flight.samples and flight.num_tokens == 1)
            sampled = flight.samples
        assert self.next_start + self.slack <= self.tables.capacity
