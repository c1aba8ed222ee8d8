"""Log-probabilities in the formats of completions, of chat completions, and of vLLM's `prompt_logprobs`."""

from collections.abc import Sequence

import msgspec

from segue.outputs import Logprob
from segue.tokens import Tokenizer

Entry = dict[int, Logprob]
"""One position: the drawn id first, then the most likely ones."""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    """The token's own; a character may be spread over several tokens."""
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Lists of equal length, an item for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


class LogprobWriter:
    """Writes one model's entries. With `as_ids`, tokens are named "token_id:42" rather than by their text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, token_ids: Sequence[int], entries: Sequence[Entry], num_top: int) -> ChatLogprobs:
        content = []
        for token, entry in zip(token_ids, entries, strict=True):
            likely = [(i, logprob) for i, logprob in entry.items() if logprob.rank <= num_top]
            likely.sort(key=lambda pair: pair[1].rank)
            content.append(
                TokenLogprob(
                    token=self.name(token, entry[token]),
                    logprob=entry[token].logprob,
                    bytes=list(self._tokenizer.token_bytes(token)),
                    top_logprobs=[
                        TopLogprob(
                            token=self.name(i, logprob),
                            logprob=logprob.logprob,
                            bytes=list(self._tokenizer.token_bytes(i)),
                        )
                        for i, logprob in likely[:num_top]
                    ],
                )
            )
        return ChatLogprobs(content=content)

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], offset: int
    ) -> tuple[CompletionLogprobs, int]:
        """`offset` is where the first token's text begins; returned with where the last one's ends.

        The first token of a prompt has None for an entry.
        """
        logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, entry in zip(token_ids, entries, strict=True):
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            logprobs.text_offset.append(offset)
            logprobs.tokens.append(f"token_id:{token}" if self._as_ids else text)
            logprobs.token_logprobs.append(None if entry is None else entry[token].logprob)
            logprobs.top_logprobs.append(
                None if entry is None else {self.name(i, each): each.logprob for i, each in entry.items()}
            )
            offset += len(text)
        return logprobs, offset

    def name(self, token: int, logprob: Logprob) -> str:
        return f"token_id:{token}" if self._as_ids else logprob.decoded_token


def prompt_logprobs(entries: Sequence[Entry | None] | None) -> list[dict[str, PromptLogprob] | None] | None:
    """In vLLM's form, by token id."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): PromptLogprob(logprob=each.logprob, rank=each.rank, decoded_token=each.decoded_token)
            for token, each in entry.items()
        }
        for entry in entries
    ]
