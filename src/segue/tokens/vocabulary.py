"""The tokenizer of a model file as checked values: knows nothing about how text is encoded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from segue.display import show_name, show_path
from segue.errors import ModelFileError
from segue.tokens.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from segue.weights.model_file import ModelFile

_KEYS = "tokenizer.ggml."
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Tokens that end a turn by their name: files often name only the base model's end of text."""


class TokenKind(IntEnum):
    """What a token is, with GGUF's numbers (`tokenizer.ggml.token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Structure, such as the end of a turn. Never made from text unless that is asked for."""
    USER_DEFINED = 4
    """Taken from text as a whole, before anything else."""
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens, merges and the ids with a role. `tokens[i]` is the text of id i."""

    tokens: Sequence[str]
    ids: Mapping[str, int]
    """The inverse of `tokens`."""
    merges: Sequence[tuple[str, str]]
    """Best first; of byte-level vocabularies."""
    is_sentencepiece: bool
    scores: Sequence[float]
    """By id, of SentencePiece's vocabularies."""
    byte_ids: frozenset[int]
    """Tokens that stand for one byte each, there."""
    unknown_token_id: int | None
    add_space_prefix: bool
    """Whether a text, and what follows a special token, is encoded as if a space were before it."""
    pre_tokenizer: PreTokenizer
    control_ids: frozenset[int]
    user_defined_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    eos_token_id: int | None
    chat_template: str | None


