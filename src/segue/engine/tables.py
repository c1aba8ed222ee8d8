"""Where one request's KV lies: its block tables, and all that is done with them over the pool.

All layers see all earlier positions, so they are one group with one table: position p is slot `p % block_size` of
`blocks[p // block_size]`. The ledger says how far the KV counts; what a table holds beyond that means nothing.
"""

from array import array
from collections.abc import Sequence, Set

from segue.engine.blocks import BlockPool, block_key, root_key

NO_BLOCKS: Set[int] = frozenset()


class Tables:
    """References into a pool. Everything that takes, gives back or publishes a request's blocks is here."""

    __slots__ = ("_keys", "_root", "block_size", "blocks", "pool")

    def __init__(self, pool: BlockPool, block_size: int, *, salt: str | None = None) -> None:
        self.pool = pool
        self.block_size = block_size
        self.blocks: list[int] = []
        """The block table; appended to or replaced, never shortened in place: plans in flight hold it."""
        self._root = root_key(salt)
        self._keys: list[bytes] = []
        """Of the first full blocks, as far as they were asked for."""

    # --- what there is ----------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Positions below this have a block."""
        return len(self.blocks) * self.block_size

    def missing(self, num_tokens: int) -> int:
        """How many more blocks it takes to compute through this many tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))

    def reachable(self, position: int, num_blocks: int) -> int:
        """Through how many tokens can be computed from `position` on with so many more blocks."""
        return self.capacity + (num_blocks - self.shares(position)) * self.block_size

    def block_at(self, position: int) -> int | None:
        """Where this position's KV is, or is written next."""
        index = position // self.block_size
        return self.blocks[index] if index < len(self.blocks) else None

    def shares(self, position: int) -> bool:
        """Whether others hold the block of this position too, so that writing there takes a copy."""
        block = self.block_at(position)
        return block is not None and self.pool.is_shared(block)

    def is_own(self, position: int) -> bool:
        """Whether the block of this position is there, held by nobody else and not published."""
        block = self.block_at(position)
        return block is not None and self.pool.is_writable(block)

    def resumable(self, num_tokens: int, *, without: Set[int] = NO_BLOCKS) -> int:
        """The longest m ≤ `num_tokens` at which the tables have all that a continuation at m reads, if what is in the
        blocks `without` does not count."""
        if not without:
            return min(num_tokens, self.capacity)
        first = next((i for i, block in enumerate(self.blocks) if block in without), len(self.blocks))
        return min(num_tokens, first * self.block_size)

    # --- for what is computed next ----------------------------------------------------------------------------

    def reach(self, num_tokens: int) -> None:
        """Have blocks through this many tokens. The caller has seen that the pool has those `missing`."""
        missing = self.missing(num_tokens)
        if missing > 0:
            self.blocks.extend(self.pool.allocate(missing))

    def own(self, position: int) -> Sequence[tuple[int, int]]:
        """Make the block that is written next, at `position`, this request's alone: copy on write, or withdraw its
        key. Returns the copies (source, destination) that the step must make."""
        block = self.block_at(position)
        if block is None:
            return ()
        if not self.pool.is_shared(block):
            self.pool.unpublish(block)
            return ()
        (own,) = self.pool.allocate(1)
        index = position // self.block_size
        self.blocks = [*self.blocks[:index], own, *self.blocks[index + 1 :]]
        self.pool.release([block])
        return ((block, own),)

    # --- history ----------------------------------------------------------------------------------------------

    def cut(self, num_tokens: int, kv_len: int) -> None:
        """Only the first `num_tokens` ids stand, and the KV of `kv_len` of them: give back the blocks beyond."""
        del self._keys[num_tokens // self.block_size :]
        needed = -(-kv_len // self.block_size)
        surplus = self.blocks[needed:]
        if surplus:
            self.blocks = self.blocks[:needed]
            self.pool.release(surplus)

    def fork(self, num_tokens: int, kv_len: int) -> "Tables":
        """Tables of another request with the first `num_tokens` ids and the KV of `kv_len` of them, in the same
        blocks."""
        other = Tables(self.pool, self.block_size)
        other._root = self._root
        other._keys = self._keys[: num_tokens // self.block_size]
        other.adopt(self.blocks[: -(-kv_len // self.block_size)])
        return other

    def adopt(self, blocks: list[int]) -> None:
        """Start from KV that exists already: a prefix hit, or another request's blocks."""
        assert not self.blocks
        self.pool.acquire(blocks)
        self.blocks = blocks

    # --- the prefix cache -------------------------------------------------------------------------------------

    def key(self, tokens: "array[int]", index: int) -> bytes:
        """The key of block `index`, which must be full of these committed ids."""
        keys, size = self._keys, self.block_size
        while len(keys) <= index:
            at = len(keys)
            ids = tokens[at * size : (at + 1) * size]
            assert len(ids) == size, "only full blocks have a key"
            keys.append(block_key(keys[-1] if keys else self._root, ids))
        return keys[index]

    def find(self, tokens: "array[int]", num_tokens: int) -> list[int]:
        """Published blocks to `adopt`: those of the longest prefix within the first `num_tokens` of these ids."""
        return self.pool.lookup(self.key(tokens, index) for index in range(num_tokens // self.block_size))

    def publish(self, tokens: "array[int]", old_len: int, new_len: int) -> None:
        """Offer the blocks that have become complete since the KV of `old_len` ids was, now that `new_len` ids' is."""
        first, end = old_len // self.block_size, new_len // self.block_size
        if first < end and self.pool.enable_caching:
            for index in range(first, end):
                self.pool.publish(self.blocks[index], self.key(tokens, index))

    def check(self, num_tokens: int) -> None:
        """Assert what must hold beside so many known ids."""
        assert len(self._keys) <= num_tokens // self.block_size
