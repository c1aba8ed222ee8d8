"""The reference executor: NumPy, f32, readable, slow. What the native one is checked against.

It interprets the program line by line on dequantised weights. Rows are computed one at a time, with arrays
whose shapes depend on the row's position only: BLAS picks its order of summation by shape, so a row's bits
depend on nothing but its own sequence.
"""

from collections.abc import Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt

from segue.contract.step import NOT_FINITE, ForwardResult, SeqStep
from segue.errors import CapacityError
from segue.models.program import Attention, Embed, Linear, Logits, Program, RMSNorm, Rope, SiluMul
from segue.runtime.refusal import Refusal, check
from segue.sample.reference import all_finite, masked, row_logprobs, sample_row
from segue.weights.dequantize import dequantize
from segue.weights.model_file import ModelFile

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class ReferenceExecutor:
    """An `Executor` (`contract/step.py`). Holds the weights in f32: eight times a 4-bit file's size."""

    def __init__(self, program: Program, model: ModelFile) -> None:
        self._program = program
        self._weights = _load_weights(program, model)
        self._rotations = {op.rope: _rotation(op.rope, program.max_model_len) for op in program.attentions}
        self._kv = _PagedKV(program, num_blocks=0, block_size=1)

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._program.max_model_len

    @property
    def kv_bytes_per_token(self) -> int:
        sizes = (2 * op.num_kv_heads * op.head_dim for op in self._program.attentions)
        return sum(sizes) * np.float32().itemsize

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks · block_size` positions. Raises CapacityError when there is none."""
        try:
            self._kv = _PagedKV(self._program, num_blocks, block_size)
        except (MemoryError, ValueError):  # ValueError: more bytes than an address can count
            size = num_blocks * block_size * self.kv_bytes_per_token
            raise CapacityError(
                f"no memory for {num_blocks} KV blocks of {block_size} tokens ({size / 2**30:.1f} GiB): "
                "lower num_kv_blocks"
            ) from None

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        """Copy blocks, then compute all inputs of all sequences and sample."""
        for pair in copies:
            if len(pair) != 2 or not all(0 <= block < self._kv.num_blocks for block in pair):
                raise ValueError(f"copies: {pair} is no pair of blocks in [0, {self._kv.num_blocks})")
        for source, destination in copies:
            self._kv.copy_block(source, destination)
        result = ForwardResult(tokens=[], logprobs={}, prompt_logprobs={}, errors={})
        accepted: dict[int, SeqStep] = {}
        for index, seq in enumerate(seqs):
            if (why := self._refusal(seq)) is None:
                accepted[index] = seq
            else:
                result.errors[index] = why
        steps = list(accepted.values())
        logits = self._compute(steps, [_wanted_inputs(seq) for seq in steps], self._kv)
        for (index, seq), rows in zip(accepted.items(), logits, strict=True):
            _sample(seq, index, rows, result)
        return result

    def _refusal(self, seq: SeqStep) -> str | None:
        """Why a sequence cannot be computed; None when it can."""
        try:
            check(
                seq,
                vocab_size=self.vocab_size,
                max_model_len=self.max_model_len,
                num_blocks=self._kv.num_blocks,
                block_size=self._kv.block_size,
            )
        except (Refusal, AttributeError) as error:  # AttributeError: it is no SeqStep at all
            return str(error)
        return None

    def logits(self, token_ids: Sequence[int]) -> FloatArray:
        """[n, vocab]: the logits at each of `token_ids`, computed with a KV of their own."""
        block = SeqStep(start=0, tokens=token_ids, blocks=[0])
        kv = _PagedKV(self._program, num_blocks=1, block_size=len(token_ids))
        rows = self._compute([block], [range(len(token_ids))], kv)[0]
        return np.stack([rows[i] for i in range(len(token_ids))])

    def close(self) -> None:
        self._kv = _PagedKV(self._program, num_blocks=0, block_size=1)

    def _compute(
        self, seqs: Sequence[SeqStep], wanted: Sequence[Sequence[int]], kv: "_PagedKV"
    ) -> list[dict[int, FloatArray]]:
        """For each sequence, the logits [vocab] of its wanted inputs."""
        batch = [_Rows(seq, kv.block_size) for seq in seqs]
        token_ids = [token for rows in batch for token in rows.token_ids]
        buffers = {
            name: np.zeros((len(token_ids), width), np.float32)
            for name, width in self._program.widths.items()
        }
        logits: list[dict[int, FloatArray]] = [{} for _ in seqs]
        for op in self._program.ops:
            match op:
                case Embed():
                    buffers[op.out][:] = self._weights[op.weight,][token_ids]
                case RMSNorm():
                    for row, x in enumerate(buffers[op.x]):
                        buffers[op.out][row] = _rms_norm(x, self._weights[op.weight,][0], op.eps)
                case Linear():
                    for row, x in enumerate(buffers[op.x]):
                        product = self._weights[op.weights] @ x
                        buffers[op.out][row] = buffers[op.out][row] + product if op.accumulate else product
                case Attention():
                    first = 0
                    for rows in batch:
                        own = slice(first, first + len(rows.token_ids))
                        buffers[op.out][own] = self._attend(op, buffers[op.qkv][own], rows, kv)
                        first = own.stop
                case SiluMul():
                    buffers[op.out][:] = _silu_mul(buffers[op.x])
                case Logits():
                    first = 0
                    for rows, inputs, into in zip(batch, wanted, logits, strict=True):
                        for i in inputs:
                            x = _rms_norm(buffers[op.x][first + i], self._weights[op.norm,][0], op.eps)
                            into[i] = self._weights[op.weight,] @ x
                        first += len(rows.token_ids)
                case _:
                    assert_never(op)
        return logits

    def _attend(self, op: Attention, qkv: FloatArray, rows: "_Rows", kv: "_PagedKV") -> FloatArray:
        """One sequence: [rows, (heads + 2·kv_heads) · head_dim] → [rows, heads · head_dim]."""
        heads, kv_heads = op.num_heads, op.num_kv_heads
        end = rows.start + len(qkv)
        cos, sin = (table[rows.start : end, None, :] for table in self._rotations[op.rope])
        split = qkv.reshape(len(qkv), heads + 2 * kv_heads, op.head_dim)
        q = _rotate(split[:, :heads], op.rope, cos, sin)
        k = _rotate(split[:, heads : heads + kv_heads], op.rope, cos, sin)
        k[~np.isfinite(k)] = np.nan  # a score of -inf would only hide the key; a NaN is found in the logits
        kv.write(op.layer, rows.slots[rows.start : end], k, split[:, heads + kv_heads :])
        keys, values = kv.read(op.layer, rows.slots[:end])

        out = np.empty((len(qkv), heads * op.head_dim), np.float32)
        scale = np.float32(1 / np.sqrt(op.head_dim))
        for row, position in enumerate(range(rows.start, end)):
            grouped = q[row].reshape(kv_heads, heads // kv_heads, op.head_dim)
            scores = grouped @ keys[:, : position + 1].transpose(0, 2, 1) * scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[row] = (weights @ values[:, : position + 1]).reshape(-1)
        return out


class _Rows:
    """One sequence's inputs in a step, and the KV slots of its positions `[0, end)`."""

    def __init__(self, seq: SeqStep, block_size: int) -> None:
        self.start = seq.start
        self.token_ids = [*seq.tokens, *seq.drafts]
        positions = np.arange(seq.start + len(self.token_ids))
        blocks = np.asarray(seq.blocks, dtype=np.int64)
        self.slots: IntArray = blocks[positions // block_size] * block_size + positions % block_size


class _PagedKV:
    """Keys and values, f32, of `num_blocks · block_size` slots in each layer."""

    def __init__(self, program: Program, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = num_blocks * block_size
        shapes = [(slots, op.num_kv_heads, op.head_dim) for op in program.attentions]
        self._keys = [np.zeros(shape, np.float32) for shape in shapes]
        self._values = [np.zeros(shape, np.float32) for shape in shapes]

    def write(self, layer: int, slots: IntArray, keys: FloatArray, values: FloatArray) -> None:
        """keys, values [rows, kv_heads, head_dim], one row for each slot."""
        self._keys[layer][slots] = keys
        self._values[layer][slots] = values

    def read(self, layer: int, slots: IntArray) -> tuple[FloatArray, FloatArray]:
        """Keys and values [kv_heads, slots, head_dim], contiguous."""
        keys = self._keys[layer][slots].transpose(1, 0, 2)
        values = self._values[layer][slots].transpose(1, 0, 2)
        return np.ascontiguousarray(keys), np.ascontiguousarray(values)

    def copy_block(self, source: int, destination: int) -> None:
        size = self.block_size
        for array in (*self._keys, *self._values):
            array[destination * size : (destination + 1) * size] = array[source * size : (source + 1) * size]


def _load_weights(program: Program, model: ModelFile) -> dict[tuple[str, ...], FloatArray]:
    """f32 matrices by the names of what is stacked in them. A vector is a matrix of one row."""
    stacks: set[tuple[str, ...]] = set()
    for op in program.ops:
        match op:
            case Embed() | RMSNorm():
                stacks.add((op.weight,))
            case Linear():
                stacks.add(op.weights)
            case Logits():
                stacks |= {(op.norm,), (op.weight,)}
            case Attention() | SiluMul():
                pass
            case _:
                assert_never(op)
    return {
        names: np.concatenate([np.atleast_2d(dequantize(model.tensors[name])) for name in names])
        for names in sorted(stacks)
    }


def _rotation(rope: Rope, max_model_len: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin [max_model_len, dim / 2] of each pair's angle, computed in f64."""
    frequencies = rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    if rope.factors:
        frequencies = frequencies / np.asarray(rope.factors)
    angles = np.outer(np.arange(max_model_len), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: FloatArray, rope: Rope, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """x [rows, heads, head_dim] by the rows' angles, cos and sin [rows, 1, dim / 2]."""
    if rope.interleaved:
        first, second = slice(0, rope.dim, 2), slice(1, rope.dim, 2)
    else:
        first, second = slice(0, rope.dim // 2), slice(rope.dim // 2, rope.dim)
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def _rms_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    with np.errstate(over="ignore"):
        mean = np.mean(x * x)
    if not np.isfinite(
        mean
    ):  # a row whose squares overflow must not come out as zeros, which look like a result
        mean = np.float32(np.nan)
    normed: FloatArray = x / np.sqrt(mean + np.float32(eps)) * weight
    return normed


def _silu_mul(x: FloatArray) -> FloatArray:
    width = x.shape[-1] // 2
    gate, up = x[..., :width], x[..., width:]
    with np.errstate(over="ignore"):  # e^-gate is inf for a very negative gate, and the product 0
        activated: FloatArray = gate / (1 + np.exp(-gate)) * up
    return activated


def _wanted_inputs(seq: SeqStep) -> list[int]:
    """Indices of the inputs whose logits are sampled or scored."""
    wanted = set(range(len(seq.prompt_targets)))
    if seq.sampling is not None:
        wanted |= set(range(len(seq.tokens) - 1, len(seq.tokens) + len(seq.drafts)))
    return sorted(wanted)


def _sample(seq: SeqStep, index: int, logits: dict[int, FloatArray], result: ForwardResult) -> None:
    """Append what sequence `index` of the step gave to `result`."""
    if not all(all_finite(row) for row in logits.values()):
        result.errors[index] = NOT_FINITE
        return
    if seq.prompt_targets:
        result.prompt_logprobs[index] = [
            row_logprobs(logits[i], target, seq.num_prompt_logprobs)
            for i, target in enumerate(seq.prompt_targets)
        ]
    if seq.sampling is None:
        return
    for i in range(1 + len(seq.drafts)):
        row = logits[len(seq.tokens) - 1 + i]
        allowed = row if not seq.masks else masked(row, seq.masks[i])
        token = sample_row(allowed, seq.sampling, seq.start + len(seq.tokens) + i, _history(seq, i))
        if seq.sampling.num_logprobs is not None:
            result.logprobs[len(result.tokens)] = row_logprobs(row, token, seq.sampling.num_logprobs)
        result.tokens.append(token)


def _history(seq: SeqStep, num_drafts: int) -> list[int]:
    """The ids before the one drawn after `num_drafts` drafts, where drawing needs them."""
    assert seq.sampling is not None
    if not seq.sampling.has_penalties:
        return []
    assert seq.history is not None
    return [*seq.history[: seq.start + len(seq.tokens)], *seq.drafts[:num_drafts]]
