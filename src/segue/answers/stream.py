"""What one call of `AsyncLLM` has to say, on its way from the engine's thread to the task that reads it.

    engine thread    output ─▶ Answers: detokenise, merge with what has not been read ─┐ wake
    event loop       AnswerStream.__anext__ ◀─ all that is new ◀────────────────────────┘

What is not read yet is merged, so a slow reader holds up nobody, and its memory is bounded by its answer.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from segue.answers.outputs import Delta, Prompt, RequestOutput, RequestTimes
from segue.answers.processor import OutputProcessor
from segue.answers.prompts import EncodedPrompt, encode_prompt
from segue.contract.reports import EngineOutput, FinishReason, RequestMetrics
from segue.engine.submission import Submission
from segue.errors import EngineDead, ParameterError, RequestFailed, describe
from segue.host.loop import Channel, EngineLoop
from segue.sample.params import SamplingParams
from segue.tokens import Tokenizer

T = TypeVar("T")


class StreamingInput(msgspec.Struct, frozen=True):
    """A chunk of a request's input. The answer to it ends before the next chunk is read by the model."""

    prompt: Prompt | Sequence[int]
    """May be empty, if it is not the first."""
    sampling_params: SamplingParams | None = None
    """How it is answered; None: as the call says."""


class Submit(Protocol):
    """Makes a prompt's submissions with what else the call asks for; see `submissions_of`."""

    def __call__(
        self, prompt: EncodedPrompt, params: SamplingParams, *, request_ids: Sequence[str]
    ) -> list[Submission]: ...


class _Turn(msgspec.Struct, eq=False):
    """One prompt, or one chunk, and its answers."""

    processor: OutputProcessor
    has_news: bool = False
    """Something that was not read yet."""


