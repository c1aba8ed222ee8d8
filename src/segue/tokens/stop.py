"""Finds stop strings in text that arrives in pieces."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class StopMatch:
    """The first stop string that the text completed."""

    stop: str
    start: int
    """Where it starts; characters since the beginning of the text."""
    end: int


class StopMatcher:
    """Reads text and finds the first stop string in it.

    After each `feed` without a match, `num_held` is the length of the longest suffix of the text that is a
    proper prefix of a stop string: just what a later character could still turn into one. The first match is
    the one that ends first; of several that end together, the longest. Where the text is cut into pieces
    changes nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string is empty"
        self._automaton = _automaton(tuple(stops))
        self._node = 0
        self._num_chars = 0

    @property
    def num_held(self) -> int:
        return self._automaton.depth[self._node]

    def feed(self, text: str) -> StopMatch | None:
        """Reads more text, up to the first match. Not to be called again after one."""
        step, node = self._automaton.step, self._node
        for i, char in enumerate(text, start=1):
            node = step(node, char)
            stop = self._automaton.stop[node]
            if stop is not None:
                end = self._num_chars + i
                return StopMatch(stop, end - len(stop), end)
        self._node = node
        self._num_chars += len(text)
        return None


class _Automaton:
    """The automaton of Aho and Corasick (1975) over some stop strings. Takes time linear in their length to make, and
    in that of the text to use."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        """For each node of the trie, the node that a character leads to. Node 0 is the empty prefix."""
        self.depth = [0]
        self.stop: list[str | None] = [None]
        """The longest stop string that ends at a node."""
        for stop in stops:
            self._insert(stop)
        self._fallback = self._link()

    def step(self, node: int, char: str) -> int:
        """The node of the longest suffix of the text that is a prefix of a stop string, one character later."""
        while node and char not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(char, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = len(self._next)
                self._next[node][char] = child
                self._next.append({})
                self.depth.append(self.depth[node] + 1)
                self.stop.append(None)
            node = child
        self.stop[node] = stop

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
            self.stop[node] = self.stop[node] or self.stop[fallback[node]]
        return fallback


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """The answers to a request share it."""
    return _Automaton(stops)
