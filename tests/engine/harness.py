"""An engine over the oracle, with everything that it said by request, for tests that read like a story."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from segue.contract.reports import EngineOutput
from segue.contract.step import Sampling, TokenLogprobs
from segue.engine.config import EngineConfig, SpeculativeConfig
from segue.engine.engine import Engine
from segue.engine.request import Request
from segue.runtime.runtime import LocalRuntime
from segue.sample.params import SamplingParams
from segue.speculate.draft_model import DraftModelDrafter
from segue.speculate.drafter import Drafter, DraftRequest, Proposal
from segue.speculate.ngram import NgramDrafter
from tests.engine.calls import add_request
from tests.sim.checks import Checker, Memory
from tests.sim.oracle import OracleDraftExecutor, OracleExecutor, OracleModel
from tests.sim.plain import Answer, PlainSession

EOS = 1


@dataclass(frozen=True)
class ScriptedModel(OracleModel):
    """Says what the script has for a position, whatever came before."""

    script: Sequence[int] = ()

    def draw(
        self,
        prefix: int,
        last: int,
        sampling: Sampling,
        position: int,
        history: Sequence[int],
        mask: bytes | None,
    ) -> int:
        return self.script[position]


@dataclass(frozen=True)
class LowIdModel(OracleModel):
    """Draws from the lower half of its ids, so that those of the upper half come from prompts."""

    vocab_size: int = 64

    def draw(
        self,
        prefix: int,
        last: int,
        sampling: Sampling,
        position: int,
        history: Sequence[int],
        mask: bytes | None,
    ) -> int:
        return super().draw(prefix, last, sampling, position, history, mask) % (self.vocab_size // 2)


class ScriptedDrafter:
    """Proposes what the script has for the next positions."""

    has_kv = False

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script

    def propose(
        self, requests: Sequence[DraftRequest], copies: Sequence[tuple[int, int]]
    ) -> Sequence[Proposal]:
        ends = [request.first + len(request.token_ids) for request in requests]
        return [
            Proposal(self._script[end : end + request.count])
            for end, request in zip(ends, requests, strict=True)
        ]

    def close(self) -> None:
        """Nothing to release."""


def ngram(k: int, *, adaptive: bool = False) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=k,
        prompt_lookup_min=1,
        prompt_lookup_max=3,
        adaptive=adaptive,
    )


def draft_model(k: int) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", num_speculative_tokens=k, model="draft", adaptive=False)


@dataclass
class Said:
    """All that the engine said about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)
    """The ids of each turn that has ended."""
    last: EngineOutput | None = None
    _open: list[int] = field(default_factory=list)

    def add(self, output: EngineOutput) -> None:
        assert self.last is None or not self.last.finished, "news after the end"
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        self._open.extend(output.token_ids)
        if output.finish_reason is not None and (self._open or not output.finished):
            self.turns.append(self._open)
            self._open = []
        self.last = output

    @property
    def end(self) -> EngineOutput:
        assert self.last is not None
        return self.last


class Harness:
    """One engine; every step is checked as in the simulation."""

    def __init__(
        self,
        *,
        model: OracleModel | None = None,
        drafter: Drafter | None = None,
        max_model_len: int = 128,
        num_kv_blocks: int = 64,
        speculative: SpeculativeConfig | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig(
            max_model_len=max_model_len,
            num_kv_blocks=num_kv_blocks,
            speculative=speculative,
            eos_token_ids=frozenset({EOS}),
            **({"max_num_seqs": 8, "max_num_batched_tokens": 64} | options),
        )
        self.model = OracleModel() if model is None else model
        self.executor = OracleExecutor(self.model, max_model_len)
        self.executor.log = []
        self.executor.allocate_kv(num_kv_blocks, self.config.block_size)
        self.draft: OracleDraftExecutor | None = None
        self.engine = Engine(LocalRuntime(self.executor, drafter=drafter or self._drafter()), self.config)
        self.checker = Checker(self.engine, Memory(self.executor, self.draft))
        self.said: defaultdict[str, Said] = defaultdict(Said)

    def _drafter(self) -> Drafter | None:
        speculative = self.config.speculative
        if speculative is None:
            return None
        if speculative.method == "ngram":
            return NgramDrafter(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
        self.draft = OracleDraftExecutor(
            OracleModel(self.model.vocab_size, flavour=3), self.config.max_model_len, target=self.executor
        )
        self.draft.allocate_kv(self.config.num_kv_blocks, self.config.block_size)
        return DraftModelDrafter(self.draft)

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams | None, **options: Any
    ) -> Request:
        self.checker.salts[request_id] = options.get("cache_salt")
        add_request(self.engine, request_id, prompt, params, **options)
        return self.engine.requests[request_id]

    def step(self) -> list[EngineOutput]:
        self.checker.before_step()
        outputs = self.engine.step()
        assert not self.executor.violations, self.executor.violations
        assert self.draft is None or not self.draft.violations, self.draft.violations
        for output in outputs:
            self.said[output.request_id].add(output)
        self.checker.after_step()
        return outputs

    def run(self, *, max_steps: int = 2000) -> None:
        """Step until there is nothing left to do."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Step until the condition holds."""
        for _ in range(2000):
            if condition():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def run_until_turn_ends(self, request_id: str) -> EngineOutput:
        for _ in range(2000):
            for output in self.step():
                if output.request_id == request_id and output.finish_reason is not None:
                    return output
        raise AssertionError("the turn does not end")

    @property
    def computed(self) -> list[tuple[int, tuple[int, ...]]]:
        """(start, inputs) of every sequence of every step so far, drafts included."""
        assert self.executor.log is not None
        return [part for call in self.executor.log for part in call]

    def assert_all_free(self) -> None:
        stats = self.engine.stats
        assert stats.num_free_blocks == stats.num_kv_blocks
        assert not self.engine.requests

    def plain(self, keep: str = "computed") -> PlainSession:
        """What the answers must be, computed without an engine."""
        return PlainSession(self.model, frozenset({EOS}), self.config.max_model_len, keep)

    def expect(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        answer = self.plain().turn(prompt, params)
        assert answer is not None
        return answer


def plain_turns(session: PlainSession, chunks: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """The answers to these chunks."""
    answers = [session.turn(*chunk) for chunk in chunks]
    return [answer.token_ids for answer in answers if answer is not None]


def greedy(max_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, **options)
