"""The block pool against a naive model of it, and its rules one by one."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from segue.engine.blocks import BlockPool, block_key, root_key

NUM_BLOCKS = 6


class NaivePool:
    """The same pool, with nothing but a list of who holds what; every answer is searched for."""

    def __init__(self) -> None:
        self.tables: list[list[int]] = []
        self.keys: dict[int, int] = {}
        """Key of each published block."""
        self.released: list[int] = []
        """Blocks that nobody holds and that have a key, least recently released first."""

    def count(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @property
    def num_free(self) -> int:
        return sum(self.count(block) == 0 for block in range(NUM_BLOCKS))

    def lookup(self, keys: list[int]) -> list[int]:
        hits: list[int] = []
        for key in keys:
            found = [block for block, other in self.keys.items() if other == key]
            if not found:
                break
            hits += found
        return hits

    def take(self, block: int) -> None:
        """It was allocated: it must have been free, and a cached one only when there was no other."""
        assert self.count(block) == 0
        if block in self.released:
            uncached = [b for b in range(NUM_BLOCKS) if self.count(b) == 0 and b not in self.released]
            assert not uncached, "a cached block was evicted while another was free"
            assert block == self.released[0], "not the least recently released"
            self.released.remove(block)
            del self.keys[block]

    def drop(self, table: list[int]) -> None:
        for block in reversed(table):
            table.remove(block)
            if self.count(block) == 0 and block in self.keys:
                self.released.append(block)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of operations does to the pool what it does to the naive model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.naive = NaivePool()

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > self.naive.num_free:
            with pytest.raises(AssertionError, match="wanted"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        for block in blocks:
            self.naive.take(block)
            self.naive.tables.append([block])
        if blocks:
            del self.naive.tables[-count:]
            self.naive.tables.append(blocks)

    @precondition(lambda self: self.naive.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.naive.tables))
        self.pool.release(list(table))
        self.naive.drop(table)
        self.naive.tables = [other for other in self.naive.tables if other]

    @precondition(lambda self: self.naive.tables)
    @rule(data=st.data(), key=st.integers(0, 4))
    def publish(self, data: st.DataObject, key: int) -> None:
        table = data.draw(st.sampled_from(self.naive.tables))
        block = data.draw(st.sampled_from(table))
        self.pool.publish(block, _key(key))
        if block not in self.naive.keys and key not in self.naive.keys.values():
            self.naive.keys[block] = key

    @precondition(lambda self: self.naive.tables)
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.naive.tables))
        block = data.draw(st.sampled_from(table))
        self.pool.unpublish(block)
        self.naive.keys.pop(block, None)

    @rule(keys=st.lists(st.integers(0, 4), max_size=4, unique=True))
    def acquire_hits(self, keys: list[int]) -> None:
        hits = self.pool.lookup(map(_key, keys))
        assert hits == self.naive.lookup(keys)
        assert self.pool.count_cached_free(hits) == sum(self.naive.count(block) == 0 for block in hits)
        self.pool.acquire(hits)
        if hits:
            self.naive.released = [block for block in self.naive.released if block not in hits]
            self.naive.tables.append(hits)

    @rule()
    def reset_cache(self) -> None:
        self.pool.reset_cache()
        self.naive.keys.clear()
        self.naive.released.clear()

    @invariant()
    def same(self) -> None:
        self.pool.check(self.naive.tables)
        assert self.pool.num_free == self.naive.num_free
        assert self.pool.num_cached_free == len(self.naive.released)
        for block in range(NUM_BLOCKS):
            key = self.naive.keys.get(block)
            count = self.naive.count(block)
            assert self.pool.key_of(block) == (None if key is None else _key(key))
            assert self.pool.is_shared(block) == (count > 1)
            assert self.pool.is_writable(block) == (count == 1 and key is None)


def _key(key: int) -> bytes:
    return bytes([key])


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPoolAgainstNaiveModel = PoolMachine.TestCase


# --- one rule at a time -----------------------------------------------------------------------------------------


def test_a_sequence_is_evicted_from_its_end() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.publish(block, _key(i))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.lookup(map(_key, range(3))) == blocks[:2]


def test_of_two_blocks_with_one_key_the_first_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, _key(0))
    pool.publish(second, _key(0))
    assert pool.lookup([_key(0)]) == [first]
    assert pool.key_of(second) is None


def test_without_caching_nothing_is_published() -> None:
    pool = BlockPool(1, enable_caching=False)
    (block,) = pool.allocate(1)
    pool.publish(block, _key(0))
    assert pool.lookup([_key(0)]) == []


def test_releasing_more_often_than_held_is_a_bug() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(blocks)


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 1]]])
def test_check_sees_tables_that_do_not_match(tables: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.check([[0]])
    with pytest.raises(AssertionError, match="references differ"):
        pool.check(tables)


def test_keys_depend_on_salt_on_what_came_before_and_on_every_id() -> None:
    ids = array("i", [1, 2, 3, 4])
    roots = [root_key(None), root_key("a"), root_key("b")]
    keys = [block_key(root, ids) for root in roots]
    keys += [block_key(keys[0], ids), block_key(roots[0], array("i", [1, 2, 3, 5]))]
    assert len(set(keys)) == len(keys)
    assert block_key(root_key(None), ids) == keys[0]
    assert root_key("") == root_key(None)
