"""The text side: token ids from text and back, chat templates, text that is safe to show while it arrives."""

from segue.tokens.detokenizer import Detokenizer
from segue.tokens.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
