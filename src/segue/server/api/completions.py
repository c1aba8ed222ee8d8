"""POST /v1/completions: a prompt is continued."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from segue.answers.outputs import Delta
from segue.sample.params import SamplingParams
from segue.server.api.chunks import ChunkWriter, extended
from segue.server.shared.body import Unsupported, read_body
from segue.server.shared.encoding import Prompts, encode_prompts
from segue.server.shared.generation import Generation
from segue.server.shared.http_errors import fields_named
from segue.server.shared.logprobs import (
    CompletionLogprobs,
    Positions,
    PromptLogprob,
    prompt_logprobs,
)
from segue.server.shared.options import ServerOptions
from segue.server.shared.sampling import (
    IGNORED_SAMPLING,
    UNSUPPORTED_SAMPLING,
    CompletionFields,
    Count,
)
from segue.server.shared.serving import SYSTEM_FINGERPRINT, Serving, serving_of
from segue.server.shared.sse import EventStream, json_when_done, until_done
from segue.server.shared.structured import check_grammar
from segue.server.shared.usage import Usage

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(CompletionFields, kw_only=True):
    """OpenAI's fields of a completion, and vLLM's."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED_SAMPLING,
        "suffix": Unsupported("text after the answer is not supported", ("",)),
    }
    ignored: ClassVar[frozenset[str]] = IGNORED_SAMPLING

    prompt: Prompts
    """A text, texts, token ids, or lists of token ids."""
    max_tokens: Count | None = None
    """0 only with `echo`: the prompt's logprobs and nothing else."""
    echo: bool | None = None
    logprobs: Count | None = None
    add_special_tokens: bool | None = None

    @property
    def is_only_echo(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self, options: ServerOptions) -> SamplingParams:
        """Raises ParameterError."""
        self.check_stream_fields()
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        echoed = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return self.params(
            options=options,
            max_tokens=1 if self.is_only_echo else max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=echoed,
            response_format=self.response_format,
            n=self.n,
        )


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop string or token that ended the answer; null for end-of-sequence."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET

    @classmethod
    def empty(cls, index: int) -> "CompletionChoice":
        return cls(index=index, text="", logprobs=None, finish_reason=None, stop_reason=None)

    def add(self, new: "CompletionChoice") -> None:
        self.text += new.text
        if self.logprobs is None:
            self.logprobs = new.logprobs
        elif new.logprobs is not None:
            self.logprobs.add(new.logprobs)
        if new.finish_reason is not None:
            self.finish_reason = new.finish_reason
            self.stop_reason = new.stop_reason
        self.prompt_token_ids = new.prompt_token_ids or self.prompt_token_ids
        self.token_ids = extended(self.token_ids, new.token_ids)


