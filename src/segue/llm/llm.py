"""`LLM`: a model in this process, for scripts. vLLM's offline interface.

with LLM("smollm2") as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0.7, seed=1)):
        print(output.outputs[0].text)
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from segue.answers.outputs import Delta, Prompt, RequestOutput
from segue.answers.processor import OutputProcessor
from segue.answers.prompts import (
    EncodedPrompt,
    checked_params,
    checked_priority,
    encode_prompt,
    split_prompts,
    submissions_of,
)
from segue.args import EngineArgs, EngineOptions
from segue.contract.reports import EngineOutput, FinishReason
from segue.errors import EngineDead, ParameterError, RequestFailed
from segue.host.build import load
from segue.host.stepping import SharedSteps
from segue.sample.params import SamplingParams
from segue.tokens import Tokenizer

if TYPE_CHECKING:
    from segue.session.blocking import BlockingSession

Message = Mapping[str, object]
"""A chat message: "role" and "content", and what else the model's template knows."""


class LLM:
    """Generates answers with one model, in the caller's process. For one thread at a time.

    The options are those of `EngineArgs`. Raises ModelFileError, ParameterError or CapacityError.
    """

    def __init__(self, model: str | Path | EngineArgs, **options: Unpack[EngineOptions]) -> None:
        """`model` is an alias such as "smollm2", the path of a GGUF file, or all arguments together."""
        if isinstance(model, EngineArgs):
            assert not options, "EngineArgs has all the options"
            args = model
        else:
            args = EngineArgs.of(model, options)
        loaded = load(args)
        self.config = loaded.config
        self._steps = SharedSteps(loaded.engine)
        self._tokenizer = loaded.tokenizer
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers each prompt; the outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict; token ids alone are one prompt.
        `sampling_params` is for all prompts, or a list with one for each; `priority` has one for each (the
        lowest goes first, with the "priority" policy). `use_tqdm` shows a progress bar, on a terminal.

        Every prompt is checked before any runs: ParameterError, CapacityError. When a request fails the
        others are carried out all the same; then RequestFailed names the first that failed. Ctrl-C lets the
        step that is running end, aborts the rest and raises KeyboardInterrupt; the LLM can be used on.
        """
        encoded = [encode_prompt(self._tokenizer, prompt) for prompt in split_prompts(prompts)]
        return self._generate(encoded, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several, with the model's chat template; else as `generate`."""
        encoded = [
            EncodedPrompt(
                text=None,
                token_ids=self.encode_chat(
                    conversation, add_generation_prompt=add_generation_prompt, tools=tools
                ),
            )
            for conversation in _conversations(messages)
        ]
        return self._generate(encoded, sampling_params, use_tqdm=use_tqdm, priority=None)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> "Stream":
        """Answers one prompt, as it comes. Its request goes on whenever anything runs on this LLM, until the stream is
        read to its end or closed."""
        batch = _Batch(self._steps, self._tokenizer)
        params = checked_params(sampling_params)
        try:
            batch.add(next(self._numbers), encode_prompt(self._tokenizer, prompt), params, priority=0)
        except BaseException:
            batch.close()
            raise
        return Stream(batch)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        """The token ids of a conversation in the model's template; special tokens in its texts stay text."""
        from segue.tokens.chat import encode_chat

        return encode_chat(
            self._tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools
        )

    def session(self, messages: Sequence[Message] | None = None, *, role: str = "user") -> "BlockingSession":
        """A live session: a conversation that goes on after `messages`, in which `role` speaks; without them, plain
        text. Input is computed when it is appended."""
        from segue.session.blocking import open_session

        return open_session(self._steps, self._tokenizer, messages, role, f"session-{next(self._numbers)}")

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def reset_prefix_cache(self) -> None:
        """Forgets all cached KV."""
        self._steps.engine.reset_prefix_cache()

    def close(self) -> None:
        """Gives back the model's memory and threads."""
        self._steps.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if isinstance(sampling_params, list | tuple):
            params = [checked_params(each) for each in sampling_params]
        else:
            params = [checked_params(sampling_params)] * len(prompts)
        priorities = [0] * len(prompts) if priority is None else _priorities(priority)
        for name, values in (("sampling_params", params), ("priority", priorities)):
            if len(values) != len(prompts):
                raise ParameterError(name, f"{len(values)} values", f"there are {len(prompts)} prompts")
        batch = _Batch(self._steps, self._tokenizer)
        with (
            contextlib.closing(batch),
            _progress(sum(each.n for each in params), enabled=use_tqdm) as advance,
        ):
            for prompt, prompt_params, prompt_priority in zip(prompts, params, priorities, strict=True):
                batch.add(next(self._numbers), prompt, prompt_params, priority=prompt_priority)
            while batch.is_running:
                advance(batch.step())
        outputs = batch.outputs()
        for index, output in enumerate(outputs):
            for answer in output.outputs:
                if answer.finish_reason is FinishReason.ERROR:
                    raise RequestFailed(
                        f"request {output.request_id} (prompt {index}) failed: {answer.error}"
                    )
        return outputs


