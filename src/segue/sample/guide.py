"""Answers that match a grammar: which ids may come next, by llguidance (https://github.com/guidance-ai/llguidance).

A guide depends on nothing but the grammar and the answer so far, so it can be asked in any order: it goes back or on
from what it was asked last. That is why grammars work with drafts (a mask for each row), with async scheduling (asked
when the ids are known) and after a preemption, and never change with the schedule.
"""

import functools
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from segue.errors import ParameterError, UsageError

if TYPE_CHECKING:
    import llguidance

    from segue.runtime.contract import Sampling
    from segue.tokens import Tokenizer

MAX_CACHED_GUIDES = 512
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}"}
"""Room for any layout, but none for a small model that cannot stop indenting."""


class Guide(Protocol):
    """One grammar's state."""

    def masks(self, answer: Sequence[int], drafts: Sequence[int]) -> list[bytes | None]:
        """For the id after `answer`, and after each prefix of `drafts`: a bit for each id that may be drawn, least
        significant first; None: any. After a draft that the grammar forbids the masks do not matter."""
        ...


GuideFactory = Callable[[str], Guide]


class GuideCache:
    """The guides of the answers that are being given, one for each `Sampling`."""

    def __init__(self, make: GuideFactory | None) -> None:
        self._make = make
        self._guides: OrderedDict[int, tuple[Sampling, Guide]] = OrderedDict()
        """By identity; the object is kept, so that its id is not used again."""

    def of(self, sampling: "Sampling") -> Guide:
        entry = self._guides.get(id(sampling))
        if entry is None:
            if self._make is None or sampling.grammar is None:
                raise UsageError("this runtime has no guides for grammars")
            entry = (sampling, self._make(sampling.grammar))
            self._guides[id(sampling)] = entry
            if len(self._guides) > MAX_CACHED_GUIDES:
                self._guides.popitem(last=False)
        self._guides.move_to_end(id(sampling))
        return entry[1]


class GrammarGuide:
    """A guide over llguidance's matcher."""

    def __init__(self, tokenizer: "llguidance.LLTokenizer", grammar: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._eos = _bits(tokenizer.eos_tokens, tokenizer.vocab_size)
        self._consumed: list[int] = []

    def masks(self, answer: Sequence[int], drafts: Sequence[int]) -> list[bytes | None]:
        self._go_to(answer)
        masks: list[bytes | None] = []
        num_tried = 0
        for draft in drafts:
            masks.append(self._mask())
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([draft]):
                break
            num_tried += 1
        else:
            masks.append(self._mask())
        if num_tried:
            self._matcher.rollback(num_tried)
        return masks + [None] * (1 + len(drafts) - len(masks))

    def _mask(self) -> bytes:
        """When nothing may follow, only the end may."""
        if self._matcher.is_stopped():
            return self._eos
        mask = self._matcher.compute_bitmask()
        return mask if any(mask) else self._eos

    def _go_to(self, answer: Sequence[int]) -> None:
        """Be in the state after these ids."""
        common = 0
        for mine, theirs in zip(self._consumed, answer, strict=False):
            if mine != theirs:
                break
            common += 1
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
            del self._consumed[common:]
        rest = list(answer[common:])
        # Past its end a grammar takes nothing more; only the end of the sequence follows (see `_mask`).
        self._consumed += rest[: self._matcher.try_consume_tokens(rest)] if rest else []


class GrammarGuides:
    """Makes guides for one tokenizer; its tables are built at the first one."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._tables: llguidance.LLTokenizer | None = None

    def __call__(self, grammar: str) -> GrammarGuide:
        if self._tables is None:
            self._tables = _llguidance_tokenizer(self._tokenizer)
        return GrammarGuide(self._tables, grammar)


class _Vocabulary:
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
    import llguidance
    from llguidance import TokenizerWrapper

    wrapper = TokenizerWrapper(_Vocabulary(tokenizer))
    return llguidance.LLTokenizer(
        wrapper, n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eos_token_ids)
    )


@functools.lru_cache(maxsize=256)
def compile_grammar(name: str, value: str | tuple[str, ...] | bool) -> str:
    """llguidance's form of what an answer must match: a `value` of the field `name` of `StructuredOutputsParams`.

    Raises ParameterError when it is wrong.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ParameterError(
            f"structured_outputs.{name}", value, "needs llguidance: pip install 'segue[structured]'"
        ) from None
    try:
        grammar = _grammar(name, value)
        error = LLMatcher.validate_grammar(grammar)
    except ValueError as wrong:
        error = str(wrong)
    if error:
        raise ParameterError(f"structured_outputs.{name}", value, " ".join(error.split()))
    return grammar


def _grammar(name: str, value: str | tuple[str, ...] | bool) -> str:
    from llguidance import LLMatcher

    match name, value:
        case "json", str():
            return str(LLMatcher.grammar_from_json_schema(value, overrides=_JSON_OPTIONS))
        case "json_object", True:
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS))
        case "regex", str():
            return str(LLMatcher.grammar_from_regex(value))
        case "choice", tuple():
            if not value or not all(isinstance(choice, str) and choice for choice in value):
                raise ValueError("must be a list of non-empty strings")
            return str(
                LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
            )
        case "grammar", str():
            return str(LLMatcher.grammar_from_lark(value))
        case _:
            raise ValueError("has the wrong type")


def _bits(ids: Sequence[int], vocab_size: int) -> bytes:
    """A mask with these ids, in whole 32-bit words."""
    mask = bytearray(-(-vocab_size // 32) * 4)
    for token in ids:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)
