"""The fields of a request that say how to sample, with vLLM's names, and what they mean here."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from segue.engine.submission import KvScope
from segue.errors import ParameterError
from segue.sample.params import SamplingParams
from segue.server.shared.body import RequestBody, Unsupported
from segue.server.shared.options import ServerOptions
from segue.server.shared.structured import ResponseFormat, StructuredOutputs, structured_outputs

MAX_N = 128

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

UNSUPPORTED_SAMPLING: Mapping[str, Unsupported] = {
    "best_of": Unsupported("choosing the best of several answers is not supported; use n", (1,)),
    "use_beam_search": Unsupported("beam search is not supported", (False,)),
    "allowed_token_ids": Unsupported("is not supported; use logit_bias", ([],)),
    "bad_words": Unsupported("is not supported; use logit_bias or stop", ([],)),
    "logits_processors": Unsupported("is not supported", ([],)),
    "prompt_embeds": Unsupported("embeddings as a prompt are not supported"),
    "guided_json": Unsupported("is vLLM's old form; use structured_outputs"),
    "guided_regex": Unsupported("is vLLM's old form; use structured_outputs"),
    "guided_choice": Unsupported("is vLLM's old form; use structured_outputs"),
    "guided_grammar": Unsupported("is vLLM's old form; use structured_outputs"),
}
IGNORED_SAMPLING = frozenset({"length_penalty", "spaces_between_special_tokens", "user"})
"""A penalty for beam search; a choice that byte-level tokens do not leave; who asks."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """A last chunk without choices tells the usage."""
    continuous_usage_stats: bool | None = None
    """So does every chunk."""


class SamplingFields(RequestBody, kw_only=True):
    """Fields that every endpoint that generates has."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    priority: Int | None = None
    cache_salt: Annotated[str, Meta(max_length=512)] | None = None
    adapter: Annotated[str, Meta(max_length=512)] | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def scope(self) -> KvScope:
        return KvScope(cache_salt=self.cache_salt, adapter=self.adapter)

    def params(
        self,
        *,
        options: ServerOptions,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        response_format: ResponseFormat | None = None,
        **others: Any,
    ) -> SamplingParams:
        """With what the endpoints name each in its own way; None leaves `others` at their defaults.

        Raises ParameterError.
        """
        for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if value is not None and value > options.max_logprobs:
                raise ParameterError(
                    name, value, f"is more than --max-logprobs={options.max_logprobs} allows"
                )
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            "stop": _without_empty(self.stop),
            "stop_token_ids": self.stop_token_ids,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "skip_special_tokens": self.skip_special_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "structured_outputs": structured_outputs(response_format, self.structured_outputs),
            **others,
        }
        return SamplingParams(
            max_tokens=max_tokens, **{name: value for name, value in given.items() if value is not None}
        )


class CompletionFields(SamplingFields, kw_only=True):
    """Fields that completions and chat completions share."""

    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    prompt_logprobs: Count | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Keep only so many tokens of the prompt's end; -1: as many as fit."""
    return_tokens_as_token_ids: bool | None = None
    """Logprobs name tokens "token_id:42"."""
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None

    def check_stream_fields(self) -> None:
        """Raises ParameterError for what goes only with, or only without, a stream."""
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "…", "is only for stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", self.prompt_logprobs, "is not for stream=true")

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk tells it. That of a whole answer does."""
        return not self.stream or bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Only together with `include_usage`, as vLLM has it."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)


def _without_empty(stop: str | list[str] | None) -> list[str] | None:
    """Clients send "" and [] for "none"."""
    strings = [stop] if isinstance(stop, str) else stop or []
    return [string for string in strings if string] or None
