"""Pre-tokenizers: how a text is cut before BPE, by the name that GGUF files give (`tokenizer.ggml.pre`).

Each is a list of regular expressions, applied one after the other to the pieces that the one before left;
what an expression does not match stays a piece of its own. The expressions are those of the models' own
tokenizers, in the form that llama.cpp uses, whose token ids are the reference.
"""

from dataclasses import dataclass

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _llama3(digits: str) -> str:
    return (
        _ANY_CASE_CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """How one kind of vocabulary cuts text."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as it stands is that token, whatever the merges would make of it."""
    add_bos: bool = False
    """Whether a prompt starts with the BOS token where the file does not say."""


_SPLIT_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA3 = PreTokenizer((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_llama3(r"\p{N}"),))

PRE_TOKENIZERS = {
    "command-r": _SPLIT_DIGITS,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _PLAIN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "phi-2": _PLAIN_GPT2,
    "qwen2": _QWEN2,
    "refact": _SPLIT_DIGITS,
    "smollm": _SPLIT_DIGITS,
    "starcoder": _SPLIT_DIGITS,
}
