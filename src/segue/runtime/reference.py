"""The reference executor: NumPy, f32, readable, slow. What the native one is checked against.

It interprets the program line by line on dequantised weights. Rows are computed one at a time, with arrays
whose shapes depend on the row's position only: BLAS picks its order of summation by shape, so a row's bits
depend on nothing but its own sequence.
"""

import math
from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from segue.contract.step import NOT_FINITE, ForwardResult, SeqStep
from segue.errors import CapacityError
from segue.models.program import (
    GLU,
    Activation,
    Attention,
    Embed,
    Experts,
    Function,
    LayerNorm,
    Linear,
    Logits,
    NormParts,
    Program,
    RMSNorm,
    Rope,
)
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
        self._sizes = {name: tensor.shape[0] for name, tensor in model.tensors.items()}
        ropes = {op.rope for op in program.attentions if op.rope is not None}
        self._rotations = {rope: _rotation(rope, program.max_model_len) for rope in ropes}
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
        positions = [rows.start + i for rows in batch for i in range(len(rows.token_ids))]
        buffers = {
            name: np.zeros((len(token_ids), width), np.float32)
            for name, width in self._program.widths.items()
        }
        logits: list[dict[int, FloatArray]] = [{} for _ in seqs]
        for op in self._program.ops:
            match op:
                case Embed():
                    embedded = self._weights[op.weight,][token_ids] * np.float32(op.scale)
                    if op.positions is not None:
                        embedded += self._weights[op.positions,][op.first_position :][positions]
                    buffers[op.out][:] = embedded
                case RMSNorm():
                    for row, x in enumerate(buffers[op.x]):
                        normed = _rms_norm(x, self._weights[op.weight,][0], op.eps)
                        buffers[op.out][row] = buffers[op.out][row] + normed if op.accumulate else normed
                case LayerNorm():
                    weight, bias = self._weights[op.weight,][0], self._weights[op.bias,][0]
                    for row, x in enumerate(buffers[op.x]):
                        buffers[op.out][row] = _layer_norm(x, weight, bias, op.eps)
                case NormParts():
                    for x in buffers[op.x]:
                        for part in x[op.first :][: op.count * op.width].reshape(op.count, op.width):
                            part[:] = _rms_norm(part, self._weights[op.weight,][0], op.eps)
                case Linear():
                    bias = self._bias(op)
                    for row, x in enumerate(buffers[op.x]):
                        product = (self._weights[op.weights] @ x + bias) * np.float32(op.scale)
                        buffers[op.out][row] = buffers[op.out][row] + product if op.accumulate else product
                case Attention():
                    first = 0
                    for rows in batch:
                        own = slice(first, first + len(rows.token_ids))
                        buffers[op.out][own] = self._attend(op, buffers[op.qkv][own], rows, kv)
                        first = own.stop
                case Activation():
                    buffers[op.out][:] = _activate(buffers[op.x], op.function)
                case GLU():
                    gate, up = np.split(buffers[op.x], 2, axis=-1)
                    buffers[op.out][:] = _activate(gate, op.function) * up
                case Experts():
                    for row, x in enumerate(buffers[op.x]):
                        for expert, weight in self._route(op, x):
                            gate, up = (self._weights[name,][expert] @ x for name in (op.gate, op.up))
                            inner = _activate(gate, op.function) * up
                            buffers[op.out][row] += weight * (self._weights[op.down,][expert] @ inner)
                case Logits():
                    first = 0
                    for rows, inputs, into in zip(batch, wanted, logits, strict=True):
                        for i in inputs:
                            scores = self._weights[op.weight,] @ buffers[op.x][first + i]
                            into[i] = _soft_cap(scores * np.float32(op.scale), op.softcap)
                        first += len(rows.token_ids)
                case _:
                    assert_never(op)
        return logits

    def _bias(self, op: Linear) -> FloatArray:
        """[outputs]: zeros for the weights that have none."""
        biases = [
            np.zeros(self._sizes[weight], np.float32) if bias is None else self._weights[bias,][0]
            for weight, bias in zip(op.weights, op.biases or (None,) * len(op.weights), strict=True)
        ]
        return np.concatenate(biases)

    def _route(self, op: Experts, x: FloatArray) -> list[tuple[int, np.float32]]:
        """The experts of a row and their weights, by number. A score that is not finite makes all weights NaN."""
        scores = np.array([row @ x for row in self._weights[op.router,]])  # equal rows have equal scores
        if not np.isfinite(scores).all():
            scores = np.full_like(scores, np.nan)
        chosen = sorted(np.argsort(-scores, kind="stable")[: op.used].tolist())
        weights = np.exp(scores[chosen] - scores[chosen].max())
        return list(zip(chosen, weights / weights.sum(), strict=True))

    def _attend(self, op: Attention, qkv: FloatArray, rows: "_Rows", kv: "_PagedKV") -> FloatArray:
        """One sequence: [rows, (heads + 2·kv_heads) · head_dim] → [rows, heads · head_dim]."""
        heads, kv_heads = op.num_heads, op.num_kv_heads
        end = rows.start + len(qkv)
        split = qkv.reshape(len(qkv), heads + 2 * kv_heads, op.head_dim)
        q, k = split[:, :heads], split[:, heads : heads + kv_heads].copy()
        if op.rope is not None:
            cos, sin = (table[rows.start : end, None, :] for table in self._rotations[op.rope])
            q, k = _rotate(q, op.rope, cos, sin), _rotate(k, op.rope, cos, sin)
        k[~np.isfinite(k)] = np.nan  # a score of -inf would only hide the key; a NaN is found in the logits
        kv.write(op.layer, rows.slots[rows.start : end], k, split[:, heads + kv_heads :])
        keys, values = kv.read(op.layer, rows.slots[:end])

        out = np.empty((len(qkv), heads * op.head_dim), np.float32)
        sinks = self._sinks(op)
        for row, position in enumerate(range(rows.start, end)):
            first = 0 if op.window is None else max(0, position + 1 - op.window)
            grouped = q[row].reshape(kv_heads, heads // kv_heads, op.head_dim)
            scores = grouped @ keys[:, first : position + 1].transpose(0, 2, 1) * np.float32(op.scale)
            scores = _soft_cap(scores, op.softcap)
            largest = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
            weights = np.exp(scores - largest)
            weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - largest)
            out[row] = (weights @ values[:, first : position + 1]).reshape(-1)
        return out

    def _sinks(self, op: Attention) -> FloatArray:
        """[kv_heads, query heads of each, 1]: minus infinity where there are none."""
        shape = (op.num_kv_heads, op.num_heads // op.num_kv_heads, 1)
        return (
            np.full(shape, -np.inf, np.float32)
            if op.sinks is None
            else self._weights[op.sinks,].reshape(shape)
        )


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
            case Embed():
                stacks.add((op.weight,))
                if op.positions is not None:
                    stacks.add((op.positions,))
            case Experts():
                stacks |= {(op.router,), (op.gate,), (op.up,), (op.down,)}
            case RMSNorm() | NormParts() | Logits():
                stacks.add((op.weight,))
            case LayerNorm():
                stacks |= {(op.weight,), (op.bias,)}
            case Linear():
                stacks |= {op.weights, *((bias,) for bias in op.biases if bias is not None)}
            case Attention():
                if op.sinks is not None:
                    stacks.add((op.sinks,))
            case Activation() | GLU():
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
    return (np.cos(angles) * rope.scale).astype(np.float32), (np.sin(angles) * rope.scale).astype(np.float32)


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


def _layer_norm(x: FloatArray, weight: FloatArray, bias: FloatArray, eps: float) -> FloatArray:
    centred = x - np.mean(x)
    normed: FloatArray = _rms_norm(centred, weight, eps) + bias
    return normed


def _activate(x: FloatArray, function: Function) -> FloatArray:
    one, half = np.float32(1), np.float32(0.5)
    activated: npt.NDArray[np.floating[Any]]
    match function:
        case "silu":
            with np.errstate(over="ignore"):  # e^-x is inf for a very negative x, and the quotient 0
                activated = x / (one + np.exp(-x))
        case "gelu":
            activated = (
                half * x * (one + np.vectorize(math.erf, otypes=[np.float32])(x * np.float32(math.sqrt(0.5))))
            )
        case "gelu_tanh":
            cubic = x + np.float32(0.044715) * x * x * x
            activated = half * x * (one + np.tanh(np.float32(math.sqrt(2 / math.pi)) * cubic))
        case "relu":
            activated = np.maximum(x, np.float32(0))
        case _:
            assert_never(function)
    return activated.astype(np.float32)


def _soft_cap(scores: FloatArray, cap: float | None) -> FloatArray:
    if cap is None:
        return scores
    capped: FloatArray = np.tanh(scores / np.float32(cap)) * np.float32(cap)
    return capped


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
