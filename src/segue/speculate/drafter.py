"""What proposes drafts: the interface between the runtime and a drafter."""

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from segue.contract.step import Sampling


class DraftRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence for which drafts, or the draft model's KV, are wanted."""

    token_ids: "array[int]"
    """Its ids at positions `[first, first + len)`, up to the last one known."""
    first: int
    count: int
    """The most drafts to propose; 0 when only KV is wanted."""
    blocks: list[int]
    draft_start: int | None
    """First position whose draft KV is missing; None: leave its KV alone."""
    sampling: Sampling | None
    """How the target draws: a drafter that draws with the same keyed random numbers is right more often."""


class Proposal(msgspec.Struct, frozen=True):
    drafts: Sequence[int] = ()
    draft_kv_len: int | None = None
    """Below this the draft model's KV is complete and right; None: it was left alone."""


class Drafter(Protocol):
    """Proposes drafts for many sequences at once."""

    @property
    def has_kv(self) -> bool:
        """Whether it keeps KV in the target's block tables."""
        ...

    def propose(
        self, requests: Sequence[DraftRequest], copies: Sequence[tuple[int, int]]
    ) -> Sequence[Proposal]:
        """One proposal for each request. `copies` are the step's block copies, for its KV."""
        ...

    def close(self) -> None: ...
