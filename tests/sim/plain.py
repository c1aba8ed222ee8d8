"""The plainest run: what a request's answers must be, computed without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from segue.contract.reports import FinishReason
from segue.contract.step import TokenLogprobs
from segue.sample.params import SamplingParams
from tests.sim.grammar import plain_mask
from tests.sim.oracle import ROOT, OracleModel, mix


@dataclass
class Answer:
    """One turn."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass
class PlainSession:
    """History and answers of one request, a token at a time."""

    model: OracleModel
    eos: frozenset[int]
    max_model_len: int
    keep: str
    history: list[int] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    """The history as it was at the end of the last turn, the last id included."""

    def turn(self, chunk: Sequence[int], params: SamplingParams | None) -> Answer | None:
        """Take a chunk and answer it; None for one that is only prefilled, or when it does not fit."""
        self.history.extend(chunk)
        if params is None:
            self.full = list(self.history)
            return None
        start = len(self.history)
        sampling = params.resolve(output_start=start, eos_token_ids=self.eos, default_seed=0)
        answer = Answer()
        if params.prompt_logprobs is not None:
            answer.prompt_logprobs = [None]
            chain = ROOT
            for here, following in zip(self.history, self.history[1:], strict=False):
                chain = mix(chain, here)
                answer.prompt_logprobs.append(self.model.score(chain, following, params.prompt_logprobs))
        if params.logprobs is not None:
            answer.logprobs = []
        chain = ROOT
        for token in self.history:
            chain = mix(chain, token)
        while answer.finish_reason is None:
            position = len(self.history)
            mask = None
            if sampling.grammar is not None:
                mask = plain_mask(answer.token_ids, sampling, self.model.vocab_size)
            token = self.model.draw(chain, self.history[-1], sampling, position, self.history, mask)
            if answer.logprobs is not None:
                answer.logprobs.append(self.model.score(chain, token, params.logprobs or 0))
            answer.token_ids.append(token)
            self.history.append(token)
            chain = mix(chain, token)
            self._check_stop(answer, params, token)
        self.full = list(self.history)
        if self.keep == "computed":
            self.history.pop()
        return answer

    def truncate(self, num_tokens: int, in_turn: bool) -> None:
        """Cut the history, in a turn or between two."""
        self.history = (self.full if in_turn else self.history)[:num_tokens]
        self.full = list(self.history)

    def _check_stop(self, answer: Answer, params: SamplingParams, token: int) -> None:
        num_tokens = len(answer.token_ids)
        full = len(self.history) >= self.max_model_len
        if num_tokens >= params.min_tokens or full:
            if token in self.eos and not params.ignore_eos:
                answer.finish_reason = FinishReason.STOP
            elif token in (params.stop_token_ids or ()):
                answer.finish_reason, answer.stop_reason = FinishReason.STOP, token
        if answer.finish_reason is None and (num_tokens == params.max_tokens or full):
            answer.finish_reason = FinishReason.LENGTH
