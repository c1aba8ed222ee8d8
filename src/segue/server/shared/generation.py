"""What is generated for one HTTP request: the engine's streams as one, counted and measured."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

from segue.answers.outputs import Delta, Logprob
from segue.answers.prompts import EncodedPrompt
from segue.contract.reports import FinishReason
from segue.errors import RequestFailed
from segue.llm.async_llm import AnswerStream
from segue.sample.params import SamplingParams
from segue.server.shared.serving import Serving
from segue.server.shared.usage import Usage, usage_of

MAX_WAITING_DELTAS = 64
"""Of several prompts together; beyond, each stream merges what is not read."""


class Generation:
    """The answers to a request's prompts, started when made. Answer `i` to prompt `p` has the index `p·n + i`."""

    def __init__(
        self, serving: Serving, prompts: Sequence[EncodedPrompt], params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Raises ParameterError, CapacityError, EngineDead or HttpError; then nothing was started."""
        serving.check_room()
        self.prompts = prompts
        self.params = params
        self._metrics = serving.metrics
        self._completion_tokens = 0
        self._streams: list[AnswerStream[Delta]] = []
        self._cached_tokens = 0
        try:
            for prompt in prompts:
                self._streams.append(serving.llm.deltas(prompt, params, priority=priority))
        except BaseException:
            self._streams.clear()  # which aborts them
            raise

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, as it comes. Leaving the stream early aborts what still runs."""
        parts = [self._deltas_of(p, stream) for p, stream in enumerate(self._streams)]
        async with contextlib.aclosing(parts[0] if len(parts) == 1 else _merged(parts)) as merged:
            async for delta in merged:
                self._completion_tokens += len(delta.token_ids)
                yield delta

    def prompt_logprobs(self, prompt: int) -> Sequence[dict[int, Logprob] | None]:
        """One for each of a prompt's tokens, which its first delta brings if they were asked for; else None."""
        entries = self._streams[prompt].output.prompt_logprobs
        return [None] * len(self.prompts[prompt].token_ids) if entries is None else entries

    @property
    def usage(self) -> Usage:
        """So far. The cached tokens of a prompt are known with the last delta of its answers."""
        return usage_of(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
        )

    async def _deltas_of(self, prompt: int, stream: AnswerStream[Delta]) -> AsyncGenerator[Delta, None]:
        num_open = self.params.n
        seen = self._metrics.request_started(self.params, len(self.prompts[prompt].token_ids))
        try:
            async for delta in stream:
                seen.took(delta, time.perf_counter())
                if delta.finish_reason is FinishReason.ERROR:
                    raise RequestFailed(f"the request failed: {delta.error}")
                delta.index += prompt * self.params.n
                num_open -= delta.finish_reason is not None
                if num_open == 0:
                    self._cached_tokens += stream.output.num_cached_tokens
                    seen.ended(stream.output)
                yield delta
        except Exception:
            seen.failed()
            raise
        finally:
            await stream.aclose()
            seen.close()


async def _merged(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """All of several streams, each in its order. The first error ends all."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(MAX_WAITING_DELTAS)

    async def pump(stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for delta in stream:
                    await queue.put(delta)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case delta:
                    yield delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
