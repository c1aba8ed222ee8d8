"""Finds stop strings in text that arrives in pieces."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """The first stop string that the text completed."""

    stop: str
    start: int
    """Where it starts; characters since the beginning of the text."""
    end: int


class StopMatcher:
    """The automaton of Aho and Corasick (1975) over some stop strings, fed with text.

    After each `feed` without a match, `num_held` is the length of the longest suffix of the text that is a
    proper prefix of a stop string: just what a later character could still turn into one. The first match is
    the one that ends first; of several that end together, the longest. Where the text is cut into pieces
    changes nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string is empty"
        self._next: list[dict[str, int]] = [{}]
        """For each node of the trie, the node that a character leads to. Node 0 is the empty prefix."""
        self._depth = [0]
        self._stop: list[str | None] = [None]
        """The longest stop string that ends at a node."""
        for stop in stops:
            self._insert(stop)
        self._fallback = self._link()
        self._node = 0
        self._num_chars = 0

    @property
    def num_held(self) -> int:
        return self._depth[self._node]

    def feed(self, text: str) -> StopMatch | None:
        """Reads more text, up to the first match. Not to be called again after one."""
        node = self._node
        for i, char in enumerate(text, start=1):
            while node and char not in self._next[node]:
                node = self._fallback[node]
            node = self._next[node].get(char, 0)
            stop = self._stop[node]
            if stop is not None:
                end = self._num_chars + i
                return StopMatch(stop, end - len(stop), end)
        self._node = node
        self._num_chars += len(text)
        return None

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._stop.append(None)
            node = child
        self._stop[node] = stop

    def _link(self) -> list[int]:
        """For each node, that of its longest proper suffix which is in the trie. Breadth first."""
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                suffix = fallback[node]
                while suffix and char not in self._next[suffix]:
                    suffix = fallback[suffix]
                fallback[child] = self._next[suffix].get(char, 0)
                queue.append(child)
            # Its suffix is shallower, so already has the stop string that ends there.
            self._stop[node] = self._stop[node] or self._stop[fallback[node]]
        return fallback