class Stream(Iterator[Delta]):
    """The deltas of one request. Closing it, or Ctrl-C in a step, aborts what still runs."""

    def __init__(self, batch: "_Batch") -> None:
        self._batch = batch
        self._ready: list[Delta] = []

    def __next__(self) -> Delta:
        while not self._ready:
            if not self._batch.is_running:
                self.close()
                raise StopIteration
            try:
                self._ready = self._batch.step()
            except BaseException:
                self.close()
                raise
        return self._ready.pop(0)

    @property
    def output(self) -> RequestOutput:
        """The answers as far as they are."""
        return self._batch.outputs()[0]

    def close(self) -> None:
        self._batch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Batch:
    """Requests that are carried out together, each known by its number."""

    def __init__(self, steps: SharedSteps, tokenizer: Tokenizer) -> None:
        self._steps = steps
        self._processor = OutputProcessor(tokenizer)
        self._request_ids: list[str] = []
        self._deltas: list[Delta] = []
        """New, and not returned by `step` yet."""
        self._error: Exception | None = None
        """What the next `step` raises."""
        self._outputs: list[RequestOutput] | None = None
        """Once closed."""

    def add(self, number: int, prompt: EncodedPrompt, params: SamplingParams, *, priority: int) -> None:
        request_id = str(number)
        engine = self._steps.engine
        engine_ids = [engine.intake.new_id(request_id) for _ in range(params.n)]
        submissions = submissions_of(engine.intake, prompt, params, request_ids=engine_ids, priority=priority)
        self._processor.add(
            request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            params=params,
            engine_ids=engine_ids,
        )
        self._request_ids.append(request_id)
        for submission in submissions:
            self._steps.open(submission.request_id, self._receive)
            engine.add_request(submission)

    @property
    def is_running(self) -> bool:
        return self._outputs is None and (self._processor.num_open_answers > 0 or bool(self._deltas))

    def step(self) -> list[Delta]:
        """What is new: of a step of the engine, unless others' steps have brought something already."""
        if not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._steps.engine.has_unfinished_requests():
                raise EngineDead("the engine lost its requests: make a new LLM")
            self._steps.step()
        deltas, self._deltas = self._deltas, []
        return deltas

    def outputs(self) -> list[RequestOutput]:
        if self._outputs is not None:
            return self._outputs
        return [self._processor.output(request_id) for request_id in self._request_ids]

    def close(self) -> None:
        """Aborts what still runs."""
        if self._outputs is not None:
            return
        for request_id in self._request_ids:
            for engine_id in self._processor.abort(request_id):
                self._abort(engine_id)
        self._outputs = [self._processor.pop(request_id) for request_id in self._request_ids]

    def _receive(self, output: EngineOutput | EngineDead) -> None:
        """May be called in the midst of what somebody else does, who is not to suffer from what is wrong here."""
        if isinstance(output, EngineDead):
            self._error = output
        elif self._error is None:
            try:
                self._take_in(output)
            except Exception as error:
                self._error = error

    def _take_in(self, output: EngineOutput) -> None:
        processed = self._processor.process((output,))
        self._deltas += processed.deltas
        for engine_id in processed.aborts:
            self._abort(engine_id)

    def _abort(self, engine_id: str) -> None:
        self._steps.close(engine_id)
        with contextlib.suppress(EngineDead):
            self._steps.engine.abort_request(engine_id)


def _priorities(priority: object) -> list[int]:
    if not isinstance(priority, list | tuple):
        raise ParameterError("priority", priority, "must be a list with one for each prompt")
    return [checked_priority(each) for each in priority]


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation, or several, as a list of them."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ParameterError("messages", messages, "must be a list of messages, or a list of such lists")
    one = [message for message in messages if isinstance(message, Mapping)]
    if len(one) == len(messages):
        return [one]
    several = [conversation for conversation in messages if not isinstance(conversation, Mapping)]
    if one or any(isinstance(conversation, str) for conversation in several):
        raise ParameterError("messages", messages, "must be a list of messages, or a list of such lists")
    return several


@contextlib.contextmanager
def _progress(num_answers: int, *, enabled: bool) -> Iterator[Callable[[list[Delta]], None]]:
    """A progress bar on stderr, if that is a terminal; yields what takes each step's deltas."""
    if not enabled or not sys.stderr.isatty():
        yield lambda deltas: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answers", total=num_answers, tokens=0)
        tokens = 0

        def advance(deltas: list[Delta]) -> None:
            nonlocal tokens
            tokens += sum(len(delta.token_ids) for delta in deltas)
            ended = sum(delta.finish_reason is not None for delta in deltas)
            progress.update(task, advance=ended, tokens=tokens)

        yield advance
