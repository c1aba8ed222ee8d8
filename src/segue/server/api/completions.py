"""POST /v1/completions: a prompt is continued."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from segue.answers.outputs import CompletionOutput, Delta, RequestOutput
from segue.contract.reports import FinishReason
from segue.sample.params import SamplingParams
from segue.server.shared.answers import Answers
from segue.server.shared.body import Unsupported, read_body
from segue.server.shared.encoding import Prompts, encode_prompts
from segue.server.shared.http_errors import fields_named
from segue.server.shared.logprobs import (
    CompletionLogprobs,
    Entry,
    LogprobWriter,
    Positions,
    PromptLogprob,
    prompt_logprobs,
)
from segue.server.shared.options import ServerOptions
from segue.server.shared.request_id import answer_id
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


class Completion(msgspec.Struct, kw_only=True):
    """The answers, or with stream=true what is new of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str = SYSTEM_FINGERPRINT
    usage: Annotated[Usage | UnsetType | None, Meta(description="null until the last chunk")] = UNSET


async def create_completion(request: Request) -> Response:
    body = await read_body(request, CompletionRequest)
    serving = serving_of(request)
    writer = await _Writer.start(serving, body)
    if body.stream:
        return EventStream(until_done(writer.chunks()))
    return await json_when_done(request, writer.whole())


class _Writer:
    """One request's answers in the form of this endpoint."""

    def __init__(self, body: CompletionRequest, model: str, serving: Serving, answers: Answers) -> None:
        self._body = body
        self._answers = answers
        self._tokenizer = serving.llm.get_tokenizer()
        self._logprobs = LogprobWriter(self._tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._positions: dict[int, Positions] = {}
        """Of the answers that have begun."""
        self._id = answer_id("cmpl-", body.request_id)
        self._model = model
        self._created = serving.now()

    @classmethod
    async def start(cls, serving: Serving, body: CompletionRequest) -> "_Writer":
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
            answers = Answers(serving, prompts, params, priority=body.priority or 0)
        return cls(body, model, serving, answers)

    async def whole(self) -> Completion:
        outputs = await self._answers.outputs()
        # There may be many logprobs: not on the event loop.
        return self._completion(await asyncio.to_thread(self._choices, outputs), self._usage)

    def _choices(self, outputs: Sequence[RequestOutput]) -> list[CompletionChoice]:
        return [
            self._choice(prompt * self._answers.params.n + answer.index, output, answer)
            for prompt, output in enumerate(outputs)
            for answer in output.outputs
        ]

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        usage: Usage | UnsetType | None = None if self._body.include_usage else UNSET
        async with contextlib.aclosing(self._answers.deltas()) as deltas:
            async for delta in deltas:
                if self._body.continuous_usage:
                    usage = self._usage
                yield self._completion([self._delta_choice(delta)], usage)
        if self._body.include_usage:
            yield self._completion([], self._usage)

    @property
    def _usage(self) -> Usage:
        """The token that is drawn so that there are logprobs of the prompt is nobody's."""
        usage = self._answers.usage
        if not self._body.is_only_echo:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice:
        choice = self._new_choice(index, answer.text, answer.token_ids, answer.logprobs)
        self._end(choice, answer.finish_reason, answer.stop_reason)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs) or UNSET
        return choice

    def _delta_choice(self, delta: Delta) -> CompletionChoice:
        choice = self._new_choice(delta.index, delta.text, delta.token_ids, delta.logprobs)
        if delta.finish_reason is not None:
            self._end(choice, delta.finish_reason, delta.stop_reason)
        return choice

    def _end(
        self, choice: CompletionChoice, reason: FinishReason | None, stop_reason: int | str | None
    ) -> None:
        is_only_echo = self._body.is_only_echo
        choice.finish_reason = "length" if is_only_echo else str(reason)
        choice.stop_reason = None if is_only_echo else stop_reason

    def _new_choice(
        self, index: int, text: str, token_ids: list[int], entries: Sequence[Entry] | None
    ) -> CompletionChoice:
        """New tokens of an answer, the prompt before the first ones if it is echoed."""
        if self._body.is_only_echo:
            text, token_ids, entries = "", [], None if entries is None else []
        is_first = index not in self._positions
        prompt = index // self._answers.params.n
        prompt_ids = self._answers.prompts[prompt].token_ids
        echoed = self._prompt_text(prompt) if self._body.echo else ""
        if is_first:
            hidden = self._tokenizer.special_ids if self._answers.params.skip_special_tokens else ()
            self._positions[index] = Positions(self._tokenizer, len(echoed), hidden=hidden)
        logprobs = None
        if entries is not None:
            scored_ids: list[int] = token_ids
            scored: list[Entry | None] = list(entries)
            positions = [self._positions[index].take(token) for token in token_ids]
            if is_first and self._body.echo:
                scored_ids = prompt_ids + scored_ids
                scored = [*(self._answers.output(prompt).prompt_logprobs or ()), *scored]
                positions = self._prompt_positions(prompt_ids, echoed) + positions
            logprobs = self._logprobs.completion(scored_ids, scored, positions)
        text = echoed + text if is_first else text
        choice = CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=None, stop_reason=None
        )
        if self._body.return_token_ids:
            choice.token_ids = token_ids
            if is_first:
                choice.prompt_token_ids = prompt_ids
        return choice

    def _prompt_text(self, prompt: int) -> str:
        encoded = self._answers.prompts[prompt]
        if encoded.text is not None and self._body.truncate_prompt_tokens is None:
            return encoded.text
        return self._tokenizer.decode(encoded.token_ids, skip_special_tokens=False)

    def _prompt_positions(self, ids: Sequence[int], text: str) -> list[int]:
        """The token that the model wants first is not in a text that was given without it."""
        bos = self._tokenizer.bos_token
        is_added = ids[:1] == [self._tokenizer.bos_token_id] and not text.startswith(bos)
        positions = Positions(self._tokenizer, -len(bos) if is_added else 0)
        return [max(positions.take(token), 0) for token in ids]
