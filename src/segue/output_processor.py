"""From the engine's token ids to answers in text: one for `LLM`, the command line and the server alike.

The engine ends an answer at a stop *token*; a stop *string* is seen only here, in the text. The answer
is then cut where the string begins (token ids and logprobs too) and the engine is told to abort.

A streamed answer is held back as far as a stop string might still cut it, token ids like text, so
the joined deltas are always the whole answer.
"""

import codecs
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from segue.engine.outputs import EngineOutput, FinishReason, RequestMetrics
from segue.outputs import CompletionOutput, Delta, Logprob, RequestOutput, RequestTimes
from segue.runtime.contract import TokenLogprobs
from segue.sample.params import SamplingParams
from segue.tokens import Detokenizer, Tokenizer

TokenText = Callable[[int], str]


class Processed(msgspec.Struct):
    """What one step meant for the answers."""

    deltas: list[Delta]
    """In the order of the engine's outputs; an answer with nothing new to show has none."""
    aborts: list[str]
    """Engine requests whose answer ended at a stop string, and which still run."""


class EngineRequest(msgspec.Struct, frozen=True):
    """One answer as the engine sees it."""

    request_id: str
    params: SamplingParams


class OutputProcessor:
    """Keeps the answers of open requests. Knows nothing about the engine but its outputs."""

    def __init__(self, tokenizer: Tokenizer, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._answers: dict[str, tuple[_Request, _Answer]] = {}
        """Of answers not ended, by the engine's request id."""
        self._token_texts: dict[int, str] = {}

    def add(
        self, request_id: str, *, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> list[EngineRequest]:
        """Opens a request. Returns what the engine is to run for it: one request for each answer."""
        assert request_id not in self._requests, request_id
        request = _Request(request_id, prompt, list(prompt_token_ids), self._clock())
        self._requests[request_id] = request
        engine_requests = []
        for index in range(params.n):
            engine_id = request_id if params.n == 1 else f"{request_id}-{index}"
            engine_requests.append(EngineRequest(engine_id, answer_params(params, index)))
            answer = _Answer(request_id, index, params, self._tokenizer, self._token_text)
            request.answers.append(answer)
            self._answers[engine_id] = (request, answer)
        return engine_requests

    def process(self, outputs: Iterable[EngineOutput]) -> Processed:
        """Takes in one step's outputs. Those of answers that have ended are dropped."""
        processed = Processed([], [])
        now = self._clock()
        for output in outputs:
            if output.request_id not in self._answers:
                continue
            request, answer = self._answers[output.request_id]
            request.observe(output, now, self._token_text)
            delta = answer.advance(output)
            if delta.finish_reason is not None:
                del self._answers[output.request_id]
                if not output.finished:
                    processed.aborts.append(output.request_id)
            if delta.finish_reason is not None or delta.text or delta.token_ids:
                processed.deltas.append(delta)
        return processed

    def abort(self, request_id: str) -> list[str]:
        """Ends a request's open answers where they are. Returns the engine requests to abort."""
        request = self._requests[request_id]
        engine_ids = [id for id, (owner, _) in self._answers.items() if owner is request]
        for engine_id in engine_ids:
            _, answer = self._answers.pop(engine_id)
            answer.abort()
        return engine_ids

    def output(self, request_id: str) -> RequestOutput:
        """The request's answers as far as they are."""
        return self._requests[request_id].output()

    def pop(self, request_id: str) -> RequestOutput:
        """The answers of a request that has ended, which is then forgotten."""
        request = self._requests[request_id]
        assert request.finished, f"{request_id} is still running"
        del self._requests[request_id]
        return request.output()

    @property
    def num_open_answers(self) -> int:
        return len(self._answers)

    def is_finished(self, request_id: str) -> bool:
        return self._requests[request_id].finished

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
        self.answers: list[_Answer] = []
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._times = RequestTimes(arrival_s=arrival_s)

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

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
        metrics = [answer.metrics for answer in self.answers if answer.metrics is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[answer.completion() for answer in self.answers],
            finished=self.finished,
            metrics=_summed(metrics),
            times=msgspec.structs.replace(self._times),
            num_cached_tokens=metrics[0].num_cached_tokens if metrics else 0,
        )


class _Answer:
    """One answer: the engine's token ids so far and the text that they make.

    num_shown counts the ids that no stop string can cut any more:

        token_ids   [ shown ........ | held back ........... ]
                                     num_shown
    """

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
        self._request_id = request_id
        self._index = index
        self._include_stop = params.include_stop_str_in_output
        self._token_text = token_text
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._ends = _TokenEnds(tokenizer, params.skip_special_tokens) if params.stop_strings else None
        self._texts: list[str] = []
        self._text_len = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._num_shown = 0
        self._stop_reason: int | str | None = None
        self._error: str | None = None

    def advance(self, output: EngineOutput) -> Delta:
        """Takes in new ids; the delta is what can be shown of them, and of those held back before."""
        ids = list(output.token_ids)
        if self._logprobs is not None and output.logprobs is not None:
            self._logprobs += output.logprobs
        ended_by_token = output.finish_reason is FinishReason.STOP and not self._include_stop
        text = self._push(ids, num_text_ids=len(ids) - 1 if ended_by_token and ids else len(ids))
        if self._detokenizer.stopped is not None:
            self._cut_at_stop(self._detokenizer.stopped)
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self._stop_reason = output.stop_reason
            self._error = output.error
            text += self._detokenizer.finish()
        if self.finish_reason is not None:
            self.metrics = output.metrics
        return self._show(text)

    def abort(self) -> None:
        """Ends the answer where it is."""
        self.finish_reason = FinishReason.ABORT
        self._show(self._detokenizer.finish())

    def completion(self) -> CompletionOutput:
        """The answer as far as it can be shown."""
        shown = self._token_ids[: self._num_shown]
        logprobs = None if self._logprobs is None else self._logprobs[: self._num_shown]
        return CompletionOutput(
            index=self._index,
            text="".join(self._texts),
            token_ids=shown,
            cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs),
            logprobs=self._entries(0, self._num_shown),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )

    def _push(self, ids: list[int], *, num_text_ids: int) -> str:
        self._token_ids += ids
        if self._ends is not None:
            self._ends.push(ids[:num_text_ids])
        return self._detokenizer.push(ids[:num_text_ids])

    def _cut_at_stop(self, stop: str) -> None:
        self.finish_reason = FinishReason.STOP
        self._stop_reason = stop
        kept = self._detokenizer.num_tokens_at_stop
        assert kept is not None, "the detokenizer stopped"
        del self._token_ids[kept:]
        if self._logprobs is not None:
            del self._logprobs[kept:]

    def _show(self, text: str) -> Delta:
        self._texts.append(text)
        self._text_len += len(text)
        first = self._num_shown
        if self._ends is None or self.finish_reason is not None:
            self._num_shown = len(self._token_ids)
        else:
            self._num_shown = self._ends.num_covered(self._text_len)
        return Delta(
            request_id=self._request_id,
            index=self._index,
            text=text,
            token_ids=self._token_ids[first : self._num_shown],
            logprobs=self._entries(first, self._num_shown),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )

    def _entries(self, first: int, end: int) -> list[dict[int, Logprob]] | None:
        if self._logprobs is None:
            return None
        return [
            logprobs_by_id(token, entry, self._token_text)
            for token, entry in zip(self._token_ids[first:end], self._logprobs[first:end], strict=True)
        ]


class _TokenEnds:
    """Where each token's text ends, in characters from the start of the answer."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ends: list[int] = []
        self._end = 0
        self._num_covered = 0

    def push(self, ids: Sequence[int]) -> None:
        for token in ids:
            if token not in self._skipped:
                self._end += len(self._decoder.decode(self._token_bytes(token)))
            self._ends.append(self._end)

    def num_covered(self, text_len: int) -> int:
        """How many leading tokens end within the first `text_len` characters, which never shrink. One
        that adds no character waits for its successor: what came before it may yet be all that is kept."""
        while (
            self._num_covered < len(self._ends)
            and self._ends[self._num_covered] <= text_len
            and (self._num_covered == 0 or self._ends[self._num_covered - 1] < text_len)
        ):
            self._num_covered += 1
        return self._num_covered


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
