"""How many drafts are worth verifying for one request: k follows measured acceptance and the load.

With `n` running requests that each verify d drafts, a step costs `1 + ROW_COST · n · (1 + d)` of a step's fixed cost
(reading the weights) and yields `1 + a + … + a^d` tokens each, a the chance that a draft is right (Leviathan et al.
2023, eq. 1). k is the d that gives the most tokens for the cost. Nothing here changes what is generated.
"""

ROW_COST = 0.1
"""What one more row adds to a step, as a part of its fixed cost; measured with `bench/kernels.py`."""
_MEMORY = 0.9
"""Weight of the past in the running mean of acceptance."""
_OPTIMISM = 0.7
"""Acceptance assumed before anything was measured."""
_FIRST_PAUSE_TOKENS = 16
_MAX_PAUSE_TOKENS = 512


class AdaptiveDrafts:
    """One request's k. Off when it does not pay, and tried again after a pause that doubles each time."""

    __slots__ = ("_acceptance", "_max_drafts", "_pause", "_resume_at")

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._acceptance = _OPTIMISM
        self._pause = _FIRST_PAUSE_TOKENS
        self._resume_at = 0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One step verified drafts. Those after the first wrong one say nothing about the chance."""
        for i in range(min(num_accepted + 1, num_drafts)):
            self._acceptance = _MEMORY * self._acceptance + (1 - _MEMORY) * (i < num_accepted)

    def num_drafts(self, length: int, num_running: int) -> int:
        """How many to propose for a request of `length` tokens beside `num_running` in all."""
        if length < self._resume_at:
            return 0
        best, best_rate = 0, 1.0 / (1.0 + ROW_COST * num_running)
        gain, tokens = 1.0, 1.0
        for drafts in range(1, self._max_drafts + 1):
            gain *= self._acceptance
            tokens += gain
            rate = tokens / (1.0 + ROW_COST * num_running * (1 + drafts))
            if rate > best_rate:
                best, best_rate = drafts, rate
        if best == 0:
            self._resume_at = length + self._pause
            self._pause = min(2 * self._pause, _MAX_PAUSE_TOKENS)
            # The next try starts from an open mind: a few drafts decide.
            self._acceptance = _OPTIMISM
        return best
