"""A grammar for the simulation: what may follow depends on the whole answer so far."""

from collections.abc import Sequence
from typing import Any

import msgspec

from segue.runtime.contract import Sampling
from segue.sample.params import SamplingParams

NAME = "sim"


class GrammarParams(SamplingParams, frozen=True, kw_only=True):
    """Parameters with the simulation's grammar."""

    def resolve(self, **given: Any) -> Sampling:
        return msgspec.structs.replace(super().resolve(**given), grammar=NAME)


def may_follow(answer: Sequence[int], token: int) -> bool:
    """About two of three ids, others after each answer."""
    return (sum(answer) + len(answer) + token) % 3 != 0


class SimGuide:
    """A `Guide` for `may_follow`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def masks(self, answer: Sequence[int], drafts: Sequence[int]) -> list[bytes | None]:
        masks: list[bytes | None] = []
        for num_drafts in range(1 + len(drafts)):
            so_far = [*answer, *drafts[:num_drafts]]
            bits = sum(1 << token for token in range(self._vocab_size) if may_follow(so_far, token))
            masks.append(bits.to_bytes(self._vocab_size // 8, "little"))
        return masks
