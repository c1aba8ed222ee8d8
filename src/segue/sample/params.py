"""How an answer is sampled and when it ends, as a user says it: vLLM's names and defaults."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from segue.contract.step import Sampling
from segue.errors import ParameterError

if TYPE_CHECKING:
    from segue.sample.grammar import GrammarValue

_LARGEST = 2**31 - 1
"""Of integers that say no other bound."""
# What a request may ask for at most. Whoever asks for more is told so before any work is done.
MAX_N = 1024
MAX_LOGPROBS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Of all stop strings together."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must match: exactly one of these; vLLM's names. Needs the extra `structured`."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A grammar in Lark's notation, as llguidance has it."""
    json_object: bool | None = None
    """Any JSON object."""

    def __post_init__(self) -> None:
        if len(self._given()) != 1:
            known = ", ".join(self.__struct_fields__)
            raise ParameterError(
                "structured_outputs", list(self._given()), f"must have exactly one of {known}"
            )

    def _given(self) -> dict[str, object]:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in fields.items() if value not in (None, False)}

    def grammar_text(self) -> str:
        """The grammar as the runtime takes it. Raises ParameterError when it is no grammar at all (`check` finds what
        else is wrong) or the extra is missing."""
        from segue.sample.grammar import grammar_text

        return grammar_text(*self._form())

    def check(self) -> None:
        """Raises ParameterError when the grammar is wrong or the extra is missing."""
        from segue.sample.grammar import check_grammar

        check_grammar(*self._form())

    def _form(self) -> "tuple[str, GrammarValue]":
        """The field that is given, and its value as one that can be a key."""
        ((name, value),) = self._given().items()
        match value:
            case dict():
                try:
                    return name, msgspec.json.encode(value).decode()
                except (TypeError, ValueError, RecursionError) as error:
                    why = f"is no JSON: {error}"
                    raise ParameterError(f"structured_outputs.{name}", value, why) from None
            case list() if all(isinstance(each, str) for each in value):
                return name, tuple(value)
            case str() | bool():
                return name, value
            case _:
                raise ParameterError(f"structured_outputs.{name}", value, "has the wrong type")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one request. A bad value raises `ParameterError`, which names it."""

    n: int = 1
    """How many answers; answer i > 0 is drawn with `seed + i`."""
    max_tokens: int | None = 16
    """The longest answer, in tokens. None: what `max_model_len` leaves room for."""
    min_tokens: int = 0
    """Neither end-of-sequence nor a stop ends the answer before this many tokens."""
    temperature: float = 1.0
    """0 always takes the most likely token."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that make up this probability."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 or -1: from all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest."""
    presence_penalty: float = 0.0
    """Against tokens that the answer already has."""
    frequency_penalty: float = 0.0
    """Against tokens, by how often the answer has them."""
    repetition_penalty: float = 1.0
    """Against tokens of prompt and answer; 1: none."""
    logit_bias: dict[int, float] | None = None
    """What is added to the logits of these tokens."""
    seed: int | None = None
    """Of the draws: the same seed, the same answer. None: derived from the engine's seed and the number of the request,
    so a program's runs repeat."""
    stop: str | Sequence[str] | None = None
    """End the answer before this text."""
    stop_token_ids: Sequence[int] | None = None
    """End the answer at this token."""
    ignore_eos: bool = False
    """Go on after the model's end of sequence."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each position, beside the drawn one. None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""
    include_stop_str_in_output: bool = False
    """Keep the stop text in the answer."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer must match."""

    def __post_init__(self) -> None:
        _check_int("n", self.n, low=1, high=MAX_N)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"is more than max_tokens={self.max_tokens}")
        _check_float("temperature", self.temperature, low=0.0)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, exclude_low=True)
        _check_int("top_k", self.top_k, low=-1)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, exclude_low=True)
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, low=0, high=MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "must be True or False")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ParameterError(
                "structured_outputs", self.structured_outputs, "must be StructuredOutputsParams"
            )
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple | None):
            raise ParameterError("stop", self.stop, "must be a non-empty string or a list of them")
        _check_count("stop", len(self.stop_strings), MAX_STOPS, "stop strings")
        for string in self.stop_strings:
            if not isinstance(string, str) or not string or not is_unicode(string):
                raise ParameterError("stop", self.stop, "must be a non-empty string or a list of them")
        num_chars = sum(map(len, self.stop_strings))
        _check_count("stop", num_chars, MAX_STOP_CHARS, "characters in all stop strings together")
        if not isinstance(self.stop_token_ids, list | tuple | set | frozenset | None):
            raise ParameterError("stop_token_ids", self.stop_token_ids, "must be a list of token ids")
        _check_count("stop_token_ids", len(self.stop_token_ids or ()), MAX_STOP_TOKEN_IDS, "ids")
        for token in self.stop_token_ids or ():
            _check_int("stop_token_ids", token, low=0)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise ParameterError("logit_bias", self.logit_bias, "must be a dict from token id to bias")
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES, "tokens")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, low=0)
            _check_float("logit_bias", bias, low=-100.0, high=100.0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises ParameterError when a token id named here is not one of the model's."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise ParameterError(name, token, f"is no token id; the model has {vocab_size}")

    def check_grammar(self) -> None:
        """Raises ParameterError when the grammar is wrong. The first time that a grammar is seen this may take long."""
        if self.structured_outputs is not None:
            self.structured_outputs.check()

    def stop_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The ids that end the answer."""
        return frozenset(self.stop_token_ids or ()) | (
            frozenset() if self.ignore_eos else frozenset(eos_token_ids)
        )

    def resolve(self, *, output_start: int, eos_token_ids: Iterable[int], default_seed: int) -> Sampling:
        """What the runtime needs of this, for an answer whose first token has position `output_start`."""
        banned = tuple(sorted(self.stop_ids(eos_token_ids))) if self.min_tokens else ()
        grammar = None if self.structured_outputs is None else self.structured_outputs.grammar_text()
        return Sampling(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            output_start=output_start,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            banned=banned if grammar is None else (),
            last_resort=() if grammar is None else banned,
            banned_until=output_start + self.min_tokens,
            seed=(default_seed if self.seed is None else self.seed) % 2**64,
            num_logprobs=self.logprobs,
            grammar=grammar,
        )


def is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which is no character and cannot be sent anywhere."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, value, "must be an integer")
    if value < low or value > (_LARGEST if high is None else high):
        small = f"must be at least {low}" if value < low else f"must be at most {_LARGEST}"
        raise ParameterError(name, value, small if high is None else f"must be in [{low}, {high}]")


def _check_count(name: str, count: int, limit: int, of: str) -> None:
    if count > limit:
        raise ParameterError(name, "…", f"has {count:,} {of}; the limit is {limit:,}")


def _check_float(
    name: str, value: object, *, low: float, high: float = math.inf, exclude_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ParameterError(name, value, "must be a finite number")
    if value < low or value > high or (exclude_low and value == low):
        bounds = f"{'(' if exclude_low else '['}{low:g}, {'∞)' if high == math.inf else f'{high:g}]'}"
        raise ParameterError(name, value, f"must be in {bounds}")


def _is_finite(value: float) -> bool:
    # An integer can be larger than any float.
    return abs(value) <= _LARGEST if isinstance(value, int) else math.isfinite(value)