class Completion(msgspec.Struct, kw_only=True):
    """The answers, or with stream=true what is new of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    system_fingerprint: str = SYSTEM_FINGERPRINT
    usage: Annotated[Usage | UnsetType | None, Meta(description="null until the last chunk")] = UNSET

    def add(self, new: "Completion") -> None:
        for choice in new.choices:
            self.choices[choice.index].add(choice)
        self.usage = new.usage


async def create_completion(request: Request) -> Response:
    body = await read_body(request, CompletionRequest)
    writer = await _CompletionWriter.start(serving_of(request), body)
    if body.stream:
        return EventStream(until_done(writer.chunks()))
    return await json_when_done(request, writer.whole())


class _CompletionWriter(ChunkWriter[CompletionChoice, Completion]):
    def __init__(self, serving: Serving, body: CompletionRequest, model: str, generation: Generation) -> None:
        super().__init__(serving, body, model, generation, id_prefix="cmpl-")
        self._body = body
        self._tokenizer = serving.llm.get_tokenizer()
        self._positions: dict[int, Positions] = {}
        """Of the answers that have begun."""

    @classmethod
    async def start(cls, serving: Serving, body: CompletionRequest) -> "_CompletionWriter":
        """Raises what is wrong with the request."""
        model = serving.check_model(body.model)
        serving.check_room()
        params = body.sampling_params(serving.options)
        await check_grammar(params, body.response_format)
        with fields_named({"text": "prompt", "prompt_token_ids": "prompt"}):
            prompts = await encode_prompts(
                serving,
                body.prompt,
                body,
                params,
                add_special_tokens=body.add_special_tokens is not False,
            )
            generation = Generation(serving, prompts, params, priority=body.priority or 0)
        return cls(serving, body, model, generation)

    async def whole(self) -> Completion:
        num_answers = len(self._generation.prompts) * self._generation.params.n
        completion = self._chunk([CompletionChoice.empty(index) for index in range(num_answers)], UNSET)
        await self.add_to(completion.add)
        if self._body.prompt_logprobs is not None:  # which are not streamed, and may be many
            await asyncio.to_thread(self._add_prompt_logprobs, completion)
        return completion

    def _add_prompt_logprobs(self, completion: Completion) -> None:
        n = self._generation.params.n
        for prompt in range(len(self._generation.prompts)):
            logprobs = prompt_logprobs(self._generation.prompt_logprobs(prompt))
            for choice in completion.choices[prompt * n : (prompt + 1) * n]:
                choice.prompt_logprobs = logprobs

    async def _choice(self, delta: Delta) -> CompletionChoice:
        index = delta.index
        if index in self._positions:
            return self._new_tokens(delta)
        prompt = index // self._generation.params.n
        choice = CompletionChoice.empty(index)
        if self._body.echo:  # in a thread, since the prompt may have many logprobs
            choice = await asyncio.to_thread(self._echoed, index, prompt)
        if self._body.return_token_ids:
            choice.prompt_token_ids = self._generation.prompts[prompt].token_ids
        hidden = self._tokenizer.special_ids if self._generation.params.skip_special_tokens else ()
        self._positions[index] = Positions(self._tokenizer, len(choice.text), hidden=hidden)
        choice.add(self._new_tokens(delta))
        return choice

    def _new_tokens(self, delta: Delta) -> CompletionChoice:
        """An answer's. The one that is drawn so that there are logprobs of the prompt is not shown."""
        choice = CompletionChoice.empty(delta.index)
        token_ids, entries = delta.token_ids, delta.logprobs
        if self._body.is_only_echo:
            token_ids, entries = [], None if entries is None else []
        else:
            choice.text = delta.text
        if delta.finish_reason is not None:
            choice.finish_reason = "length" if self._body.is_only_echo else str(delta.finish_reason)
            choice.stop_reason = None if self._body.is_only_echo else delta.stop_reason
        if entries is not None:
            positions = [self._positions[delta.index].take(token) for token in token_ids]
            choice.logprobs = self._logprobs.completion(token_ids, entries, positions)
        if self._body.return_token_ids:
            choice.token_ids = token_ids
        return choice

    def _echoed(self, index: int, prompt: int) -> CompletionChoice:
        """The prompt, as the beginning of an answer."""
        encoded = self._generation.prompts[prompt]
        text = encoded.text
        if text is None or self._body.truncate_prompt_tokens is not None:
            text = self._tokenizer.decode(encoded.token_ids, skip_special_tokens=False)
        choice = CompletionChoice.empty(index)
        choice.text = text
        if self._body.logprobs is not None:
            entries = self._generation.prompt_logprobs(prompt)
            positions = self._prompt_positions(encoded.token_ids, text)
            choice.logprobs = self._logprobs.completion(encoded.token_ids, entries, positions)
        return choice

    def _chunk(self, choices: Sequence[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    @property
    def _usage(self) -> Usage:
        """The token that is drawn so that there are logprobs of the prompt is nobody's."""
        usage = super()._usage
        if not self._body.is_only_echo:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def _prompt_positions(self, ids: Sequence[int], text: str) -> list[int]:
        """The token that the model wants first is not in a text that was given without it."""
        bos = self._tokenizer.bos_token
        is_added = ids[:1] == [self._tokenizer.bos_token_id] and not text.startswith(bos)
        positions = Positions(self._tokenizer, -len(bos) if is_added else 0)
        return [max(positions.take(token), 0) for token in ids]
