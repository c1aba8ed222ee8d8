"""A grammar for the simulation: what may follow depends on the whole answer so far, which may be finished early."""

from collections.abc import Sequence
from typing import Any

import msgspec

from segue.contract.step import Sampling
from segue.errors import FailedError
from segue.sample.guide import kept
from segue.sample.params import SamplingParams

NAME = "sim"
END = 1


class GrammarParams(SamplingParams, frozen=True, kw_only=True):
    """Parameters with the simulation's grammar."""

    def resolve(self, **given: Any) -> Sampling:
        plain = super().resolve(**given)
        return msgspec.structs.replace(plain, grammar=NAME, banned=(), last_resort=plain.banned)


def is_finished(answer: Sequence[int]) -> bool:
    total = 0
    for length, token in enumerate(answer, 1):
        total += token
        if token == END or (length > 2 and (total + length) % 7 == 0):
            return True
    return False


def allowed(answer: Sequence[int], vocab_size: int) -> list[int]:
    """About two of three ids, others after each answer; only the end when it is finished."""
    if is_finished(answer):
        return [END]
    return [token for token in range(vocab_size) if (sum(answer) + len(answer) + token) % 3 != 0]


def mask_of(ids: Sequence[int], vocab_size: int) -> bytes:
    return sum(1 << token for token in ids).to_bytes(vocab_size // 8, "little")


def plain_mask(answer: Sequence[int], sampling: Sampling, vocab_size: int) -> bytes:
    """What a row may draw in all: `min_tokens` counts unless the grammar allows nothing else."""
    ids = allowed(answer, vocab_size)
    if sampling.output_start + len(answer) < sampling.banned_until:
        ids = [token for token in ids if token not in sampling.last_resort] or ids
    return mask_of(ids, vocab_size)


class SimGuide:
    """A `Guide`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._answer: list[int] = []

    @property
    def num_ids(self) -> int:
        return len(self._answer)

    def masks(self, known: int, ids: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        assert known <= len(self._answer)
        self._answer[known:] = ids
        masks = []
        for num_drafts in range(1 + len(drafts)):
            may_follow = allowed([*self._answer, *drafts[:num_drafts]], self._vocab_size)
            masks.append(mask_of(may_follow, self._vocab_size))
            if num_drafts < len(drafts) and drafts[num_drafts] not in may_follow:
                break
        return masks


class SimGuides:
    """`Guides` that take their time: so many questions until one is ready, some of them none."""

    def __init__(self, vocab_size: int) -> None:
        self.fail_next = False
        """Raise at the next use of a guide."""
        self._vocab_size = vocab_size

    def is_ready(self, sampling: Sampling, wait_s: float) -> bool:
        left = kept(sampling, "waits", lambda: [(sampling.seed * 5 + sampling.output_start) % 4])
        left[0] -= 1
        return left[0] < 0

    def of(self, sampling: Sampling) -> SimGuide:
        assert kept(sampling, "waits", lambda: [1])[0] < 0, "not asked for until it was ready"
        if self.fail_next:
            self.fail_next = False
            raise FailedError("injected error of a grammar")
        return kept(sampling, "guide", lambda: SimGuide(self._vocab_size))

    def close(self) -> None:
        """Nothing to release."""
