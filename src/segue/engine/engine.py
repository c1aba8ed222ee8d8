"""The engine: requests in, tokens out, one step at a time. It never sees text.

    step():   plan ──▶ execute ──▶ settle        at depth 1
              plan N+1 while N executes          at depth 2 and more; the same code

A program drives it by `add_request`, `step` while `has_unfinished_requests()`, and `abort_request`. None of it is
thread-safe: one thread calls. The runtime executes the plans, in order, on whatever it has.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import msgspec

from segue.contract.reports import EngineOutput, EngineSnapshot, EngineStats, FinishReason, RequestMetrics
from segue.contract.step import Runtime, SeqResult, StepHandle, StepResult
from segue.engine.blocks import BlockPool
from segue.engine.check import check_turn
from segue.engine.config import EngineConfig
from segue.engine.request import Chunk, Request, State, Stop, Turn
from segue.engine.scheduler import Part, PlannedStep, Scheduler
from segue.engine.submission import Intake, Submission, TokenIds
from segue.engine.tables import Tables
from segue.engine.timeline import Flight, Timeline
from segue.errors import EngineDead, ParameterError, UsageError
from segue.sample.params import SamplingParams
from segue.speculate.adaptive import AdaptiveDrafts

READY_WAIT_S = 0.005
"""How long a step that has nothing to compute waits for a grammar."""


class _InFlight(msgspec.Struct):
    step: PlannedStep
    handle: StepHandle


class Engine:
    """Continuous batching of requests over a runtime. Errors of one request do not touch the others."""

    def __init__(self, runtime: Runtime, config: EngineConfig) -> None:
        self.config = config
        self.intake = Intake(config, runtime.vocab_size)
        self.pool = BlockPool(config.num_kv_blocks, enable_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(config, self.pool)
        self.requests: dict[str, Request] = {}
        """Those that are not finished, by id."""
        self.on_plan: Callable[[list[str]], None] | None = None
        """Told, before each step is executed, which requests are in the steps in flight."""
        self._runtime = runtime
        self._in_flight: deque[_InFlight] = deque()
        self._unready: dict[Request, Turn] = {}
        """Those that wait until the runtime can draw for their turn."""
        self._num_steps = 0
        self._num_arrivals = 0
        self._totals = RequestMetrics()
        self._outputs: list[EngineOutput] = []
        self._closed = False

    # --- requests ---------------------------------------------------------------------------------------------

    def add_request(self, submission: Submission) -> None:
        """Queue a request. Raises ParameterError when its id is in use; then nothing was added."""
        self._check_new_id(submission.request_id)
        ids, params = submission.token_ids, submission.params
        assert params is None or ids, "an empty prompt"
        assert 0 <= submission.num_output_tokens <= max(0, len(ids) - 1), "the prompt was not empty"
        chunk = self._chunk(ids, params, submission.num_output_tokens)
        tables = Tables(self.pool, self.config.block_size, salt=submission.scope.cache_salt)
        timeline = Timeline(tables, has_draft_model=self.config.has_draft_model)
        request = self._request(submission, timeline, chunk.arrival)
        request.chunks.append(chunk)
        self._go_on(request)

    def _request(self, submission: Submission, timeline: Timeline, arrival: int) -> Request:
        speculative = self.config.speculative
        adaptive = None
        if speculative is not None and speculative.adaptive:
            adaptive = AdaptiveDrafts(speculative.num_speculative_tokens)
        request = Request(submission, timeline, arrival=arrival, adaptive=adaptive)
        self.requests[request.id] = request
        return request

    def add_chunk(self, request_id: str, token_ids: TokenIds, params: SamplingParams | None) -> None:
        """More input (see `Intake.chunk`) for a resumable request, queued while a turn runs. `params=None` only
        prefills.

        A chunk that turns out not to fit after the history, now or when its turn comes, is left out: an output with
        `FinishReason.ERROR` that is not `finished` says so, and the request goes on as if it had not been sent.
        """
        request = self._open_request(request_id)
        request.chunks.append(self._chunk(token_ids, params))
        if request.turn is None:
            self._go_on(request)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Cut a resumable request's history to its first `num_tokens` tokens: to revise input, or to interrupt.

        A running turn ends with `FinishReason.ABORT`, queued chunks are dropped; KV of what is kept stays.
        """
        request = self._open_request(request_id)
        if not 0 <= num_tokens <= len(request.timeline.tokens):
            known = len(request.timeline.tokens)
            raise ParameterError("num_tokens", num_tokens, f"must be in [0, {known}], the history there is")
        if request.turn is not None:
            output = EngineOutput(request_id=request.id, finish_reason=FinishReason.ABORT)
            output.metrics = request.snapshot()
            self._outputs.append(output)
        request.truncate(num_tokens)
        self._go_on(request)

    def fork(
        self, request_id: str, new_request_id: str, num_tokens: int | None = None, *, default_seed: int
    ) -> None:
        """Start another resumable request with the first `num_tokens` tokens (None: all) of one's history. Its id and
        its seed are the `Intake`'s.

        It shares the KV blocks; whichever of the two writes to a shared block first gets a copy of it.
        """
        source = self._open_request(request_id)
        self._check_new_id(new_request_id)
        known = len(source.timeline.tokens)
        if num_tokens is None:
            num_tokens = known
        if not 0 <= num_tokens <= known:
            raise ParameterError("num_tokens", num_tokens, f"must be in [0, {known}], the history there is")
        timeline = source.timeline.fork(num_tokens, whole_blocks=source.state is State.RUNNING)
        self._num_arrivals += 1
        submission = source.submission.forked(new_request_id, default_seed)
        request = self._request(submission, timeline, self._num_arrivals)
        request.num_prompt_tokens = num_tokens
        self._go_on(request)

    def end_input(self, request_id: str) -> None:
        """No more chunks will come: the request finishes when the queued ones are answered."""
        request = self._open_request(request_id)
        request.input_open = False
        if request.state is State.IDLE:
            self._finish(request)
            self._outputs.append(self._final_output(request, FinishReason.STOP))

    def abort_request(self, request_id: str) -> None:
        """Drop a request, at any moment. An unknown or finished one is ignored. No output follows."""
        self._outputs = [output for output in self._outputs if output.request_id != request_id]
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request)

    def _check_new_id(self, request_id: str) -> None:
        """Free is an id when its last request is finished and the next step has nothing to say about it."""
        self.check_alive()
        if request_id in self.requests or any(output.request_id == request_id for output in self._outputs):
            raise ParameterError("request_id", request_id, "is in use by an unfinished request")

    def _open_request(self, request_id: str) -> Request:
        self.check_alive()
        request = self.requests.get(request_id)
        if request is None or not request.input_open:
            raise ParameterError("request_id", request_id, "is no request with open input")
        return request

    def _chunk(self, ids: TokenIds, params: SamplingParams | None, num_output_tokens: int = 0) -> Chunk:
        self._num_arrivals += 1
        return Chunk(ids, params, self._num_arrivals, num_output_tokens)

    def _finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self.requests[request.id]

    # --- the step ---------------------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Plan as far ahead as `async_depth` allows, then settle the oldest step. Returns what is new."""
        self.check_alive()
        self._enqueue_ready()
        while len(self._in_flight) < self.config.async_depth:
            planned = self.scheduler.schedule(self._num_steps)
            if planned is None:
                break
            self._num_steps += 1
            if self.on_plan is not None:
                self.on_plan(self._ids_in_flight(planned))
            self._in_flight.append(_InFlight(planned, self._runtime.submit(planned.plan)))
        if self._in_flight:
            oldest = self._in_flight[0]
            result = oldest.handle.result()
            self._in_flight.popleft()
            self._settle(oldest.step.parts, result)
            if result.unfilled:
                self._lose(result.unfilled)
        elif self._unready and not self._outputs:
            # There is nothing to do but to wait, and never for long: what else may come must not wait too.
            turn = next(iter(self._unready.values()))
            self._runtime.is_ready(turn.sampling, wait_s=READY_WAIT_S)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _enqueue_ready(self) -> None:
        """Whatever waits for its grammar holds up nobody else."""
        for request, turn in list(self._unready.items()):
            if request.turn is not turn or request.state is not State.UNREADY:
                del self._unready[request]
            elif self._runtime.is_ready(turn.sampling):
                del self._unready[request]
                self.scheduler.enqueue(request)

    def _ids_in_flight(self, planned: PlannedStep) -> list[str]:
        steps = (*(each.step for each in self._in_flight), planned)
        return list(dict.fromkeys(part.request.id for step in steps for part in step.parts))

    def _settle(self, parts: list[Part], result: StepResult) -> None:
        for part, seq in zip(parts, result.seqs, strict=True):
            request, flight = part.request, part.flight
            if seq.error is None:
                self._count(request, flight, seq)
            if request.state is State.FINISHED or flight.epoch != request.timeline.epoch:
                continue
            if seq.error is not None:
                self._fail(request, seq.error)
            elif flight.samples:
                self._settle_sampled(request, flight, seq)
            else:
                self._settle_prefill(request, flight, seq)

    def _lose(self, blocks: Sequence[int]) -> None:
        """The oldest step was to fill these blocks and has not. What later ones copy from them is lost as well."""
        lost = set(blocks)
        for later in self._in_flight:
            for source, target in later.step.plan.copies:
                if source in lost:
                    lost.add(target)
                else:
                    lost.discard(target)  # given away meanwhile, and filled with something else
        self.scheduler.lose(self.requests.values(), lost)

    def _count(self, request: Request, flight: Flight, seq: SeqResult) -> None:
        metrics, totals = request.metrics, self._totals
        num_computed = flight.num_tokens + seq.num_drafts
        metrics.num_computed_tokens += num_computed
        totals.num_computed_tokens += num_computed
        if seq.num_drafts:
            num_accepted = len(seq.tokens) - 1
            metrics.num_draft_tokens += seq.num_drafts
            metrics.num_accepted_tokens += num_accepted
            totals.num_draft_tokens += seq.num_drafts
            totals.num_accepted_tokens += num_accepted
            if request.adaptive is not None:
                request.adaptive.observe(seq.num_drafts, num_accepted)

    def _settle_sampled(self, request: Request, flight: Flight, seq: SeqResult) -> None:
        timeline, turn = request.timeline, request.turn
        assert turn is not None
        kept, stop = turn.trim(len(timeline.tokens), seq.tokens)
        self._record_prompt_logprobs(request, seq)
        timeline.settle(flight, kept, seq.drafts, seq.draft_kv_len)
        output = EngineOutput(request_id=request.id, token_ids=kept, metrics=request.snapshot())
        if seq.logprobs is not None:
            output.logprobs = seq.logprobs[: len(kept)]
        if request.prompt_logprobs is not None:
            output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        self._outputs.append(output)
        if stop is not None:
            self._end_turn(request, stop, output)

    def _settle_prefill(self, request: Request, flight: Flight, seq: SeqResult) -> None:
        timeline = request.timeline
        self._record_prompt_logprobs(request, seq)
        timeline.settle(flight, (), (), seq.draft_kv_len)
        if not request.has_work:
            self._go_on(request)

    def _record_prompt_logprobs(self, request: Request, seq: SeqResult) -> None:
        if request.prompt_logprobs is not None and seq.prompt_logprobs:
            at = seq.start + 1
            request.prompt_logprobs[at : at + len(seq.prompt_logprobs)] = seq.prompt_logprobs

    def _end_turn(self, request: Request, stop: Stop, output: EngineOutput) -> None:
        output.finish_reason, output.stop_reason = stop.reason, stop.stop_reason
        if request.chunks or request.input_open:
            request.end_turn()
            self._go_on(request)
        else:
            self._finish(request)
            output.finished = True

    def _go_on(self, request: Request) -> None:
        """Between turns: fold in what is queued until there is a turn; then work, a wait for input, or the end."""
        while request.chunks and request.turn is None:
            chunk = request.chunks.popleft()
            try:
                check_turn(self.config, len(request.timeline.tokens), len(chunk.token_ids), chunk.params)
            except UsageError as error:
                self._outputs.append(_refusal(request, error))
                continue
            request.fold(chunk, self.config)
        turn = request.turn
        if turn is not None and not self._runtime.is_ready(turn.sampling):
            self.scheduler.hold(request)
            self._unready[request] = turn
        elif request.has_work:
            self.scheduler.enqueue(request)
        elif request.input_open:
            self.scheduler.park(request)
        else:
            self._finish(request)
            self._outputs.append(self._final_output(request, FinishReason.STOP))

    def _fail(self, request: Request, error: str) -> None:
        self._finish(request)
        output = self._final_output(request, FinishReason.ERROR)
        output.error = error
        self._outputs.append(output)

    def _final_output(self, request: Request, reason: FinishReason) -> EngineOutput:
        return EngineOutput(
            request_id=request.id, finish_reason=reason, finished=True, metrics=request.snapshot()
        )

    def wake(self) -> None:
        """For callers that also have an `EngineProcess`, whose `step` can wait; this one's computes."""

    # --- state ------------------------------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to report: idle resumable requests do not count."""
        return bool(self._outputs) or any(r.state is not State.IDLE for r in self.requests.values())

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, also while requests run; they keep what they hold."""
        self.pool.reset_cache()

    @property
    def state(self) -> Literal["running", "dead"]:
        """It lives until it is closed."""
        return "dead" if self._closed else "running"

    def check_alive(self) -> None:
        """Raises EngineDead once it is closed."""
        if self._closed:
            raise EngineDead("the engine was closed")

    @property
    def stats(self) -> EngineStats:
        """Where the engine stands."""
        states = [request.state for request in self.requests.values()]
        return EngineStats(
            num_running=states.count(State.RUNNING),
            num_waiting=states.count(State.WAITING) + states.count(State.UNREADY),
            num_idle=states.count(State.IDLE),
            num_steps=self._num_steps,
            num_kv_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.pool.num_cached_free,
            num_preemptions=self.scheduler.num_preemptions,
            num_computed_tokens=self._totals.num_computed_tokens,
            num_draft_tokens=self._totals.num_draft_tokens,
            num_accepted_tokens=self._totals.num_accepted_tokens,
        )

    def snapshot(self, request_id: str | None = None) -> EngineSnapshot:
        """Who holds which blocks. With `request_id`, only of that request, if it is there, and without the pool."""
        if request_id is None:
            requests = list(self.requests.values())
        else:
            requests = [self.requests[request_id]] if request_id in self.requests else []
        return EngineSnapshot(
            requests=[request.where_it_stands() for request in requests],
            cached_blocks=self.pool.cached_free if request_id is None else [],
        )

    def ask_snapshot(self, request_id: str | None = None) -> Future[EngineSnapshot]:
        """For callers that also have an `EngineProcess`, which answers later."""
        answer: Future[EngineSnapshot] = Future()
        answer.set_result(self.snapshot(request_id))
        return answer

    def close(self) -> None:
        """Wait for the step that executes, then release the runtime. Open requests are dropped; calls raise EngineDead
        from here on. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._in_flight.clear()
        self._runtime.close()


def _refusal(request: Request, error: UsageError) -> EngineOutput:
    """A chunk of it is left out; it goes on."""
    return EngineOutput(
        request_id=request.id,
        finish_reason=FinishReason.ERROR,
        metrics=request.snapshot(),
        error=str(error),
    )
