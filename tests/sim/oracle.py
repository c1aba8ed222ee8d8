"""A model without weights: its KV cache remembers what was written where, and it complains when that is not so.

A slot holds (position, id, hash of all ids up to and with it), as a real KV entry depends on its whole prefix. Before
a sequence reads, every slot that its block table shows is checked; an id is drawn from the hash, shaped so
that n-grams repeat and a draft model is often right. `draw` is the definition that the plain model uses, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NoReturn

from segue.contract.step import NOT_FINITE, ForwardResult, Sampling, SeqStep, TokenLogprobs
from segue.errors import FailedError

MASK = 2**61 - 1
ROOT = 0x5EC0E
REFUSED = "tokens: injected refusal"
POISON = (-1, -1, -1)
"""In slots that a failed call should have written, and what was computed from them. None of it may come out."""
INJECTED = "injected failure\nwith a second line"


def mix(a: int, b: int) -> int:
    """A cheap, well-mixed hash of two numbers."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & MASK
    x ^= x >> 29
    x = (x * 0xBF58476D1CE4E5B9) & MASK
    return x ^ (x >> 32)


@dataclass(frozen=True)
class OracleModel:
    """What follows a prefix."""

    vocab_size: int = 32
    flavour: int = 0
    """Another flavour agrees most of the time: a draft model."""

    def logits_id(self, prefix: int, last: int) -> int:
        """The most likely id after a prefix with this hash that ends in `last`."""
        if prefix % 5 == 0:
            return prefix // 5 % self.vocab_size
        if self.flavour and prefix % 7 == self.flavour:
            return prefix // 7 % self.vocab_size
        return (last * 7 + 3) % 11 % self.vocab_size

    def draw(
        self,
        prefix: int,
        last: int,
        sampling: Sampling,
        position: int,
        history: Sequence[int],
        mask: bytes | None,
    ) -> int:
        """The id for `position`, drawn after a prefix from those that the mask has."""
        token = self.logits_id(prefix, last)
        if sampling.temperature > 0:
            noise = mix(sampling.seed, position)
            if noise % 3 == 0:
                token = (token + noise // 3) % self.vocab_size
        if sampling.has_penalties:
            token = (token + history.count(token)) % self.vocab_size
        for biased, _ in sampling.logit_bias:
            if mix(prefix, biased) % 4 == 0:
                token = biased
        for _ in range(self.vocab_size):
            is_banned = position < sampling.banned_until and token in sampling.banned
            if not is_banned and (mask is None or mask[token // 8] >> token % 8 & 1):
                break
            token = (token + 1) % self.vocab_size
        return token

    def score(self, prefix: int, token: int, num_top: int) -> TokenLogprobs:
        """The logprobs of `token` after a prefix: made up, but of nothing else."""
        tops = tuple(mix(prefix, i) % self.vocab_size for i in range(num_top))
        value = -float(mix(prefix, token) % 1000) / 64
        return TokenLogprobs(
            value, 1 + mix(prefix, token) % 7, tops, tuple(value - i for i in range(num_top))
        )


class Failure(Enum):
    """Where a call stops."""

    BEFORE_COPIES = auto()
    AFTER_COPIES = auto()


@dataclass
class OracleExecutor:
    """An `Executor` over an `OracleModel`. `violations` lists what must never happen."""

    model: OracleModel = field(default_factory=OracleModel)
    max_model_len: int = 1 << 20
    violations: list[str] = field(default_factory=list)
    fail_next: Failure | None = None
    """Raise at the next call, if there is one."""
    nan_next: int | None = None
    """Report this sequence of the next call (modulo their number) as not finite."""
    refuse_next: int | None = None
    """Refuse this sequence of the next call: nothing of it is read or written."""
    follower: "OracleExecutor | None" = None
    """A draft model, which is not called when this one fails."""
    num_calls: int = 0
    num_computed: int = 0
    """Inputs of the sequences that had no error, in calls that did not fail."""
    closed: bool = False
    log: list[list[tuple[int, tuple[int, ...]]]] | None = None
    """When a list: (start, inputs) of every sequence of every call."""

    def __post_init__(self) -> None:
        self._slots: list[tuple[int, int, int] | None] = []
        self._block_size = 1

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        return 1

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._slots = [None] * (num_blocks * block_size)
        self._block_size = block_size

    def close(self) -> None:
        self.closed = True

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        self.num_calls += 1
        if self.closed:
            self.violations.append("computed after the end")
        failure, self.fail_next = self.fail_next, None
        if failure is Failure.BEFORE_COPIES:
            self._spoil_copies(copies)
        else:
            self._copy(copies)
        if failure is not None:
            self._fail([slot for seq in seqs for slot in self._written_slots(seq)], copies)
        if self.log is not None:
            self.log.append([(seq.start, (*seq.tokens, *seq.drafts)) for seq in seqs])
        if not all(seq.tokens for seq in seqs):
            self.violations.append("a sequence without input")
        result = ForwardResult([], {}, {}, self._injected_errors(seqs))
        computed = {i: seq for i, seq in enumerate(seqs) if result.errors.get(i) != REFUSED}
        prefixes = [self._read_prefix(i, seq) for i, seq in computed.items()]
        for (i, seq), (ids, hashes) in zip(computed.items(), prefixes, strict=True):
            self._write(seq, ids, hashes)
            if i not in result.errors:
                self._sample(i, seq, ids, hashes, result)
                self.num_computed += len(seq.tokens) + len(seq.drafts)
        written = [slot for seq in computed.values() for slot in self._written_slots(seq)]
        if len(set(written)) != len(written):
            self.violations.append("two sequences of one step write the same slot")
        for i in result.errors:
            for slot in self._written_slots(seqs[i]):
                self._slots[slot] = POISON
        return result

    def _injected_errors(self, seqs: Sequence[SeqStep]) -> dict[int, str]:
        errors: dict[int, str] = {}
        if self.nan_next is not None and seqs:
            errors[self.nan_next % len(seqs)] = NOT_FINITE
            self.nan_next = None
        if self.refuse_next is not None and seqs:
            errors[self.refuse_next % len(seqs)] = REFUSED
            self.refuse_next = None
        return errors

    def _fail(self, unwritten: Sequence[int], copies: Sequence[tuple[int, int]]) -> NoReturn:
        """Nobody may count on what should have been written. Later steps in flight still read it, in vain."""
        for slot in unwritten:
            self._slots[slot] = POISON
        if self.follower is not None:
            self.follower._spoil_copies(copies)
        raise FailedError(INJECTED)

    def _spoil_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        """They were to be made and are not."""
        for _, target in copies:
            for slot in range(target * self._block_size, (target + 1) * self._block_size):
                self._slots[slot] = POISON

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        size = self._block_size
        for source, target in copies:
            self._slots[target * size : (target + 1) * size] = self._slots[
                source * size : (source + 1) * size
            ]

    def holds(self, block: int, position: int) -> tuple[int, int, int] | None:
        """(position, id, hash of the prefix) in the slot of `position` in this block."""
        return self._slots[block * self._block_size + position % self._block_size]

    def _slot(self, seq: SeqStep, position: int) -> int:
        return seq.blocks[position // self._block_size] * self._block_size + position % self._block_size

    def _written_slots(self, seq: SeqStep) -> list[int]:
        end = seq.start + len(seq.tokens) + len(seq.drafts)
        return [self._slot(seq, p) for p in range(seq.start, end) if p < len(seq.blocks) * self._block_size]

    def _read_prefix(self, index: int, seq: SeqStep) -> tuple[list[int], list[int]]:
        """Ids and prefix hashes at positions below `start`, as the block table shows them, checked."""
        ids: list[int] = []
        hashes: list[int] = []
        chain = ROOT
        size = self._block_size
        for position in range(seq.start):
            entry = self._slots[seq.blocks[position // size] * size + position % size]
            if entry is POISON:
                break
            if entry is None or entry[0] != position or entry[2] != mix(chain, entry[1]):
                self.violations.append(f"sequence {index}: KV at position {position} is not its own: {entry}")
                break
            ids.append(entry[1])
            chain = entry[2]
            hashes.append(chain)
        if seq.after is not None:
            self.violations.append("a reference reached the executor")
        return ids, hashes

    def _write(self, seq: SeqStep, ids: list[int], hashes: list[int]) -> None:
        chain = hashes[-1] if hashes else ROOT
        if len(ids) < seq.start:
            for slot in self._written_slots(seq):
                self._slots[slot] = POISON
            return
        for position, token in enumerate((*seq.tokens, *seq.drafts), start=seq.start):
            if not 0 <= token < self.vocab_size or position >= self.max_model_len:
                self.violations.append(f"id {token} at position {position} is out of range")
            if position >= len(seq.blocks) * self._block_size:
                self.violations.append(f"position {position} lies beyond the block table")
                continue
            chain = mix(chain, token)
            self._slots[self._slot(seq, position)] = (position, token, chain)
            ids.append(token)
            hashes.append(chain)

    def _sample(
        self, index: int, seq: SeqStep, ids: list[int], hashes: list[int], result: ForwardResult
    ) -> None:
        end = seq.start + len(seq.tokens)
        sampling = seq.sampling
        if len(ids) < end + len(seq.drafts):
            self._sample_poison(index, seq, result)
            return
        if sampling is not None:
            if sampling.has_penalties and (seq.history is None or list(seq.history[:end]) != ids[:end]):
                self.violations.append(f"sequence {index}: history {seq.history} is not {ids[:end]}")
            for row in range(1 + len(seq.drafts)):
                position = end + row
                prefix = hashes[position - 1]
                mask = seq.masks[row] if seq.masks else None
                token = self.model.draw(prefix, ids[position - 1], sampling, position, ids[:position], mask)
                if sampling.num_logprobs is not None:
                    scores = self.model.score(prefix, token, sampling.num_logprobs)
                    result.logprobs[len(result.tokens)] = scores
                result.tokens.append(token)
        if seq.prompt_targets:
            result.prompt_logprobs[index] = [
                self.model.score(hashes[seq.start + i], target, seq.num_prompt_logprobs)
                for i, target in enumerate(seq.prompt_targets)
            ]

    def _sample_poison(self, index: int, seq: SeqStep, result: ForwardResult) -> None:
        """Well-formed nonsense, for a request whose earlier step has failed."""
        nonsense = TokenLogprobs(1.0, 0, (), ())
        if seq.sampling is not None:
            for _ in range(1 + len(seq.drafts)):
                result.logprobs[len(result.tokens)] = nonsense
                result.tokens.append(0)
        if seq.prompt_targets:
            result.prompt_logprobs[index] = [nonsense for _ in seq.prompt_targets]


@dataclass
class OracleDraftExecutor(OracleExecutor):
    """A draft model's KV, which must show the same ids as the target's in the same slots."""

    target: OracleExecutor = field(default_factory=OracleExecutor)
    _target_calls: int = -1
    _round: list[SeqStep] = field(default_factory=list)
    """What it was to compute since the target's last call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.target.follower = self

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        is_first_pass = self._target_calls != self.target.num_calls
        self._target_calls = self.target.num_calls
        if is_first_pass:
            self._round = []
        self._round += seqs
        failure, self.fail_next = self.fail_next, None
        if failure is not None:
            self._spoil_copies(copies)
            # What it computes once more is there already.
            self._fail(self._wrong(), copies)
        self._copy(copies)
        if copies and not seqs:
            # The copies of a call that failed are made up for, and what it wrote, in any pass, is lost under them.
            for slot in self._wrong():
                self._slots[slot] = POISON
        if is_first_pass:
            for seq in seqs:
                self._compare(seq)
        wrong = set(self._wrong())
        right = {
            slot: self._slots[slot] for seq in seqs for slot in self._written_slots(seq) if slot not in wrong
        }
        result = super().forward(seqs)
        for i in result.errors:
            for slot in self._written_slots(seqs[i]):
                self._slots[slot] = right.get(slot, POISON)
        return result

    def _wrong(self) -> list[int]:
        """Of the slots that this round was to write, those that hold something else."""
        wrong = []
        for seq in self._round:
            before = self._slots[self._slot(seq, seq.start - 1)] if seq.start else (-1, -1, ROOT)
            for position, token in enumerate(seq.tokens, start=seq.start):
                slot = self._slot(seq, position)
                if before is None or before is POISON:
                    wrong.append(slot)
                    continue
                before = (position, token, mix(before[2], token))
                if self._slots[slot] != before:
                    wrong.append(slot)
        return wrong

    def _compare(self, seq: SeqStep) -> None:
        """After a failed step of this sequence the draft KV of that step is missing, too; after a failure of the draft
        model there is poison until the sequence's flights have landed."""
        slots = [self._slot(seq, position) for position in range(seq.start)]
        has_failed = any(POISON in (self.target._slots[slot], self._slots[slot]) for slot in slots)
        for position, slot in enumerate(slots):
            if self._slots[slot] != self.target._slots[slot]:
                if has_failed:
                    self._slots[slot] = POISON
                elif self._slots[slot] is not POISON:
                    self.violations.append(f"draft KV at position {position} is of another history")
                return
