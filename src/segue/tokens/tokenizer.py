"""Text to token ids and back, by the vocabulary of a model file."""

from collections.abc import Iterable, Sequence
from typing import Self

from segue.display import show_path
from segue.errors import ModelFileError, ParameterError
from segue.tokens.bpe import ByteLevelBPE, MergeError
from segue.tokens.sentencepiece import SentencePieceBPE
from segue.tokens.vocabulary import Vocabulary, read_vocabulary
from segue.weights.model_file import ModelFile


class Tokenizer:
    """The tokenizer of one model. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bpe = (SentencePieceBPE if vocabulary.is_sentencepiece else ByteLevelBPE)(vocabulary)
        self._user_defined = _longest_first(vocabulary, vocabulary.user_defined_ids)
        self._specials = _longest_first(vocabulary, vocabulary.user_defined_ids | vocabulary.control_ids)
        self._bytes: list[bytes | None] = [None] * len(vocabulary.tokens)

    @classmethod
    def from_model(cls, model: ModelFile) -> Self:
        """The tokenizer of a model file. Raises ModelFileError when it is missing, damaged or not known."""
        vocabulary = read_vocabulary(model)
        try:
            return cls(vocabulary)
        except MergeError as error:
            raise ModelFileError(f"{show_path(model.path)}: {error}; use another model file") from None

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_special_tokens: bool = False,
        continues: bool = False,
    ) -> list[int]:
        """The token ids of a text.

        `parse_special`: control tokens written in the text become those tokens; otherwise they stay text.
        `add_special_tokens`: BOS and EOS where the model wants them.
        `continues`: other text stands before this one, so that no space is put before it where the model wants one at
        the beginning and after control tokens.
        Bytes that the vocabulary has no token for are left out. Raises ParameterError for a text that is not
        Unicode (a lone surrogate).
        """
        ids: list[int] = []
        for piece in self.split_special(text, control=parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                takes_space = self._vocabulary.add_space_prefix and not continues
                ids += self._encode_plain(f" {piece}" if takes_space else piece)
            continues = isinstance(piece, str)
        if not add_special_tokens:
            return ids
        bos, eos = self._vocabulary.bos_token_id, self._vocabulary.eos_token_id
        if self._vocabulary.add_bos and bos is not None:
            ids.insert(0, bos)
        if self._vocabulary.add_eos and eos is not None:
            ids.append(eos)
        return ids

    def split_special(self, text: str, *, control: bool) -> list[str | int]:
        """The text cut at tokens that are taken whole: user-defined ones, and control tokens if asked for.

        Longer tokens are found first, each from left to right, as llama.cpp does it.
        """
        pieces: list[str | int] = [text] if text else []
        for token, token_id in self._specials if control else self._user_defined:
            if token in text:
                pieces = [part for piece in pieces for part in _cut(piece, token, token_id)]
        return pieces

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises ParameterError for an unknown id.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join([self.token_bytes(i) for i in ids if i not in skipped]).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, maybe part of a character. Raises ParameterError for an unknown id."""
        if not 0 <= token_id < len(self._bytes):
            raise ParameterError("token_id", token_id, f"is no token id; the model has {len(self._bytes)}")
        known = self._bytes[token_id]
        if known is not None:
            return known
        token = self._vocabulary.tokens[token_id]
        whole = token_id in self._vocabulary.control_ids or token_id in self._vocabulary.user_defined_ids
        value = token.encode() if whole else self._bpe.token_bytes(token_id)
        self._bytes[token_id] = value
        return value

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self._vocabulary.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer: end of text, of turn, of message, as far as the model has them."""
        return self._vocabulary.eos_token_ids

    @property
    def words_stand_alone(self) -> bool:
        """Whether a text may be cut before a space between two letters, and has the ids of both parts."""
        return self._bpe.words_stand_alone

    @property
    def special_ids(self) -> frozenset[int]:
        """The control tokens: structure, not text."""
        return self._vocabulary.control_ids

    @property
    def special_tokens(self) -> Sequence[str]:
        """The control tokens as they are written, longest first."""
        return [token for token, i in self._specials if i in self._vocabulary.control_ids]

    @property
    def bos_token(self) -> str:
        """As it is written; empty when the model has none."""
        return self._written(self._vocabulary.bos_token_id)

    @property
    def eos_token(self) -> str:
        """As it is written; empty when the model has none."""
        return self._written(self._vocabulary.eos_token_id)

    @property
    def chat_template(self) -> str | None:
        return self._vocabulary.chat_template

    def _written(self, token_id: int | None) -> str:
        return "" if token_id is None else self._vocabulary.tokens[token_id]

    def _encode_plain(self, text: str) -> list[int]:
        try:
            return self._bpe.encode(text)
        except (TypeError, UnicodeEncodeError):
            at = next(i for i, char in enumerate(text) if 0xD800 <= ord(char) < 0xE000)
            raise ParameterError("text", text[at], "is half of a surrogate pair, not a character") from None


def _longest_first(vocabulary: Vocabulary, ids: Iterable[int]) -> list[tuple[str, int]]:
    """Pairs (text, id), ordered by length in bytes, ties by id."""
    pairs = [(vocabulary.tokens[i], i) for i in sorted(ids)]
    return sorted(pairs, key=lambda pair: -len(pair[0].encode()))


def _cut(piece: str | int, token: str, token_id: int) -> list[str | int]:
    """The piece with every occurrence of the token in it replaced by its id; no empty texts."""
    if isinstance(piece, int):
        return [piece]
    parts: list[str | int] = []
    for i, text in enumerate(piece.split(token)):
        if i:
            parts.append(token_id)
        if text:
            parts.append(text)
    return parts
