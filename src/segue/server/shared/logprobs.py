"""Log-probabilities in the formats of completions, of chat completions, and of vLLM's `prompt_logprobs`."""

import codecs
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import msgspec

from segue.answers.outputs import Logprob
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

    def add(self, new: "CompletionLogprobs") -> None:
        """Those of the tokens that follow."""
        self.text_offset += new.text_offset
        self.token_logprobs += new.token_logprobs
        self.tokens += new.tokens
        self.top_logprobs += new.top_logprobs


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


class Positions:
    """Where a text's tokens begin in it, in characters. One that goes on with a character begins where that does."""

    def __init__(self, tokenizer: Tokenizer, start: int, *, hidden: Collection[int] = ()) -> None:
        """`start` is that of the first token; `hidden` ones have no text."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.end = start
        """Where the token that was taken last ends."""

    def take(self, token: int) -> int:
        """The next token's."""
        position = self.end
        if token not in self._hidden:
            self.end += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return position


class TextOfTokens:
    """Deals an answer's text to its tokens, however both come: text may come after its tokens, and for many at once.

    What is made of the dealt texts then does not depend on the schedule.
    """

    def __init__(self, positions: Positions) -> None:
        """`positions` begin at 0."""
        self._positions = positions
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        """Tokens whose text has not all come, and where it ends."""
        self._text = ""
        """What has not been dealt."""
        self._start = 0
        """Its position."""

    def push(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], *, is_last: bool
    ) -> Iterator[tuple[str, list[TokenLogprob]]]:
        """The text of each token that is complete, with the token's entry; at the end all that is left."""
        self._text += text
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self._positions.take(token)
            self._waiting.append((self._positions.end, logprob))
        while self._waiting and (is_last or self._waiting[0][0] <= self._start + len(self._text)):
            end, logprob = self._waiting.popleft()
            yield self._take(end - self._start), [logprob]
        if is_last and self._text:
            yield self._take(len(self._text)), []

    def _take(self, num_chars: int) -> str:
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        self._start += len(taken)
        return taken


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
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], positions: Sequence[int]
    ) -> CompletionLogprobs:
        """All three of equal length. The first token of a prompt has None for an entry."""
        logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, entry, position in zip(token_ids, entries, positions, strict=True):
            logprobs.text_offset.append(position)
            logprobs.tokens.append(self._key(token))
            logprobs.token_logprobs.append(None if entry is None else entry[token].logprob)
            top: dict[str, float] = {}
            for i, each in (entry or {}).items():
                top.setdefault(
                    self._key(i), each.logprob
                )  # of two with the same text, the drawn or likelier one
            logprobs.top_logprobs.append(None if entry is None else top)
        return logprobs

    def name(self, token: int, logprob: Logprob) -> str:
        return f"token_id:{token}" if self._as_ids else logprob.decoded_token

    def _key(self, token: int) -> str:
        """As `name`, but different bytes are different: a part of a character is "bytes:\\xf0\\x9f", OpenAI's form."""
        if self._as_ids:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return f"bytes:{data.decode(errors='backslashreplace')}"


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, PromptLogprob] | None]:
    """In vLLM's form, by token id."""
    return [
        None
        if entry is None
        else {
            str(token): PromptLogprob(logprob=each.logprob, rank=each.rank, decoded_token=each.decoded_token)
            for token, each in entry.items()
        }
        for entry in entries
    ]
