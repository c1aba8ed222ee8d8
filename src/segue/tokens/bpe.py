"""Byte-level BPE (Sennrich et al. 2016, Radford et al. 2019), as in GGUF's vocabularies "gpt2"."""

import os
from typing import TYPE_CHECKING

from segue.tokens.byte_level import token_to_bytes
from segue.tokens.vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers


class MergeError(ValueError):
    """The merges do not fit the tokens."""


class ByteLevelBPE:
    """Text without special tokens to ids, and a token to its bytes."""

    words_stand_alone = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises MergeError."""
        self._tokens = vocabulary.tokens
        self._bpe = _build(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Bytes that the vocabulary has no token for are left out. Raises TypeError or UnicodeEncodeError for a text
        with a lone surrogate."""
        # Other threads run meanwhile: a batch, unlike a single text, is encoded without the interpreter's lock.
        ids: list[int] = self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids
        unknown = len(self._tokens)
        return [i for i in ids if i != unknown] if unknown in ids else ids

    def token_bytes(self, token_id: int) -> bytes:
        return token_to_bytes(self._tokens[token_id])


def _build(vocabulary: Vocabulary) -> "tokenizers.Tokenizer":
    # Imported here: a command that needs no tokenizer should not pay for it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a batch is one text here
    import tokenizers
    from tokenizers import models, pre_tokenizers

    # A byte without a token must not let its neighbours merge across it, so it becomes a token of its own,
    # one past the vocabulary, which `encode` leaves out. Two spaces are in no byte-level token.
    unknown = "  "
    while unknown in vocabulary.ids:
        unknown += " "
    try:
        model = models.BPE(
            {**vocabulary.ids, unknown: len(vocabulary.tokens)},
            vocabulary.merges,
            unk_token=unknown,
            ignore_merges=vocabulary.pre_tokenizer.ignore_merges,
        )
    except Exception as error:  # the library raises nothing narrower
        raise MergeError(f"tokenizer.ggml.merges does not fit the tokens: {error}") from None
    bpe = tokenizers.Tokenizer(model)
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
        for expression in vocabulary.pre_tokenizer.expressions
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return bpe
