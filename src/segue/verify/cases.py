"""The requests that are answered: several lengths, languages and scripts, code and chat; greedy and sampled."""

import importlib.util
from collections.abc import Sequence
from datetime import datetime
from enum import IntEnum

import msgspec

from segue.sample.params import SamplingParams
from segue.tokens import Tokenizer
from segue.tokens.chat import Message, encode_chat

NOW = datetime(2025, 6, 1, 12, 0)
"""What the time is for chat templates that tell it: the same in every run."""


class Scope(IntEnum):
    """How much a run answers: a mode that computes one token a step is slow, one that needs a long prompt is rare."""

    SHORT = 0
    """Prompts of a line or two."""
    MEDIUM = 1
    """... and one of about 300 tokens."""
    LONG = 2
    """... and one of more than 512 tokens."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    name: str
    scope: Scope
    text: str
    """What is said: the prompt, or the user's message."""
    messages: tuple[Message, ...] | None
    """What was said before, in the chat template; None: the text is the whole prompt, as it is."""
    token_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """The most this request may come to, each of its answers by itself."""
        assert self.params.max_tokens is not None
        return len(self.token_ids) + self.params.max_tokens

    def answer_name(self, number: int) -> str:
        """What answer `number` is called."""
        return self.name if self.params.n == 1 else f"{self.name}, answer {number}"


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    text: str
    params: dict[str, object]
    """`SamplingParams` but for `max_tokens`."""
    scope: Scope = Scope.SHORT
    is_chat: bool = False
    num_tokens: int = 64
    """The prompt is cut to at most this many."""


_CODE = (
    "# Areas of shapes.\n\ndef area_of_square(side):\n    return side * side\n\n"
    "def area_of_rectangle(width, height):\n    return width * height\n\n"
)
_STORY = (
    "The lighthouse stood at the end of the long stone pier, where the river met the sea. Every evening the keeper "
    "climbed the two hundred and twelve steps, trimmed the wick, wound the clockwork, and wrote the weather in a "
    "book: wind from the west, rain before dawn, three ships passing to the north. Nobody had ever read the book. "
    "On the first day of March the keeper found that a page was missing. It had not been torn; it had been cut, "
    "neatly, with a very sharp knife, and in its place lay a feather, white at the root and black at the tip. "
)
_LETTER = (
    "Dear Ada, you asked me how the machine decides what to compute next, and I have thought about it on the train. "
    "Imagine a kitchen with one stove and many guests. Some dishes need an hour, others a minute; a guest may change "
    "the order while the cook is stirring, or leave before the plate is served. The cook may begin with the onions "
    "that everybody needs, and set a pot aside when the stove is full. What must never happen is that the soup "
    "tastes different because somebody else ordered fish. "
)

