"""Pre-tokenizers: how a text is cut before BPE, by the name that GGUF files give (`tokenizer.ggml.pre`).

Each is a list of regular expressions, applied one after the other to the pieces that the one before left;
what an expression does not match stays a piece of its own. The expressions are those of the models' own
tokenizers, in the form that llama.cpp uses, whose token ids are the reference.
"""

from dataclasses import dataclass, replace

# What Unicode 16 added. llama.cpp knows Unicode 15; what runs the expressions here may know a newer one.
_NEW_DIGITS = (
    r"\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{16130}-\x{16139}\x{16D70}-\x{16D79}"
    r"\x{1CCF0}-\x{1CCF9}\x{1E5F1}-\x{1E5FA}"
)
_NEW_PUNCTUATION = (
    r"\x{1B4E}-\x{1B4F}\x{1B7F}\x{10D6E}\x{113D4}-\x{113D5}\x{113D7}-\x{113D8}\x{11BE1}\x{16D6D}-\x{16D6F}"
    r"\x{1E5FF}"
)

_NUMBER = rf"[\p{{N}}&&[^{_NEW_DIGITS}]]"
_SYMBOL = rf"[^\s\p{{L}}{_NUMBER}]"
_WORDS_OF_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?{_NUMBER}+| ?{_SYMBOL}+|\s+(?!\S)"


def _words_of_llama3(digits: str) -> str:
    return (
        r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
        rf"|[^\r\n\p{{L}}{_NUMBER}]?\p{{L}}+|{digits}| ?{_SYMBOL}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """How one kind of vocabulary cuts text."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as it stands is that token, whatever the merges would make of it."""
    add_bos: bool = False
    """Whether a prompt starts with the BOS token where the file does not say."""


_DEFAULT = PreTokenizer(
    (rf"[[\p{{P}}&&[^{_NEW_PUNCTUATION}]]$+<=>^~|]+", _WORDS_OF_GPT2, _NUMBER + "+", "[0-9]{3}")
)
_GPT2 = PreTokenizer((_WORDS_OF_GPT2,))
_STARCODER = PreTokenizer((_NUMBER, _WORDS_OF_GPT2))
_DBRX = PreTokenizer((_words_of_llama3(_NUMBER + "{1,3}"),))
_LLAMA3 = replace(_DBRX, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words_of_llama3(_NUMBER),))

PRE_TOKENIZERS = {
    "codeshell": _STARCODER,
    "command-r": _STARCODER,
    "dbrx": _DBRX,
    "deepseek-r1-qwen": _QWEN2,
    "default": _DEFAULT,
    "exaone": _STARCODER,
    "exaone4": _GPT2,
    "falcon3": _LLAMA3,
    "gpt-2": _GPT2,
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "megrez": _QWEN2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "refact": _STARCODER,
    "smaug-bpe": _DBRX,
    "smollm": _STARCODER,
    "stablelm2": _QWEN2,
    "starcoder": _STARCODER,
}
