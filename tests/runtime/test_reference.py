"""The reference executor on tiny models: against plain formulas, and exactly independent of the schedule."""

import dataclasses
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.contract.step import NOT_FINITE, ForwardResult, Sampling, SeqStep, TokenLogprobs
from segue.errors import CapacityError
from segue.models import build_program
from segue.models.program import Program
from segue.runtime.reference import ReferenceExecutor
from segue.sample.reference import row_logprobs, sample_row
from segue.weights.dequantize import dequantize
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile
from tests.models.programs import rope_of, with_rope
from tests.weights.make_gguf import tiny_llama

FloatArray = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

VOCAB = 320
TOKENS = [5, 17, 255, 3, 3, 99, 280, 41, 7, 120, 64, 200, 9]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> ReferenceExecutor:
    model = load_gguf(tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"))
    return ReferenceExecutor(build_program(model), model)


# --- Against plain formulas -----------------------------------------------------------------------------


def plain_llama(model: ModelFile, program: Program, tokens: list[int]) -> Wide:
    """Logits [n, vocab] of a whole sequence at once, in f64, rotating pairs as complex numbers."""

    attention = program.attentions[0]
    rope = rope_of(program)

    def weight(name: str) -> Wide:
        return dequantize(model.tensors[f"{name}.weight"]).astype(np.float64)

    def norm(x: Wide, name: str) -> Wide:
        return np.asarray(x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * weight(name), np.float64)

    def rotate(x: Wide) -> Wide:
        """[n, heads, head_dim]"""
        d = rope.dim
        factors = np.asarray(rope.factors or np.ones(d // 2))
        angles = np.arange(len(x))[:, None] * rope.theta ** (-np.arange(0, d, 2) / d) / factors
        paired = np.arange(d).reshape(-1, 2) if rope.interleaved else np.arange(d).reshape(2, -1).T
        pairs = x[..., paired]
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
        out = x.copy()
        out[..., paired[:, 0]], out[..., paired[:, 1]] = turned.real, turned.imag
        return out

    def heads(x: Wide, name: str) -> Wide:
        return (x @ weight(name).T).reshape(len(x), -1, attention.head_dim)

    n = len(tokens)
    group = attention.num_heads // attention.num_kv_heads
    x = weight("token_embd")[tokens]
    for layer in range(len(program.attentions)):
        blk = f"blk.{layer}"
        y = norm(x, f"{blk}.attn_norm")
        q = rotate(heads(y, f"{blk}.attn_q"))
        k = np.repeat(rotate(heads(y, f"{blk}.attn_k")), group, axis=1)
        v = np.repeat(heads(y, f"{blk}.attn_v"), group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(attention.head_dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)
        x = x + attended.reshape(n, -1) @ weight(f"{blk}.attn_output").T
        y = norm(x, f"{blk}.ffn_norm")
        gate = y @ weight(f"{blk}.ffn_gate").T
        up = y @ weight(f"{blk}.ffn_up").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{blk}.ffn_down").T
    output = "output" if "output.weight" in model.tensors else "token_embd"
    return np.asarray(norm(x, "output_norm") @ weight(output).T, np.float64)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_type": "Q4_1"},
        {"tensor_type": "Q4_0", "kv_heads": 1},
        {"tensor_type": "Q8_0", "kv_heads": 4},
        {"tensor_type": "F16", "tied": False},
        {"tensor_type": "BF16", "hidden": 96, "heads": 3, "kv_heads": 3},
        {"tensor_type": "F32", "head_dim": 32, "rope_freqs": True},
        {"tensor_type": "F32", "metadata": {"llama.rope.dimension_count": 8}},
    ],
    ids=str,
)
@pytest.mark.parametrize("interleaved", [True, False])
def test_logits_are_the_formulas(tmp_path: Path, options: dict[str, Any], interleaved: bool) -> None:
    model = load_gguf(tiny_llama(tmp_path / "tiny.gguf", **options))
    program = with_rope(build_program(model), interleaved=interleaved)
    logits = ReferenceExecutor(program, model).logits(TOKENS)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, plain_llama(model, program, TOKENS), rtol=0, atol=5e-5)


# --- Exactness ------------------------------------------------------------------------------------------


def scored(tokens: Sequence[int], start: int, blocks: list[int]) -> SeqStep:
    """A step that reports the log-probability of every id at every input."""
    return SeqStep(
        start=start,
        tokens=tokens,
        blocks=blocks,
        prompt_targets=[0] * len(tokens),
        num_prompt_logprobs=VOCAB,
    )


def expected_scores(executor: ReferenceExecutor, tokens: list[int]) -> list[TokenLogprobs]:
    return [row_logprobs(row, 0, VOCAB) for row in executor.logits(tokens)]


@settings(max_examples=25)
@given(data=st.data())
def test_results_do_not_depend_on_the_schedule(executor: ReferenceExecutor, data: st.DataObject) -> None:
    """Sequences in random chunks, batches, block sizes and scattered blocks: the bits of each run alone."""
    block_size = data.draw(st.sampled_from([1, 2, 5, 16]))
    sequences = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), max_size=4))
    per_sequence = -(-12 // block_size)
    block_ids = data.draw(st.permutations(range(4 * per_sequence)))
    executor.allocate_kv(4 * per_sequence, block_size)
    done = [0] * len(sequences)
    scores: list[list[TokenLogprobs]] = [[] for _ in sequences]
    while any(done[i] < len(tokens) for i, tokens in enumerate(sequences)):
        seqs, indices = [], []
        for i, tokens in enumerate(sequences):
            count = data.draw(st.integers(0, len(tokens) - done[i]))
            if count:
                blocks = list(block_ids[i * per_sequence : (i + 1) * per_sequence])
                seqs.append(scored(tokens[done[i] : done[i] + count], done[i], blocks))
                indices.append(i)
                done[i] += count
        result = executor.forward(seqs)
        for index, i in enumerate(indices):
            scores[i] += result.prompt_logprobs[index]
    for i, tokens in enumerate(sequences):
        assert scores[i] == expected_scores(executor, tokens)


def test_copies_come_first_and_copied_blocks_are_independent(executor: ReferenceExecutor) -> None:
    executor.allocate_kv(4, 4)
    executor.forward([SeqStep(start=0, tokens=TOKENS[:6], blocks=[3, 1])])
    # A fork at position 5: block 1 is copied to 0, where the fork goes on with another token.
    fork = [*TOKENS[:5], 300, 301]
    result = executor.forward([scored(TOKENS[6:8], 6, [3, 1]), scored(fork[5:], 5, [3, 0])], copies=[(1, 0)])
    assert result.prompt_logprobs[0] == expected_scores(executor, TOKENS[:8])[6:]
    assert result.prompt_logprobs[1] == expected_scores(executor, fork)[5:]


# --- Sampling -------------------------------------------------------------------------------------------


def forward_one(executor: ReferenceExecutor, seq: SeqStep) -> ForwardResult:
    executor.allocate_kv(1, 32)
    return executor.forward([seq])


def test_rows_are_sampled_as_if_their_drafts_were_right(executor: ReferenceExecutor) -> None:
    sampling = Sampling(
        temperature=2.0,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        output_start=2,
        seed=11,
        num_logprobs=3,
    )
    tokens, drafts = TOKENS[:4], [7, 7, 120]
    # The history goes on beyond this step's inputs, as the engine's may.
    history = array("i", [*tokens, 1, 2])
    seq = SeqStep(
        start=0,
        tokens=tokens,
        drafts=drafts,
        blocks=[0],
        sampling=sampling,
        history=history,
        history_len=len(tokens),
    )
    result = forward_one(executor, seq)
    logits = executor.logits(tokens + drafts)
    assert len(result.tokens) == 4
    for i, token in enumerate(result.tokens):
        row = logits[3 + i]
        assert token == sample_row(row, sampling, 4 + i, [*tokens, *drafts[:i]])
        assert result.logprobs[i] == row_logprobs(row, token, 3)


def test_rows_are_numbered_over_sampled_sequences_only(executor: ReferenceExecutor) -> None:
    executor.allocate_kv(3, 8)
    seqs = [
        SeqStep(start=0, tokens=TOKENS[:3], blocks=[0]),
        SeqStep(start=0, tokens=TOKENS[:2], blocks=[1], drafts=[9], sampling=Sampling()),
        SeqStep(start=0, tokens=TOKENS[:4], blocks=[2], sampling=Sampling(num_logprobs=0)),
    ]
    result = executor.forward(seqs)
    alone = [int(executor.logits(ids)[-1].argmax()) for ids in (TOKENS[:2], [*TOKENS[:2], 9], TOKENS[:4])]
    assert result.tokens == alone
    assert set(result.logprobs) == {2}
    assert result.prompt_logprobs == {}
    assert result.errors == {}


def test_a_sequence_that_is_not_finite_is_reported_alone(tmp_path: Path) -> None:
    model = load_gguf(tiny_llama(tmp_path / "tiny.gguf", tensor_type="F32", tied=False))
    embedding = model.tensors["token_embd.weight"]
    data = embedding.data.copy()
    data.view("<f4").reshape(embedding.shape)[42] = np.nan
    tensors = {**model.tensors, embedding.name: dataclasses.replace(embedding, data=data)}
    model = dataclasses.replace(model, tensors=tensors)
    executor = ReferenceExecutor(build_program(model), model)
    executor.allocate_kv(4, 4)
    seqs = [
        SeqStep(start=0, tokens=tokens, blocks=[block], sampling=sampling)
        for block, (tokens, sampling) in enumerate(
            [([1, 2], Sampling()), ([1, 42], Sampling()), ([42], None), ([3], Sampling())]
        )
    ]
    result = executor.forward(seqs)
    assert result.errors == {1: NOT_FINITE}  # no row of sequence 2 is wanted
    assert len(result.tokens) == 2


# --- Limits ---------------------------------------------------------------------------------------------


def test_sizes(executor: ReferenceExecutor) -> None:
    assert executor.vocab_size == VOCAB
    assert executor.max_model_len == 256
    assert executor.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, k and v, KV heads, head_dim, f32


@pytest.mark.parametrize("num_blocks", [2**40, 2**62])
def test_kv_that_does_not_fit(executor: ReferenceExecutor, num_blocks: int) -> None:
    with pytest.raises(CapacityError, match=f"{num_blocks} KV blocks of 16 tokens"):
        executor.allocate_kv(num_blocks, 16)
