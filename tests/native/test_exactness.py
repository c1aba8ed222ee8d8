"""A row's bits depend on its own sequence only: not on what it shares a step, a chunk, a block or a thread with."""

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.contract.step import Sampling, SeqStep, TokenLogprobs
from segue.runtime.native import NativeExecutor
from tests.native.models import (
    EVERY_OPERATION,
    EXPERTS,
    FLOAT_TYPES,
    QUANTISED_TYPES,
    UNEQUAL_LAYERS,
    Loaded,
    make_executor,
)

GREEDY = Sampling(num_logprobs=3)
MAX_LEN = 90


@pytest.fixture(scope="module")
def plain(models: dict[str, Loaded]) -> "Plain":
    return Plain(models)


class Plain:
    """Executors, and what each sequence gives by itself: one thread, one token a step, blocks of one token."""

    def __init__(self, models: dict[str, Loaded]) -> None:
        self.models = models
        self.executor = cache(self._executor)
        self.rows = cache(self._rows)

    def _executor(self, kind: str, isa: str, threads: int, kv_dtype: str) -> NativeExecutor:
        return make_executor(
            self.models[kind], isa=isa, threads=threads, kv_dtype="f32" if kv_dtype == "f32" else "f16"
        )

    def _rows(self, kind: str, isa: str, kv_dtype: str, tokens: tuple[int, ...]) -> list[TokenLogprobs]:
        executor = self.executor(kind, isa, 1, kv_dtype)
        executor.allocate_kv(len(tokens), 1)
        rows = []
        for position, token in enumerate(tokens):
            step = SeqStep(
                start=position,
                tokens=[token],
                blocks=list(range(position + 1)),
                prompt_targets=[0],
                num_prompt_logprobs=executor.vocab_size,
            )
            rows += executor.forward([step]).prompt_logprobs[0]
        return rows


@dataclass(frozen=True)
class Batch:
    """Sequences, and how each is cut into chunks: the chunks at the same index share a step."""

    sequences: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[int, ...], ...]
    block_size: int
    threads: int
    shuffle: int

    def chunks(self, index: int) -> list[tuple[int, int]]:
        edges = [0, *self.cuts[index], len(self.sequences[index])]
        return list(itertools.pairwise(edges))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(1, MAX_LEN), min_size=1, max_size=5))
    rng = np.random.default_rng(
        draw(st.integers(0, 3))
    )  # few different prefixes, so that the plain runs repeat
    ids = tuple(rng.integers(0, 300, MAX_LEN).tolist())
    return Batch(
        sequences=tuple(ids[:length] for length in lengths),
        cuts=tuple(
            tuple(sorted(draw(st.sets(st.integers(1, length - 1), max_size=4)))) if length > 1 else ()
            for length in lengths
        ),
        block_size=draw(st.sampled_from([1, 3, 4, 16, 32, 100])),
        threads=draw(st.sampled_from([1, 2, 3])),
        shuffle=draw(st.integers(0, 9)),
    )


def run_batch(executor: NativeExecutor, batch: Batch) -> list[list[TokenLogprobs]]:
    """The logprobs of all ids after each token of each sequence, from as few steps as the cuts allow."""
    per_sequence = -(-MAX_LEN // batch.block_size)
    total = per_sequence * len(batch.sequences)
    executor.allocate_kv(total, batch.block_size)
    blocks = np.random.default_rng(batch.shuffle).permutation(total).tolist()
    rows: list[list[TokenLogprobs]] = [[] for _ in batch.sequences]
    for step in range(5):
        seqs = []
        indices = []
        for index, tokens in enumerate(batch.sequences):
            if step >= len(chunks := batch.chunks(index)):
                continue
            begin, end = chunks[step]
            indices.append(index)
            seqs.append(
                SeqStep(
                    start=begin,
                    tokens=tokens[begin:end],
                    blocks=blocks[index * per_sequence : (index + 1) * per_sequence],
                    prompt_targets=[0] * (end - begin),
                    num_prompt_logprobs=executor.vocab_size,
                )
            )
        result = executor.forward(seqs)
        for i, index in enumerate(indices):
            rows[index] += result.prompt_logprobs[i]
    return rows


@pytest.mark.parametrize("kind", [*QUANTISED_TYPES, *FLOAT_TYPES, UNEQUAL_LAYERS, EVERY_OPERATION, EXPERTS])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch_gives_the_bits_of_single_tokens(
    kind: str, plain: Plain, isas: list[str], data: st.DataObject
) -> None:
    batch = data.draw(batches())
    isa = data.draw(st.sampled_from(isas))
    kv_dtype = data.draw(st.sampled_from(["f16", "f32"]))
    rows = run_batch(plain.executor(kind, isa, batch.threads, kv_dtype), batch)
    longest = max(batch.sequences, key=len)
    expected = plain.rows(kind, isa, kv_dtype, longest)
    for tokens, got in zip(batch.sequences, rows, strict=True):
        assert got == expected[: len(tokens)]


@pytest.mark.parametrize("length", [1, 7, 12, 16, 31, 65, 130, 300])
@pytest.mark.parametrize(
    "kind", ["Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "F32", EVERY_OPERATION, EXPERTS]
)
def test_any_number_of_rows_gives_the_bits_of_the_longest(
    kind: str, length: int, models: dict[str, Loaded], isas: list[str]
) -> None:
    ids = np.random.default_rng(5).integers(0, 300, 300).tolist()
    for isa in isas:
        whole = make_executor(models[kind], isa=isa, threads=2).logits(ids)
        for threads in (1, 3):
            part = make_executor(models[kind], isa=isa, threads=threads).logits(ids[:length])
            assert np.array_equal(part, whole[:length]), isa


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("kind", ["Q4_1", UNEQUAL_LAYERS, EVERY_OPERATION])
def test_one_long_sequence_is_cut_by_positions_only(
    kind: str, threads: int, block_size: int, models: dict[str, Loaded]
) -> None:
    """Beyond one range of keys, single tokens share their keys among threads and chunks do not."""
    ids = np.random.default_rng(6).integers(0, 300, 1100).tolist()
    executor = make_executor(models[kind], threads=threads)
    executor.allocate_kv(-(-len(ids) // block_size), block_size)
    blocks = list(range(-(-len(ids) // block_size)))
    whole = executor.logits(ids)
    executor.forward([SeqStep(start=0, tokens=ids[:1000], blocks=blocks)])
    drafted = executor.forward(
        [SeqStep(start=1000, tokens=ids[1000:1020], drafts=ids[1020:1030], blocks=blocks, sampling=GREEDY)]
    )
    assert drafted.tokens == whole[1019:1030].argmax(axis=1).tolist()
    for position in range(1020, 1100):
        step = SeqStep(start=position, tokens=[ids[position]], blocks=blocks, sampling=GREEDY)
        result = executor.forward([step])
        assert result.tokens == [int(whole[position].argmax())]
        if position < 1030:
            assert result.logprobs[0] == drafted.logprobs[position - 1019]