_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _texts(base_seed: int, tokenizer: Tokenizer) -> tuple[_Text, ...]:
    """In the order in which they are sent. The answers' parameters cover every way in which a token is drawn."""
    often, never = _first_id(tokenizer, " the"), _first_id(tokenizer, " of")
    return (
        _Text(
            name="fact",
            text="The capital of France is",
            params={"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 2},
        ),
        _Text(
            name="long",
            scope=Scope.MEDIUM,
            text=_STORY * 2 + _LETTER,
            num_tokens=320,
            params={"temperature": 0.0, "logprobs": 2},
        ),
        _Text(
            name="chat",
            is_chat=True,
            text="Name three rivers, and say where each of them meets the sea.",
            params={"temperature": 1.0, "top_p": 0.9, "seed": base_seed + 1, "logprobs": 3},
        ),
        _Text(
            name="code",
            text=_CODE + "def area_of_circle(radius):\n    return",
            num_tokens=96,
            params={"temperature": 0.0, "ignore_eos": True, "logprobs": 0},
        ),
        _Text(
            name="code, sampled",
            text=_CODE + "def area_of_triangle(base, height):\n",
            num_tokens=96,
            params={"temperature": 1.0, "top_k": 20, "seed": base_seed + 2, "logprobs": 2},
        ),
        _Text(
            name="refrain",
            text="one two three, one two three, one two three, one two",
            params={"temperature": 0.0, "ignore_eos": True, "logprobs": 1},
        ),
        _Text(
            name="German",
            text="Ein Gespräch beginnt, bevor alles gesagt ist: Während die eine noch spricht, überlegt",
            params={"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1},
        ),
        _Text(
            name="Japanese",
            text="春はあけぼの。やうやう白くなりゆく山ぎは、すこし明かりて、",
            num_tokens=80,
            params={"temperature": 1.0, "min_tokens": 8, "seed": base_seed + 3, "logprobs": 5},
        ),
        _Text(
            name="penalties",
            text="Рыба, птица, рыба, птица, рыба 🐟🐦🐟🐦",
            params={
                "temperature": 1.0,
                "presence_penalty": 0.7,
                "frequency_penalty": 0.4,
                "min_p": 0.02,
                "seed": base_seed + 4,
                "logprobs": 1,
            },
        ),
        _Text(
            name="bias",
            text="Once upon a time, in a village at the edge",
            params={
                "temperature": 0.9,
                "logit_bias": {often: 3.0, never: -100.0},
                "stop": ["."],
                "min_tokens": 4,
                "seed": base_seed + 5,
                "logprobs": 2,
            },
        ),
        _Text(
            name="two answers",
            text="My favourite colour is",
            num_tokens=24,
            params={"n": 2, "temperature": 1.0, "seed": base_seed + 7, "logprobs": 1},
        ),
        _Text(
            name="JSON",
            text="Describe a person as JSON, with a name and an age.\n",
            num_tokens=24,
            params={
                "structured_outputs": {"json": _PERSON},
                "temperature": 1.0,
                "frequency_penalty": 0.2,
                "seed": base_seed + 8,
                "logprobs": 1,
            },
        ),
        _Text(
            name="choice",
            text="yes, no, yes, no, yes,",
            num_tokens=24,
            params={
                "structured_outputs": {"choice": [" yes", " no, never"]},
                "temperature": 0.0,
                "ignore_eos": True,
                "logprobs": 1,
            },
        ),
        _Text(
            name="longer",
            scope=Scope.LONG,
            text=_LETTER * 3 + _STORY * 4,
            num_tokens=640,
            params={"temperature": 1.0, "seed": base_seed + 6, "logprobs": 1},
        ),
    )


def build_cases(
    tokenizer: Tokenizer, *, max_model_len: int, answer_len: int, seed: int = 0
) -> tuple[Case, ...]:
    """The requests for this model, with answers of at most `answer_len` tokens. Prompts are cut so that they fit in
    `max_model_len` tokens; a model without a chat template gets chat as plain text; without an end of text, or where
    llguidance is not installed, no request has a grammar."""
    answer_len = min(answer_len, max_model_len // 2)
    room = max_model_len - answer_len
    has_grammars = bool(tokenizer.eos_token_ids) and importlib.util.find_spec("llguidance") is not None
    return tuple(
        _case(tokenizer, text, room, answer_len)
        for text in _texts(10 * seed, tokenizer)
        if has_grammars or "structured_outputs" not in text.params
    )


def _case(tokenizer: Tokenizer, wanted: _Text, room: int, answer_len: int) -> Case:
    is_chat = wanted.is_chat and tokenizer.chat_template is not None
    messages: tuple[Message, ...] | None = () if is_chat else None
    text, ids = _cut(tokenizer, wanted.text, messages, min(wanted.num_tokens, room) if not is_chat else room)
    given: dict[str, object] = {**wanted.params, "max_tokens": answer_len}
    if "min_tokens" in given:
        given["min_tokens"] = min(msgspec.convert(given["min_tokens"], int), answer_len)
    return Case(
        name=wanted.name,
        scope=wanted.scope,
        text=text,
        messages=messages,
        token_ids=tuple(ids),
        params=msgspec.convert(given, SamplingParams),
    )


def _cut(
    tokenizer: Tokenizer, text: str, messages: Sequence[Message] | None, num_tokens: int
) -> tuple[str, list[int]]:
    """The longest beginning of the text with at most this many tokens, at steps of a tenth, and its ids."""
    ids = prompt_ids(tokenizer, text, messages)
    while len(ids) > num_tokens and len(text) > 1:
        text = text[: len(text) - max(1, len(text) // 10)]
        ids = prompt_ids(tokenizer, text, messages)
    return text, ids


def prompt_ids(tokenizer: Tokenizer, text: str, messages: Sequence[Message] | None) -> list[int]:
    """The ids of a whole prompt: what a session that is told the text bit by bit must come to."""
    if messages is None:
        return tokenizer.encode(text, add_special_tokens=True)
    return encode_chat(tokenizer, [*messages, {"role": "user", "content": text}], now=NOW)


def _first_id(tokenizer: Tokenizer, text: str) -> int:
    return tokenizer.encode(text)[0]