def read_vocabulary(model: ModelFile) -> Vocabulary:
    """The vocabulary of a model file. Raises ModelFileError when it is damaged or of an unknown kind."""
    fields = _Fields(model)
    is_sentencepiece = _is_sentencepiece(fields)
    pre_tokenizer = _NO_PRE_TOKENIZER if is_sentencepiece else _pre_tokenizer(fields)
    tokens = fields.strings("tokens")
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise fields.error("tokens", f"has the token {show_name(twice)} twice")
    _check_size(model, fields, len(tokens))
    kinds = _kinds(fields, tokens)
    end_of_turn = {ids[token] for token in _END_OF_TURN if token in ids}
    eos, eot, eom = (fields.token_id(f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom"))
    bos = fields.token_id("bos_token_id", len(tokens))
    add_bos = fields.boolean("add_bos_token", default=pre_tokenizer.add_bos)
    add_eos = fields.boolean("add_eos_token", default=False)
    if add_bos and bos is None:
        raise fields.error("add_bos_token", "is set, but there is no bos_token_id")
    if add_eos and eos is None:
        raise fields.error("add_eos_token", "is set, but there is no eos_token_id")
    template = model.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise fields.error("chat_template", "must be a string", prefix="tokenizer.")
    return Vocabulary(
        tokens=tokens,
        ids=ids,
        merges=() if is_sentencepiece else _merges(fields),
        is_sentencepiece=is_sentencepiece,
        scores=_scores(fields, len(tokens)) if is_sentencepiece else (),
        byte_ids=frozenset(kinds.byte),
        unknown_token_id=fields.token_id("unknown_token_id", len(tokens)),
        add_space_prefix=is_sentencepiece and fields.boolean("add_space_prefix", default=True),
        pre_tokenizer=pre_tokenizer,
        control_ids=frozenset(kinds.control | end_of_turn),
        user_defined_ids=frozenset(kinds.user_defined - end_of_turn),
        bos_token_id=bos,
        eos_token_ids=frozenset(end_of_turn | {i for i in (eos, eot, eom) if i is not None}),
        add_bos=add_bos,
        add_eos=add_eos,
        eos_token_id=eos,
        chat_template=template,
    )


_NO_PRE_TOKENIZER = PreTokenizer((), add_bos=True)
"""SentencePiece does not cut a text."""


def _is_sentencepiece(fields: "_Fields") -> bool:
    kind = fields.string("model")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        known = f"{_BYTE_LEVEL}, {_SENTENCEPIECE}"
        raise fields.error("model", f"{show_name(kind)} is not known; known are {known}")
    return kind == _SENTENCEPIECE


def _scores(fields: "_Fields", num_tokens: int) -> list[float]:
    scores = fields.numbers("scores")
    if len(scores) != num_tokens:
        raise fields.error("scores", f"has {len(scores)} values for {num_tokens} tokens")
    return scores


def _pre_tokenizer(fields: "_Fields") -> PreTokenizer:
    name = fields.string("pre")
    if name not in PRE_TOKENIZERS:
        raise fields.error("pre", f"{show_name(name)} is not known; known are {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _check_size(model: ModelFile, fields: "_Fields", num_tokens: int) -> None:
    if num_tokens == 0:
        raise fields.error("tokens", "is empty")
    stated = model.metadata.get(f"{model.architecture}.vocab_size", num_tokens)
    if stated != num_tokens:
        what = f"has {num_tokens} tokens, {model.architecture}.vocab_size says {show_name(str(stated))}"
        raise fields.error("tokens", what)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != num_tokens:
        raise fields.error("tokens", f"has {num_tokens} tokens, the embedding {embedding.shape[0]} rows")


@dataclass(frozen=True)
class _Kinds:
    """Ids by what they are, but ordinary tokens."""

    control: set[int]
    user_defined: set[int]
    byte: set[int]


def _kinds(fields: "_Fields", tokens: Sequence[str]) -> _Kinds:
    kinds = fields.integers("token_type", default=[TokenKind.NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise fields.error("token_type", f"has {len(kinds)} values for {len(tokens)} tokens")
    present = set(kinds)
    if not present <= set(TokenKind):
        raise fields.error("token_type", f"has the unknown value {min(present - set(TokenKind))}")
    control: set[int] = set()
    user_defined: set[int] = set()
    byte: set[int] = set()
    for i, kind in enumerate(kinds):
        if kind == TokenKind.NORMAL:
            continue
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN):
            control.add(i)
        elif kind == TokenKind.USER_DEFINED:
            user_defined.add(i)
        elif kind == TokenKind.BYTE:
            byte.add(i)
            continue
        else:
            continue
        if not tokens[i]:
            raise fields.error("tokens", f"has no text for the special token {i}")
    return _Kinds(control, user_defined, byte)


def _merges(fields: "_Fields") -> list[tuple[str, str]]:
    """Pairs, best first; of a pair that is there twice, the first counts."""
    pairs = list(dict.fromkeys(tuple(merge.split(" ")) for merge in fields.strings("merges")))
    for pair in pairs:
        if len(pair) != 2 or not pair[0] or not pair[1]:
            raise fields.error(
                "merges", f"has {show_name(' '.join(pair))}, not two tokens and a space between"
            )
    return cast(list[tuple[str, str]], pairs)


class _Fields:
    """Typed access to the metadata `tokenizer.ggml.*`."""

    def __init__(self, model: ModelFile) -> None:
        self._path = model.path
        self._metadata = model.metadata

    def error(self, name: str, what: str, *, prefix: str = _KEYS) -> ModelFileError:
        return ModelFileError(f"{show_path(self._path)}: {prefix}{name} {what}; use another model file")

    def string(self, name: str) -> str:
        value = self._metadata.get(_KEYS + name)
        if value is None:
            raise self.error(name, "is missing")
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def strings(self, name: str) -> list[str]:
        value = self._metadata.get(_KEYS + name)
        if value is None:
            raise self.error(name, "is missing")
        if not isinstance(value, list) or set(map(type, value)) - {str}:
            raise self.error(name, "must be a list of strings")
        return value

    def integers(self, name: str, *, default: list[int]) -> list[int]:
        value = self._metadata.get(_KEYS + name, default)
        if not isinstance(value, list) or set(map(type, value)) - {int, TokenKind}:
            raise self.error(name, "must be a list of integers")
        return value

    def numbers(self, name: str) -> list[float]:
        """Finite ones."""
        value = self._metadata.get(_KEYS + name)
        if value is None:
            raise self.error(name, "is missing")
        if not isinstance(value, list) or set(map(type, value)) - {float}:
            raise self.error(name, "must be a list of numbers")
        if not all(map(math.isfinite, value)):
            raise self.error(name, "has a value that is no number")
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self._metadata.get(_KEYS + name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def token_id(self, name: str, num_tokens: int) -> int | None:
        value = self._metadata.get(_KEYS + name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "must be an integer")
        if not 0 <= value < num_tokens:
            raise self.error(name, f"is {value}, no id of the {num_tokens} tokens")
        return value
