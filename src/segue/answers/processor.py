"""From the engine's token ids to answers in text: one for `LLM`, the command line and the server alike.

The engine ends an answer at a stop *token*; a stop *string* is seen only here, in the text. The text is
then cut where the string begins, token ids and logprobs after the token that completes it, and the engine is told
to abort. Text that may become a stop string is held back, so the joined deltas are always the whole answer.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from segue.answers.outputs import CompletionOutput, Delta, Logprob, RequestOutput, RequestTimes
from segue.contract.reports import EngineOutput, FinishReason, RequestMetrics
from segue.contract.step import TokenLogprobs
from segue.sample.params import SamplingParams
from segue.tokens import Detokenizer, Tokenizer

TokenText = Callable[[int], str]


class Processed(msgspec.Struct):
    """What one step meant for the answers."""

    deltas: list[Delta]
    """In the order of the engine's outputs; an answer with nothing new to show has none."""
    aborts: list[str]
    """Engine requests whose answer ended at a stop string, and which still run."""


class OutputProcessor:
    """Keeps the answers of open requests. Knows nothing about the engine but its outputs."""

    def __init__(self, tokenizer: Tokenizer, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._answers: dict[str, tuple[_Request, _Answer]] = {}
        """By the engine's request id."""
        self._num_open = 0
        self._token_texts: dict[int, str] = {}

    def add(
        self,
        request_id: str,
        *,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        engine_ids: Sequence[str] | None = None,
    ) -> None:
        """Opens a request. `engine_ids` are those of its answers' engine requests, `n` of them; None: its own."""
        assert request_id not in self._requests, request_id
        request = _Request(request_id, prompt, list(prompt_token_ids), self._clock())
        self._requests[request_id] = request
        engine_ids = [request_id] if engine_ids is None else engine_ids
        assert len(engine_ids) == params.n
        for index, engine_id in enumerate(engine_ids):
            answer = _Answer(request_id, index, params, self._tokenizer, self._token_text)
            request.answers[engine_id] = answer
            self._answers[engine_id] = (request, answer)
        self._num_open += params.n

    def process(self, outputs: Iterable[EngineOutput]) -> Processed:
        """Takes in one step's outputs. Those of answers that have ended are dropped."""
        processed = Processed([], [])
        now_s = self._clock()
        for output in outputs:
            request, answer = self._answers.get(output.request_id, (None, None))
            if request is None or answer is None or answer.finish_reason is not None:
                continue
            request.observe(output, now_s, self._token_text)
            delta = answer.advance(output)
            if delta.finish_reason is not None:
                self._num_open -= 1
                if not output.finished:
                    processed.aborts.append(output.request_id)
            if delta.finish_reason is not None or delta.token_ids:
                processed.deltas.append(delta)
        return processed

    def abort(self, request_id: str) -> list[str]:
        """Ends a request's open answers where they are. Returns the engine requests to abort."""
        request = self._requests[request_id]
        engine_ids = [id for id, answer in request.answers.items() if answer.finish_reason is None]
        for engine_id in engine_ids:
            request.answers[engine_id].abort()
        self._num_open -= len(engine_ids)
        return engine_ids

    def output(self, request_id: str) -> RequestOutput:
        """The request's answers as far as they are."""
        return self._requests[request_id].output()

    def pop(self, request_id: str) -> RequestOutput:
        """The answers of a request that has ended, which is then forgotten."""
        request = self._requests.pop(request_id)
        assert request.finished, f"{request_id} is still running"
        for engine_id in request.answers:
            del self._answers[engine_id]
        return request.output()

    def is_finished(self, request_id: str) -> bool:
        return self._requests[request_id].finished

    @property
    def num_open_answers(self) -> int:
        return self._num_open

    def _token_text(self, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._token_texts[token] = text
        return text


def answer_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index` of `n`: its own seed, the prompt scored only once."""
    if params.n == 1:
        return params
    return msgspec.structs.replace(
        params,
        n=1,
        seed=None if params.seed is None else (params.seed + index) % 2**64,
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
    )


class _Request:
    """A prompt and its answers."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], arrival_s: float
    ) -> None:
        self.request_id = request_id
        self.answers: dict[str, _Answer] = {}
        """By the engine's request id, in the order of their index."""
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._times = RequestTimes(arrival_s=arrival_s)

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers.values())

    def observe(self, output: EngineOutput, now_s: float, token_text: TokenText) -> None:
        """Takes what is the request's own from one of its answers' outputs."""
        if output.token_ids:
            if self._times.first_token_s is None:
                self._times.first_token_s = now_s
            self._times.last_token_s = now_s
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if entry is None else logprobs_by_id(token, entry, token_text)
                for token, entry in zip(self._prompt_token_ids, output.prompt_logprobs, strict=True)
            ]

    def output(self) -> RequestOutput:
        metrics = [answer.metrics for answer in self.answers.values() if answer.metrics is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[answer.completion() for answer in self.answers.values()],
            finished=self.finished,
            metrics=_summed(metrics),
            times=msgspec.structs.replace(self._times),
            num_cached_tokens=metrics[0].num_cached_tokens if metrics else 0,
        )


class _Answer:
    """One answer: the engine's token ids so far and the text that they make."""

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        token_text: TokenText,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.metrics: RequestMetrics | None = None
        """Of the last output."""
        self._request_id = request_id
        self._index = index
        self._include_stop = params.include_stop_str_in_output
        self._token_text = token_text
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._entries: list[dict[int, Logprob]] = []
        """`_logprobs` as they are shown."""
        self._stop_reason: int | str | None = None
        self._error: str | None = None

    def advance(self, output: EngineOutput) -> Delta:
        """Takes in new ids. The delta has no text where a stop string may still come of it."""
        first = len(self._token_ids)
        self._token_ids += output.token_ids
        if self._logprobs is not None and output.logprobs is not None:
            self._logprobs += output.logprobs
        text = self._detokenizer.push(self._text_ids(output))
        if self._detokenizer.stopped is not None:
            self._cut_at_stop(self._detokenizer.stopped)
        elif output.finish_reason is not None:
            text += self._finish(output)
        self.metrics = output.metrics or self.metrics
        self._texts.append(text)
        self._show_logprobs(first)
        return Delta(
            request_id=self._request_id,
            index=self._index,
            text=text,
            token_ids=self._token_ids[first:],
            logprobs=None if self._logprobs is None else self._entries[first:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )

    def abort(self) -> None:
        """Ends the answer where it is."""
        self.finish_reason = FinishReason.ABORT
        self._texts.append(self._detokenizer.finish())

    def completion(self) -> CompletionOutput:
        """The answer as far as it can be shown."""
        logprobs = self._logprobs
        text = "".join(self._texts)
        self._texts = [text]
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=list(self._token_ids),
            cumulative_logprob=None if logprobs is None else sum((entry.logprob for entry in logprobs), 0.0),
            logprobs=None if logprobs is None else list(self._entries),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )

    def _text_ids(self, output: EngineOutput) -> Sequence[int]:
        """The new ids that are text: a stop token is not."""
        if output.finish_reason is FinishReason.STOP and not self._include_stop:
            return output.token_ids[:-1]
        return output.token_ids

    def _cut_at_stop(self, stop: str) -> None:
        self.finish_reason = FinishReason.STOP
        self._stop_reason = stop
        kept = self._detokenizer.num_tokens_at_stop
        assert kept is not None, "the detokenizer stopped"
        del self._token_ids[kept:]
        if self._logprobs is not None:
            del self._logprobs[kept:]

    def _finish(self, output: EngineOutput) -> str:
        """The engine ended the answer. Returns the text that was held back."""
        self.finish_reason = output.finish_reason
        self._stop_reason = output.stop_reason
        self._error = output.error
        text = self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            # An incomplete character at the very end became U+FFFD, and that completed a stop string.
            self._cut_at_stop(self._detokenizer.stopped)
        return text

    def _show_logprobs(self, first: int) -> None:
        if self._logprobs is None:
            return
        for token, entry in zip(self._token_ids[first:], self._logprobs[first:], strict=True):
            self._entries.append(logprobs_by_id(token, entry, self._token_text))


def logprobs_by_id(token: int, entry: TokenLogprobs, token_text: TokenText) -> dict[int, Logprob]:
    """A position's entry: the id that is there first, then the most likely ones."""
    by_id = {token: Logprob(entry.logprob, entry.rank, token_text(token))}
    for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        if top_id != token:
            rank = 1 + entry.top_logprobs.index(logprob)
            by_id[top_id] = Logprob(logprob, rank, token_text(top_id))
    return by_id


def _summed(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    return RequestMetrics(
        **{
            field: sum(getattr(entry, field) for entry in metrics)
            for field in RequestMetrics.__struct_fields__
        }
    )
