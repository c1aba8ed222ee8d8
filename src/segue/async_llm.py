"""`AsyncLLM`: a model for any number of tasks at once. vLLM's asynchronous interface.

async with AsyncLLM("smollm2") as llm:
    async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=100)):
        print(output.outputs[0].text)

    engine thread    output ─▶ _Answers: detokenise, merge with what has not been read ─┐ wake
    event loop       AnswerStream.__anext__ ◀─ all that is new ◀─────────────────────────┘

What is not read yet is merged, so a slow reader holds up nobody, and its memory is bounded by its answer.
"""

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

import msgspec

from segue.args import EngineArgs, EngineOptions
from segue.engine.outputs import EngineOutput, EngineStats, FinishReason
from segue.engine.request import Keep
from segue.engine_loop import Channel, EngineLoop
from segue.errors import EngineDead, ParameterError, RequestFailed
from segue.llm import Message
from segue.output_processor import OutputProcessor
from segue.outputs import Delta, Prompt, RequestOutput
from segue.prompts import EncodedPrompt, checked_ids, encode_prompt
from segue.sample.params import SamplingParams
from segue.session.live import Session, SessionManager
from segue.tokens import Tokenizer

T = TypeVar("T")


class StreamingInput(msgspec.Struct, frozen=True):
    """A chunk of a request's input. The answer to it ends before the next chunk is read by the model."""

    prompt: Prompt | Sequence[int]
    """May be empty, if it is not the first."""
    sampling_params: SamplingParams | None = None
    """How it is answered; None: as the call says."""


