"""The pool of KV blocks and the prefix cache: who holds which block, and which block holds what.

    free ──allocate──▶ held ──release──▶ free           it had no key
      ▲                 ▲ └────release──▶ cached-free    it was published under a key
      │                 └──────acquire───────┘
      └─────────────allocate (least recently released first)

A block is in exactly one of the three states. A held block has one reference for each table that names it. A
published block is full, and its key is a hash of all tokens up to its end; it is never written again until it is
unpublished.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_KEY_BYTES = 16


def root_key(salt: str | None) -> bytes:
    """The parent of a sequence's first key; sequences share blocks only under equal salts."""
    return blake2b((salt or "").encode(), digest_size=_KEY_BYTES).digest()


def block_key(parent: bytes, tokens: "array[int]") -> bytes:
    """The key of the block that holds these ids after the block with key `parent`."""
    return blake2b(tokens.tobytes(), digest_size=_KEY_BYTES, key=parent).digest()


class BlockPool:
    """Owns the ids `[0, num_blocks)`. All operations are O(1) for each block they touch."""

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached_free: dict[int, None] = {}
        """Least recently released first."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free and cached-free."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_cached_free(self) -> int:
        return len(self._cached_free)

    @property
    def cached_free(self) -> list[int]:
        """Held by nobody and published, least recently released first."""
        return list(self._cached_free)

    def allocate(self, count: int) -> list[int]:
        """Take blocks, evicting cached ones when no other is free. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block = next(iter(self._cached_free))
        del self._cached_free[block]
        self.unpublish(block)
        return block

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks, held or cached-free."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached_free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each. The last ones go first, so that a sequence is evicted from its end."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released more often than held"
            if self._references[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached_free[block] = None

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """The published blocks of the longest prefix of `keys`."""
        hits: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def count_cached_free(self, blocks: Iterable[int]) -> int:
        """How many of these nobody holds."""
        return sum(self._references[block] == 0 for block in blocks)

    def publish(self, block: int, key: bytes) -> None:
        """Offer a full, held block under its key. Where another block has the key already, that one stays."""
        assert self._references[block] > 0
        if self.enable_caching and self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def unpublish(self, block: int) -> None:
        """Withdraw a block, because it is about to hold something else."""
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._by_key[key]

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def is_writable(self, block: int) -> bool:
        """Whether one table holds it and nobody else can find it."""
        return self._references[block] == 1 and self._keys[block] is None

    def key_of(self, block: int) -> bytes | None:
        """The key it is published under."""
        return self._keys[block]

    def reset_cache(self) -> None:
        """Forget all keys. Held blocks stay held and are not published again."""
        for block in self._by_key.values():
            self._keys[block] = None
        self._by_key.clear()
        self._free.extend(self._cached_free)
        self._cached_free.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the pool's invariants against all block tables there are."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        assert counted == self._references, "references differ from the tables that name the blocks"
        free, cached = set(self._free), set(self._cached_free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached
        held = {block for block, count in enumerate(counted) if count}
        assert len(free) + len(cached) + len(held) == self.num_blocks
        assert not held & (free | cached)
        for block, key in enumerate(self._keys):
            assert key is None or self._by_key[key] == block
            assert (block not in cached) or key is not None, "cached-free without a key"
            assert (block not in free) or key is None, "free with a key"
        assert len(self._by_key) == sum(key is not None for key in self._keys)
