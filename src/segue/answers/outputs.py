"""What goes into `LLM.generate` and what comes out: vLLM's names and shapes, with text."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import msgspec

from segue.contract.reports import FinishReason, RequestMetrics


class TextPrompt(TypedDict):
    """A prompt as text. Special tokens in it are read as such."""

    prompt: str
    cache_salt: NotRequired[str]
    """Prompts share cached KV only with prompts of the same salt."""
    adapter: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, used as they are."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """Their text, only for the record."""
    cache_salt: NotRequired[str]
    adapter: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]
"""A list of integers is token ids."""


class Logprob(msgspec.Struct, frozen=True):
    """One token's log-probability (nats, of the raw logits)."""

    logprob: float
    rank: int
    """1 for the most likely id."""
    decoded_token: str


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer to a prompt."""

    index: int
    """Which of the `n` answers."""
    text: str
    token_ids: list[int]
    """With the token that ended it: end of sequence, a stop token, or the one that completes a stop string."""
    cumulative_logprob: float | None = None
    """The sum over `token_ids`; None without logprobs."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One for each of `token_ids`: the drawn id first, then the most likely ones."""
    finish_reason: FinishReason | None = None
    """"stop", "length", "abort" or "error"; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token's id or the stop string; None for end-of-sequence."""
    error: str | None = None
    """With `finish_reason` "error": one line."""


class RequestTimes(msgspec.Struct, kw_only=True):
    """When things happened to a request, in seconds of the front end's monotonic clock."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return self.last_token_s - self.first_token_s


class RequestOutput(msgspec.Struct, kw_only=True):
    """A prompt and its answers, so far or complete."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One for each prompt token, None for the first."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    """Summed over the answers that are complete."""
    times: RequestTimes
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was already there, for the first answer."""


class Delta(msgspec.Struct, kw_only=True):
    """What one answer gained in one step. Joined, an answer's deltas are its `CompletionOutput`."""

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
