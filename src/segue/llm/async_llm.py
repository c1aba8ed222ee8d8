"""`AsyncLLM`: a model for any number of tasks at once. vLLM's asynchronous interface.

async with AsyncLLM("smollm2") as llm:
    async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=100)):
        print(output.outputs[0].text)
"""

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from segue.answers.outputs import Delta, Prompt, RequestOutput
from segue.answers.prompts import (
    EncodedPrompt,
    checked_params,
    checked_priority,
    encode_prompt,
    submissions_of,
)
from segue.answers.stream import Answers, AnswerStream, StreamingInput
from segue.args import EngineArgs, EngineOptions
from segue.contract.reports import EngineSnapshot, EngineStats
from segue.engine.submission import Keep
from segue.errors import ParameterError
from segue.host.build import load
from segue.host.loop import EngineLoop
from segue.llm.llm import Message
from segue.sample.params import SamplingParams
from segue.session.live import Session, SessionManager
from segue.tokens import Tokenizer

__all__ = ["AnswerStream", "AsyncLLM", "StreamingInput"]


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
        loaded = load(args)
        self.config = loaded.config
        self.engine_loop = EngineLoop(loaded.engine)
        """For what works on token ids; see `Channel`."""
        self._tokenizer = loaded.tokenizer
        self.sessions = SessionManager(
            self.engine_loop, loaded.tokenizer, max_sessions=max_sessions, timeout_s=session_timeout_s
        )
        self._lock = threading.Lock()
        self._answers: dict[str, Answers] = {}
        """By the caller's request id, until they have ended; under the lock."""
        self._numbers = itertools.count()
        # Also when this object is dropped and at the end of the program: the thread must not outlive it.
        self._shutdown = weakref.finalize(self, self.engine_loop.close)

    def generate(
        self,
        prompt: Prompt | EncodedPrompt | AsyncIterable[StreamingInput],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keep: Keep = "computed",
    ) -> AnswerStream[RequestOutput]:
        """Answers a prompt. The stream gives the answers as far as they are, each time with more.

        To be called on a running event loop; the request starts at once. A lower `priority` is served first, with the
        "priority" policy. Raises ParameterError, CapacityError or EngineDead; the stream raises RequestFailed or
        EngineDead. Whoever leaves the stream, by `break` or by cancellation, aborts the request.

        The prompt may be an asynchronous iterator of chunks. Each is answered, in order; chunks that come while an
        answer runs wait for its end. `outputs[0].finish_reason` says that a chunk's answer is complete, `finished`
        that it was the last one. `keep` says what of an answer stays in front of the next chunk: "computed", all but
        the last token, which the model has drawn and not read; or "all". A chunk that does not fit after what came
        before is left out, with `FinishReason.ERROR` and `error`, and the next one is answered. An exception of the
        iterator aborts the request and is raised by the stream, like the other errors of a chunk.
        """
        answers = self._start(prompt, sampling_params, request_id, priority, keep, as_deltas=False)
        return AnswerStream(self, answers, answers.take_output)

    def deltas(
        self,
        prompt: Prompt | EncodedPrompt | AsyncIterable[StreamingInput],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keep: Keep = "computed",
    ) -> AnswerStream[Delta]:
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
    ) -> AnswerStream[RequestOutput]:
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

    @property
    def num_open_requests(self) -> int:
        """Those of `generate`, `deltas` and `chat` that have not ended."""
        return len(self._answers)

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def stats(self) -> EngineStats:
        """Where the engine stood after its last step. Waits for nothing. Raises EngineDead."""
        return self.engine_loop.stats

    async def snapshot(self) -> EngineSnapshot:
        """Who holds which blocks, after the step that runs."""
        return await asyncio.wrap_future(self.engine_loop.ask_snapshot())

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached KV."""
        await asyncio.wrap_future(self.engine_loop.call(lambda client: client.reset_prefix_cache()))

    async def check_health(self) -> None:
        """Raises EngineDead if nothing can be answered any more."""
        self.engine_loop.check_alive()

    def shutdown(self) -> None:
        """Gives back the model's memory and threads; open streams raise EngineDead. May be called again.

        An engine in this process is let end the step that it runs; one in a process of its own is ended at once.
        """
        self.engine_loop.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _start(
        self,
        prompt: Prompt | EncodedPrompt | AsyncIterable[StreamingInput],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        keep: Keep,
        *,
        as_deltas: bool,
    ) -> Answers:
        params, priority = checked_params(sampling_params), checked_priority(priority)
        answers = self._register(request_id, as_deltas=as_deltas)
        try:
            submit = partial(submissions_of, self.engine_loop.intake, priority=priority)
            if isinstance(prompt, AsyncIterable):
                answers.read(prompt, params, partial(submit, resumable=True, keep=keep))
            else:
                if not isinstance(prompt, EncodedPrompt):
                    prompt = encode_prompt(self._tokenizer, prompt)
                answers.ask(prompt, params, submit)
        except BaseException:
            answers.abort()
            raise
        return answers

    def _register(self, request_id: str | None, *, as_deltas: bool) -> Answers:
        event_loop = asyncio.get_running_loop()
        with self._lock:
            if request_id is None:
                request_id = next(name for name in map(str, self._numbers) if name not in self._answers)
            elif request_id in self._answers:
                raise ParameterError("request_id", request_id, "is in use by an unfinished request")
            forget = partial(_forget, self._answers, request_id)
            answers = Answers(
                request_id, self.engine_loop, self._tokenizer, event_loop, forget, as_deltas=as_deltas
            )
            self._answers[request_id] = answers
        return answers


def _forget(answers: dict[str, Answers], request_id: str) -> None:
    answers.pop(request_id, None)