class AsyncLLM:
    """Generates answers with one model. For any number of tasks and event loops; made inside or outside of them.

    The options are those of `EngineArgs`; with `engine_process=True` the engine has a process of its own. Raises
    ModelFileError, ParameterError or CapacityError.
    """

    def __init__(
        self,
        model: str | Path | EngineArgs,
        *,
        max_sessions: int | None = None,
        session_timeout_s: float | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """`model` is an alias such as "smollm2", the path of a GGUF file, or all arguments together.

        `max_sessions` live sessions may be open at once (None: any number); one that gets no input for
        `session_timeout_s` is closed (None: never).
        """
        if isinstance(model, EngineArgs):
            assert not options, "EngineArgs has all the options"
            args = model
        else:
            args = EngineArgs.of(model, options)
        loaded = args.load()
        self.config = loaded.config
        self.engine_loop = EngineLoop(loaded.engine)
        """For what works on token ids; see `Channel`."""
        self._tokenizer = loaded.tokenizer
        self.sessions = SessionManager(
            self.engine_loop, loaded.tokenizer, max_sessions=max_sessions, timeout_s=session_timeout_s
        )
        self._lock = threading.Lock()
        self._answers: dict[str, _Answers] = {}
        """By the caller's request id, until they have ended; under the lock."""
        self._numbers = itertools.count()
        # Also when this object is dropped and at the end of the program: the thread must not outlive it.
        self._shutdown = weakref.finalize(self, self.engine_loop.close)

    def generate(
        self,
        prompt: "Prompt | EncodedPrompt | AsyncIterable[StreamingInput]",
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keep: Keep = "computed",
    ) -> "AnswerStream[RequestOutput]":
        """Answers a prompt. The stream gives the answers as far as they are, each time with more.

        To be called on a running event loop; the request starts at once. A lower `priority` is served first, with the
        "priority" policy. Raises ParameterError, CapacityError or EngineDead; the stream raises RequestFailed or
        EngineDead. Whoever leaves the stream, by `break` or by cancellation, aborts the request.

        The prompt may be an asynchronous iterator of chunks. Each is answered, in order; chunks that come while an
        answer runs wait for its end. `outputs[0].finish_reason` says that a chunk's answer is complete, `finished`
        that it was the last one. `keep` says what of an answer stays in front of the next chunk: "computed", all but
        the last token, which the model has drawn and not read; or "all". An exception of the iterator aborts the
        request and is raised by the stream, like the errors of a chunk.
        """
        answers = self._start(prompt, sampling_params, request_id, priority, keep, as_deltas=False)
        return AnswerStream(self, answers, answers.take_output)

    def deltas(
        self,
        prompt: "Prompt | EncodedPrompt | AsyncIterable[StreamingInput]",
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keep: Keep = "computed",
    ) -> "AnswerStream[Delta]":
        """As `generate`, but the stream gives what is new. Joined by `index`, the deltas are the answers."""
        answers = self._start(prompt, sampling_params, request_id, priority, keep, as_deltas=True)
        return AnswerStream(self, answers, answers.take_delta)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> "AnswerStream[RequestOutput]":
        """Answers a conversation, with the model's chat template; else as `generate`."""
        token_ids = self.encode_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        prompt = EncodedPrompt(text=None, token_ids=token_ids)
        return self.generate(prompt, sampling_params, request_id, priority=priority)

    def session(
        self,
        messages: Sequence[Message] | None = None,
        *,
        role: str = "user",
        session_id: str | None = None,
    ) -> Session:
        """A live session: a conversation that goes on after `messages`, in which `role` speaks; without them, plain
        text. Input is computed while it arrives.

        To be called and used on a running event loop. Raises CapacityError when there are `max_sessions`,
        ParameterError for messages that the model's chat template does not take.
        """
        return self.sessions.open(messages, role=role, session_id=session_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests where they are; their streams end with `FinishReason.ABORT`. Unknown ones are ignored."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            with self._lock:
                answers = self._answers.get(each)
            if answers is not None:
                answers.end_here()

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

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def stats(self) -> EngineStats:
        """Where the engine stands, after the step that runs."""
        return await asyncio.wrap_future(self.engine_loop.call(lambda client: client.stats))

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached KV."""
        await asyncio.wrap_future(self.engine_loop.call(lambda client: client.reset_prefix_cache()))

    async def check_health(self) -> None:
        """Raises EngineDead if nothing can be answered any more."""
        self.engine_loop.check_alive()

    def shutdown(self) -> None:
        """Gives back the model's memory and threads; open streams raise EngineDead. May be called again."""
        self.engine_loop.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _start(
        self,
        prompt: "Prompt | EncodedPrompt | AsyncIterable[StreamingInput]",
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        keep: Keep,
        *,
        as_deltas: bool,
    ) -> "_Answers":
        params = sampling_params or SamplingParams()
        answers = self._register(request_id, as_deltas=as_deltas)
        try:
            if isinstance(prompt, AsyncIterable):
                _check_streaming(params)
                answers.read(prompt, params, priority=priority, keep=keep)
            else:
                if not isinstance(prompt, EncodedPrompt):
                    prompt = encode_prompt(self._tokenizer, prompt)
                answers.ask(prompt, params, priority=priority)
        except BaseException:
            answers.abort()
            raise
        return answers

    def _register(self, request_id: str | None, *, as_deltas: bool) -> "_Answers":
        event_loop = asyncio.get_running_loop()
        with self._lock:
            if request_id is None:
                request_id = next(name for name in map(str, self._numbers) if name not in self._answers)
            elif request_id in self._answers:
                raise ParameterError("request_id", request_id, "is in use by an unfinished request")
            forget = partial(_forget, self._answers, request_id)
            answers = _Answers(
                request_id, self.engine_loop, self._tokenizer, event_loop, forget, as_deltas=as_deltas
            )
            self._answers[request_id] = answers
        return answers


class AnswerStream(AsyncIterator[T], Generic[T]):
    """What a request has to say. To be read by one task; leaving it early aborts the request."""

    def __init__(self, llm: AsyncLLM, answers: "_Answers", take: "Callable[[], T | None]") -> None:
        self._llm = llm  # which stays alive while it is read
        self._answers = answers
        self._take = take

    @property
    def request_id(self) -> str:
        return self._answers.request_id

    async def __anext__(self) -> T:
        try:
            return await self._answers.wait_for(self._take)
        except BaseException:
            self._answers.abort()
            raise

    @property
    def output(self) -> RequestOutput:
        """The answers to the prompt as far as they are; with streaming input, to the chunk that was answered last."""
        return self._answers.output()

    async def aclose(self) -> None:
        """Aborts the request if it still runs."""
        self._answers.abort()

    def __del__(self) -> None:
        # Takes no lock: a destructor may run anywhere. Where the event loop is closed, the engine's loop sees it.
        if self._answers.ended:
            return
        with contextlib.suppress(RuntimeError):
            self._answers.event_loop.call_soon_threadsafe(self._answers.abort)


class _Turn(msgspec.Struct, eq=False):
    """One prompt, or one chunk, and its answers."""

    processor: OutputProcessor
    has_news: bool = False
    """Something that was not read yet."""


class _Answers:
    """One call's answers. The engine thread fills them, a task reads them, each under the lock."""

    def __init__(
        self,
        request_id: str,
        engine_loop: EngineLoop,
        tokenizer: Tokenizer,
        event_loop: asyncio.AbstractEventLoop,
        on_end: Callable[[], object],
        *,
        as_deltas: bool,
    ) -> None:
        self.request_id = request_id
        self.event_loop = event_loop
        self.ended = False
        """No more news will come."""
        self._engine_loop = engine_loop
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._as_deltas = as_deltas
        self._lock = threading.Lock()
        self._news = asyncio.Event()
        self._channels: dict[str, Channel] = {}
        """By the processor's name of the answer."""
        self._turns: deque[_Turn] = deque()
        """The first one is being answered; further ones are chunks that wait."""
        self._complete: deque[RequestOutput] = deque()
        """Turns that are over and were not read yet."""
        self._last: RequestOutput | None = None
        """Of the turn that was over last."""
        self._answered: OutputProcessor | None = None
        """Has the answers of that turn."""
        self._deltas: deque[Delta] = deque()
        """Not read yet, merged."""
        self._error: Exception | None = None
        """What the reader gets at the end."""
        self._reader: asyncio.Task[None] | None = None
        """Reads the chunks of a streaming input."""
        self._reader_is_done = False

    # --- input: event loop ------------------------------------------------------------------------------------

    def ask(self, prompt: EncodedPrompt, params: SamplingParams, *, priority: int) -> None:
        """Starts a request with one turn."""
        with self._lock:
            processor = OutputProcessor(self._tokenizer)
            engine_requests = processor.add(
                self.request_id, prompt=prompt.text, prompt_token_ids=prompt.token_ids, params=params
            )
            for request in engine_requests:
                self._channels[request.request_id] = self._engine_loop.open(
                    prompt.token_ids,
                    request.params,
                    partial(self._on_output, request.request_id),
                    priority=priority,
                    cache_salt=prompt.cache_salt,
                    on_engine_thread=True,
                )
            self._turns.append(_Turn(processor))

    def read(
        self, chunks: AsyncIterable[StreamingInput], params: SamplingParams, *, priority: int, keep: Keep
    ) -> None:
        """Starts a request whose turns are the chunks."""
        channel = self._engine_loop.register(partial(self._on_output, self.request_id), on_engine_thread=True)
        self._channels[self.request_id] = channel
        self._reader = self.event_loop.create_task(self._read(aiter(chunks), params, priority, keep))

    async def _read(
        self, chunks: AsyncIterator[StreamingInput], params: SamplingParams, priority: int, keep: Keep
    ) -> None:
        is_first = True
        try:
            async for chunk in chunks:
                if not isinstance(chunk, StreamingInput):
                    raise ParameterError("prompt", chunk, "chunks must be StreamingInput")
                turn_params = chunk.sampling_params or params
                _check_streaming(turn_params)
                prompt = self._encode_chunk(chunk.prompt, is_first=is_first)
                self._add_turn(prompt, turn_params, priority, keep, is_first=is_first)
                is_first = False
        except Exception as error:
            self._reader_is_done = True
            self._fail(error)
        else:
            self._reader_is_done = True
            self._end_input(had_chunks=not is_first)
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()

    def _add_turn(
        self, prompt: EncodedPrompt, params: SamplingParams, priority: int, keep: Keep, *, is_first: bool
    ) -> None:
        processor = OutputProcessor(self._tokenizer)
        processor.add(self.request_id, prompt=prompt.text, prompt_token_ids=prompt.token_ids, params=params)
        channel = self._channels[self.request_id]
        with self._lock:
            if self.ended:
                return
            if is_first:
                channel.start(
                    prompt.token_ids,
                    params,
                    priority=priority,
                    cache_salt=prompt.cache_salt,
                    resumable=True,
                    keep=keep,
                )
            else:
                channel.add_chunk(prompt.token_ids, params)
            self._turns.append(_Turn(processor))

    def _encode_chunk(self, prompt: Prompt | Sequence[int], *, is_first: bool) -> EncodedPrompt:
        if isinstance(prompt, str | Mapping):
            return encode_prompt(self._tokenizer, prompt, add_special_tokens=is_first)
        return EncodedPrompt(text=None, token_ids=checked_ids(prompt))

    def _end_input(self, *, had_chunks: bool) -> None:
        if had_chunks:
            self._channels[self.request_id].end_input()
        else:
            self._fail(None)

    # --- output: engine thread --------------------------------------------------------------------------------

    def _on_output(self, name: str, output: EngineOutput | EngineDead) -> None:
        """Takes in an output of the answer of this name."""
        with self._lock:
            if self.ended:
                return
            if isinstance(output, EngineDead):
                self._end(output)
            else:
                output.request_id = name
                self._take_in(output)
            self._channels[name].post(self._news.set)

    def _take_in(self, output: EngineOutput) -> None:
        if not self._turns:
            assert output.finished, "a request between turns has nothing else to say"
            self._end_between_turns()
            return
        turn = self._turns[0]
        processed = turn.processor.process((output,))
        for delta in processed.deltas:
            turn.has_news = True
            self._add_delta(delta)
        if self._reader is None:  # with streaming input the engine's request goes on with the next turn
            for name in processed.aborts:
                self._abort_answer(turn, name)
        if output.finish_reason is FinishReason.ERROR:
            self._end(RequestFailed(f"request {self.request_id} failed: {output.error}"))
        elif turn.processor.is_finished(self.request_id):
            self._end_turn(last=output.finished or self._reader is None)

    def _end_between_turns(self) -> None:
        """The input ended after its last chunk was answered."""
        if self._last is not None and not self._as_deltas:
            if not self._complete:
                self._last = msgspec.structs.replace(self._last)  # the reader has the other one
                self._complete.append(self._last)
            self._last.finished = True
        self._end()

    def _abort_answer(self, turn: _Turn, name: str) -> None:
        """An answer ended at a stop string, which the engine does not know."""
        channel = self._channels[name]
        turn.processor.record_metrics(name, self._engine_loop.client.metrics_of(channel.request_id))
        channel.abort()

    def _end_turn(self, *, last: bool) -> None:
        turn = self._turns.popleft()
        self._answered = turn.processor
        if not self._as_deltas:
            self._last = turn.processor.output(self.request_id)
            self._last.finished = last
            self._complete.append(self._last)
        if last:
            self._end()

    def _add_delta(self, delta: Delta) -> None:
        """Merges a delta into the one of its answer that waits, if there is one."""
        if not self._as_deltas:
            return
        for waiting in self._deltas:
            if waiting.index == delta.index and waiting.finish_reason is None:
                waiting.text += delta.text
                waiting.token_ids += delta.token_ids
                if waiting.logprobs is not None and delta.logprobs is not None:
                    waiting.logprobs += delta.logprobs
                waiting.finish_reason = delta.finish_reason
                waiting.stop_reason = delta.stop_reason
                waiting.error = delta.error
                return
        self._deltas.append(delta)

    # --- the end: any thread ----------------------------------------------------------------------------------

    def _end(self, error: Exception | None = None) -> None:
        """Under the lock: nothing comes after this."""
        self.ended = True
        self._error = error
        for channel in self._channels.values():
            channel.abort()
        if self._reader is not None and not self._reader_is_done:
            with contextlib.suppress(RuntimeError):  # that event loop is closed
                self.event_loop.call_soon_threadsafe(self._reader.cancel)
        self._on_end()

    def _fail(self, error: Exception | None) -> None:
        """Event loop: the input failed, or there was none."""
        with self._lock:
            if not self.ended:
                self._end(error)
        self._news.set()

    def abort(self) -> None:
        """Event loop: nobody reads any more."""
        with self._lock:
            if not self.ended:
                self._end()
            self._turns.clear()
            self._complete.clear()
            self._deltas.clear()

    def end_here(self) -> None:
        """Any thread: the answers end as they are, and the reader sees it."""
        with self._lock:
            if self.ended:
                return
            while self._turns:
                turn = self._turns[0]
                for name in self._channels:
                    output = EngineOutput(request_id=name, finish_reason=FinishReason.ABORT, finished=True)
                    for delta in turn.processor.process((output,)).deltas:
                        self._add_delta(delta)
                self._end_turn(last=len(self._turns) == 1)
            if not self.ended:
                self._end_between_turns()
        with contextlib.suppress(RuntimeError):
            self.event_loop.call_soon_threadsafe(self._news.set)

    # --- reading: event loop ----------------------------------------------------------------------------------

    async def wait_for(self, take: Callable[[], T | None]) -> T:
        """What there is to take, as soon as there is something. Raises StopAsyncIteration or an error at the end."""
        while True:
            self._news.clear()
            with self._lock:
                item, ended, error = take(), self.ended, self._error
            if item is not None:
                return item
            if ended:
                if error is not None:
                    raise error
                raise StopAsyncIteration
            await self._news.wait()

    def take_output(self) -> RequestOutput | None:
        """Under the lock: the answers of the oldest turn of which there is news."""
        if self._complete:
            return self._complete.popleft()
        if not self._turns or not self._turns[0].has_news:
            return None
        turn = self._turns[0]
        turn.has_news = False
        output = turn.processor.output(self.request_id)
        output.finished = False
        return output

    def output(self) -> RequestOutput:
        """The answers of the turn that was over last, else of the first one."""
        with self._lock:
            processor = self._answered or self._turns[0].processor
            return processor.output(self.request_id)

    def take_delta(self) -> Delta | None:
        """Under the lock: what waits for the reader."""
        return self._deltas.popleft() if self._deltas else None


def _forget(answers: dict[str, _Answers], request_id: str) -> None:
    answers.pop(request_id, None)


def _check_streaming(params: SamplingParams) -> None:
    """Raises ParameterError for what an answer to a chunk cannot have."""
    if params.n != 1:
        raise ParameterError("n", params.n, "must be 1 with streaming input")
    if params.stop_strings:
        raise ParameterError("stop", params.stop, "not with streaming input; use stop_token_ids")
