"""Answers that match a grammar: which ids may come next, by llguidance (https://github.com/guidance-ai/llguidance).

A mask depends on nothing but the grammar and the answer so far. That is why grammars work with drafts (a mask for each
row), with async scheduling (asked when the ids are known) and after a preemption, and never change with the schedule.

When a grammar is finished (nothing but the end may follow, or the end was drawn) only the end may follow, again and
again: `ignore_eos` and `min_tokens` go on counting such ids.

Limits. llguidance bounds what a grammar may cost. What it counts for one mask would come out lower where another
answer, or a draft, has been in the same place before, so that limit is off. The number of lexer states counts up over
all answers and drafts that share a compiled grammar, and drafts that turn out wrong count too. Whoever runs over it is
therefore judged again, by a matcher of its own that sees the answer alone (`GrammarGuide`); and what that one finds
holds. It has fewer states than the shared one at any time, so it would not have failed earlier.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from segue.errors import RequestFailed

if TYPE_CHECKING:
    import llguidance

    from segue.contract.step import Sampling
    from segue.tokens import Tokenizer

MAX_LEXER_STATES = 50_000
"""Of one grammar; 1 to 2 kB each."""
MAX_COMPILED_GRAMMARS = 32
"""Kept for requests to come. Those that an unfinished request has are not counted."""
NO_END = "the model has no token that ends a text, which structured outputs need: use another model"
_NO_LIMIT = 2**63
_COMPILER_THREADS = 2
"""So that one slow grammar does not hold up the next."""

T = TypeVar("T")


class Guide(Protocol):
    """One answer's grammar."""

    @property
    def num_ids(self) -> int:
        """How many ids of the answer it was told last."""
        ...

    def masks(self, known: int, ids: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        """The answer is the first `known` ≤ `num_ids` ids that this was told of it, then `ids`.

        For the id after it, and after each prefix of `drafts`: a bit for each id that may be drawn, least significant
        first. It ends before the first draft that cannot be right. Raises RequestFailed when the grammar is over a
        limit.
        """
        ...


class Guides(Protocol):
    """Makes the guides of a runtime's answers, one for each `Sampling`, which holds it (`kept`)."""

    def is_ready(self, sampling: "Sampling", wait_s: float) -> bool:
        """Whether `of` will not wait. The first question begins what takes long, on a thread of its own."""
        ...

    def of(self, sampling: "Sampling") -> Guide:
        """Raises what made it impossible."""
        ...

    def close(self) -> None: ...


def kept(sampling: "Sampling", name: str, make: Callable[[], T]) -> T:
    """What was made for a `Sampling`, which holds it: it goes when the request does."""
    if name not in sampling.__dict__:
        sampling.__dict__[name] = make()
    value: T = sampling.__dict__[name]
    return value


class OverLimit(Exception):
    """A matcher has run over a limit of llguidance, or has otherwise given up."""


class _Walk:
    """A matcher, and the ids that it was told. Each was allowed by a mask that was asked for before."""

    def __init__(self, matcher: "llguidance.LLMatcher", end: bytes) -> None:
        """`end` is the mask of the ids that end an answer. Raises OverLimit."""
        self.matcher = matcher
        self.num_ids = 0
        self._num_consumed = 0
        """Without those after the grammar was finished, of which the matcher is not told."""
        self._is_masked = False
        """Whether the mask of this place was asked for."""
        self._end = end
        self._check()

    def mask(self) -> bytes:
        """Which ids may follow. Raises OverLimit."""
        self._is_masked = True
        if self.matcher.is_stopped():
            return self._end
        mask = self.matcher.compute_bitmask()
        self._check()
        if not any(mask):
            raise OverLimit("nothing can follow")
        return mask

    def take(self, token: int) -> None:
        """An id that the mask allows follows. Raises OverLimit."""
        if not self._is_masked:
            self.mask()
        if not self.matcher.is_stopped():
            if self.matcher.try_consume_tokens([token]) != 1:
                self._check()
                raise OverLimit("an id that the mask allows is refused")
            self._check()
            self._num_consumed += 1
        self.num_ids += 1
        self._is_masked = False

    def back_to(self, num_ids: int) -> None:
        """Forget all ids after the first `num_ids`. Raises OverLimit."""
        if num_ids < self.num_ids:
            surplus = self._num_consumed - num_ids
            if surplus > 0:
                self.matcher.rollback(surplus)
                self._num_consumed = num_ids
                self._check()
            self.num_ids = num_ids
            self._is_masked = True

    def _check(self) -> None:
        if self.matcher.is_error():
            raise OverLimit(self.matcher.get_error().partition("\n")[0])


class Grammar:
    """A compiled grammar."""

    def __init__(self, tokenizer: "llguidance.LLTokenizer", text: str, max_lexer_states: int) -> None:
        """Raises RequestFailed when it is over a limit already."""
        from llguidance import LLParserLimits

        self._tokenizer = tokenizer
        self._text = text
        self._limits = LLParserLimits(
            max_lexer_states=max_lexer_states, step_lexer_fuel=_NO_LIMIT, verbose_errors=False
        )
        self._end = _bits(tokenizer.eos_tokens, tokenizer.vocab_size)
        try:
            first = self.start_alone()
            first.mask()  # the one that takes longest, and all answers need it
        except OverLimit as error:
            raise _too_complex(error) from None
        self._matcher = first.matcher

    def start(self) -> _Walk:
        """Quick: shares what was compiled, and the lexer's states, with all others that were started so."""
        return _Walk(self._matcher.deep_copy(), self._end)

    def start_alone(self) -> _Walk:
        """Shares nothing. Raises OverLimit."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._text, log_level=0, limits=self._limits)
        return _Walk(matcher, self._end)


class GrammarGuide:
    """A guide over llguidance's matcher."""

    def __init__(self, grammar: Grammar, on_limit: Callable[[], None]) -> None:
        """`on_limit` is told when what the grammar's answers share is over a limit, and of no use to others."""
        self._grammar = grammar
        self._on_limit = on_limit
        self._answer = array("i")
        self._walk: _Walk | None = None
        self._is_alone = False
        """Whether the walk sees the answer alone: no drafts, no other answers."""

    @property
    def num_ids(self) -> int:
        return len(self._answer)

    def masks(self, known: int, ids: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        del self._answer[known:]
        self._answer.extend(ids)
        if not self._is_alone:
            try:
                return self._masks(known, drafts)
            except OverLimit:
                self._on_limit()
                self._walk, self._is_alone = None, True
        try:
            return self._masks(known, ())
        except OverLimit as error:
            self._walk = None
            raise _too_complex(error) from None

    def _masks(self, known: int, drafts: Sequence[int]) -> list[bytes]:
        """Moves the walk, which agrees with the answer in the first `known` ids, to the answer's end."""
        walk = self._walk
        if walk is None:
            walk = self._walk = self._grammar.start_alone() if self._is_alone else self._grammar.start()
        walk.back_to(known)
        for token in self._answer[walk.num_ids :]:
            walk.take(token)
        masks = [walk.mask()]
        for draft in drafts:
            if not masks[-1][draft // 8] >> draft % 8 & 1:
                break
            walk.take(draft)
            masks.append(walk.mask())
        walk.back_to(len(self._answer))
        return masks


class GrammarGuides:
    """Guides for one tokenizer. Its tables are built for the first grammar; a grammar is compiled once for all
    requests that have it at the same time, and the last ones are kept."""

    def __init__(self, tokenizer: "Tokenizer", *, max_lexer_states: int = MAX_LEXER_STATES) -> None:
        self._tokenizer = tokenizer
        self._max_lexer_states = max_lexer_states
        self._tables: llguidance.LLTokenizer | None = None
        self._tables_lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(_COMPILER_THREADS, "segue-grammar")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[Grammar]] = OrderedDict()
        """By text, the last used at the end; under the lock."""

    def is_ready(self, sampling: "Sampling", wait_s: float) -> bool:
        future = self._grammar_of(sampling)
        wait([future], wait_s)
        return future.done()

    def of(self, sampling: "Sampling") -> GrammarGuide:
        return kept(sampling, "guide", partial(self._new_guide, sampling))

    def close(self) -> None:
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _new_guide(self, sampling: "Sampling") -> GrammarGuide:
        future = self._grammar_of(sampling)
        assert sampling.grammar is not None
        return GrammarGuide(future.result(), partial(self._forget, sampling.grammar, future))

    def _grammar_of(self, sampling: "Sampling") -> "Future[Grammar]":
        assert sampling.grammar is not None
        return kept(sampling, "grammar", partial(self._compile, sampling.grammar))

    def _compile(self, text: str) -> "Future[Grammar]":
        with self._lock:
            future = self._compiled.get(text)
            # One that failed is tried again: it may have been for want of memory.
            if future is None or (future.done() and future.exception() is not None):
                future = self._compiler.submit(self._new_grammar, text)
                self._compiled[text] = future
            self._compiled.move_to_end(text)
            if len(self._compiled) > MAX_COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
            return future

    def _new_grammar(self, text: str) -> Grammar:
        with self._tables_lock:
            if self._tables is None:
                self._tables = _llguidance_tokenizer(self._tokenizer)
        return Grammar(self._tables, text, self._max_lexer_states)

    def _forget(self, text: str, future: "Future[Grammar]") -> None:
        with self._lock:
            if self._compiled.get(text) is future:
                del self._compiled[text]


class _GuideTokens:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        specials = tokenizer.special_ids
        # A byte that no text has marks those whose text must not be matched.
        self.tokens = [
            (b"\xff" if token in specials else b"") + tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
        self.special_token_ids = sorted(specials)
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


def _llguidance_tokenizer(tokenizer: "Tokenizer") -> "llguidance.LLTokenizer":
    if not tokenizer.eos_token_ids:
        raise RequestFailed(NO_END)
    import llguidance
    from llguidance import TokenizerWrapper

    wrapper = TokenizerWrapper(_GuideTokens(tokenizer))
    return llguidance.LLTokenizer(
        wrapper, n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eos_token_ids)
    )


def _too_complex(error: OverLimit) -> RequestFailed:
    return RequestFailed(f"the grammar of the answer is over a limit: {error}: make it simpler")


def _bits(ids: Sequence[int], vocab_size: int) -> bytes:
    """A mask with these ids, in whole 32-bit words."""
    mask = bytearray(-(-vocab_size // 32) * 4)
    for token in ids:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def without(mask: bytes, ids: Sequence[int]) -> bytes:
    """The mask less these ids; the mask itself if it allows nothing else."""
    rest = bytearray(mask)
    for token in ids:
        rest[token // 8] &= ~(1 << token % 8)
    return bytes(rest) if any(rest) else mask