class Answers:
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
        """By the engine request's id: one for each answer."""
        self._turns: deque[_Turn] = deque()
        """The first one is being answered; further ones are chunks that wait."""
        self._complete: deque[RequestOutput] = deque()
        """Turns that are over and were not read yet."""
        self._last: RequestOutput | None = None
        """Of the turn that was over last."""
        self._answered: OutputProcessor | None = None
        """Has the answers of that turn; if the reader left before, of the one that was being answered."""
        self._arrival_s = time.perf_counter()
        self._deltas: deque[Delta] = deque()
        """Not read yet, merged."""
        self._error: Exception | None = None
        """What the reader gets at the end."""
        self._reader: asyncio.Task[None] | None = None
        """Reads the chunks of a streaming input."""
        self._reader_is_done = False

    # --- input: event loop ------------------------------------------------------------------------------------

    def ask(self, prompt: EncodedPrompt, params: SamplingParams, submit: Submit) -> None:
        """Starts a request with one turn."""
        with self._lock:
            engine_ids = [self._engine_loop.intake.new_id(self.request_id) for _ in range(params.n)]
            submissions = submit(prompt, params, request_ids=engine_ids)
            processor = self._processor(prompt, params, engine_ids)
            for submission in submissions:
                self._channels[submission.request_id] = self._engine_loop.open(
                    submission, partial(self._on_output, submission.request_id), on_engine_thread=True
                )
            self._turns.append(_Turn(processor))

    def read(self, chunks: AsyncIterable[StreamingInput], params: SamplingParams, submit: Submit) -> None:
        """Starts a request whose turns are the chunks. Raises ParameterError for `params` that none can have."""
        _check_streaming(params)
        engine_id = self._engine_loop.intake.new_id(self.request_id)
        self._channels[engine_id] = channel = self._engine_loop.register(
            engine_id, partial(self._on_output, engine_id), on_engine_thread=True
        )
        self._reader = self.event_loop.create_task(self._read(channel, aiter(chunks), params, submit))

    def _processor(
        self, prompt: EncodedPrompt, params: SamplingParams, engine_ids: Sequence[str]
    ) -> OutputProcessor:
        processor = OutputProcessor(self._tokenizer)
        processor.add(
            self.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            params=params,
            engine_ids=engine_ids,
        )
        return processor

    async def _read(
        self,
        channel: Channel,
        chunks: AsyncIterator[StreamingInput],
        params: SamplingParams,
        submit: Submit,
    ) -> None:
        is_first = True
        try:
            async for chunk in chunks:
                if not isinstance(chunk, StreamingInput):
                    raise ParameterError("prompt", chunk, "chunks must be StreamingInput")
                turn_params = chunk.sampling_params or params
                _check_streaming(turn_params)
                prompt = self._encode_chunk(chunk.prompt, is_first=is_first)
                self._add_turn(channel, prompt, turn_params, submit if is_first else None)
                is_first = False
        except Exception as error:
            self._reader_is_done = True
            self._fail(error)
        else:
            self._reader_is_done = True
            if is_first:
                self._fail(None)
            else:
                channel.end_input()
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()

    def _add_turn(
        self, channel: Channel, prompt: EncodedPrompt, params: SamplingParams, submit: Submit | None
    ) -> None:
        """`submit`: how the request is made, with the first turn."""
        processor = self._processor(prompt, params, [channel.request_id])
        with self._lock:
            if self.ended:
                return
            if submit is None:
                channel.add_chunk(prompt.token_ids, params)
            else:
                (submission,) = submit(prompt, params, request_ids=[channel.request_id])
                channel.start(submission)
            self._turns.append(_Turn(processor))

    def _encode_chunk(self, prompt: Prompt | Sequence[int], *, is_first: bool) -> EncodedPrompt:
        return encode_prompt(self._tokenizer, prompt, add_special_tokens=is_first)

    # --- output: engine thread --------------------------------------------------------------------------------

    def _on_output(self, engine_id: str, output: EngineOutput | EngineDead) -> None:
        """Takes in an output of this engine request."""
        with self._lock:
            if self.ended:
                return
            if isinstance(output, EngineDead):
                self._end(output)
            else:
                try:
                    self._take_in(output)
                except Exception as error:  # of this request: those of others go on
                    self._end(RequestFailed(f"request {self.request_id} failed: {describe(error)}"))
            self._channels[engine_id].post(self._news.set)

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
            for engine_id in processed.aborts:  # ended at a stop string, which the engine does not know
                self._channels[engine_id].abort()
        if output.finish_reason is FinishReason.ERROR and output.finished:
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
            if self._answered is None and self._turns:
                self._answered = self._turns[0].processor
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
                for engine_id in self._channels:
                    output = EngineOutput(
                        request_id=engine_id, finish_reason=FinishReason.ABORT, finished=True
                    )
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
        """The answers of the turn that was over last, else of the first one; none before there is a turn."""
        with self._lock:
            if self._answered is not None:
                return self._answered.output(self.request_id)
            if self._turns:
                return self._turns[0].processor.output(self.request_id)
            return RequestOutput(
                request_id=self.request_id,
                prompt=None,
                prompt_token_ids=[],
                outputs=[],
                finished=False,
                metrics=RequestMetrics(),
                times=RequestTimes(arrival_s=self._arrival_s),
            )

    def take_delta(self) -> Delta | None:
        """Under the lock: what waits for the reader."""
        return self._deltas.popleft() if self._deltas else None


class AnswerStream(AsyncIterator[T], Generic[T]):
    """What a request has to say. To be read by one task; leaving it early aborts the request."""

    def __init__(self, llm: object, answers: Answers, take: Callable[[], T | None]) -> None:
        self._llm = llm  # which must stay alive while this is read
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


def _check_streaming(params: SamplingParams) -> None:
    """Raises ParameterError for what an answer to a chunk cannot have."""
    if params.n != 1:
        raise ParameterError("n", params.n, "must be 1 with streaming input")
    if params.stop_strings:
        raise ParameterError("stop", params.stop, "not with streaming input; use stop_token_ids")
