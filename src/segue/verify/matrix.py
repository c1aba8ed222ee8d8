"""The plain run, then every combination of modes; each compared with it bit for bit."""

import struct
import time
from collections.abc import Callable, Sequence

import msgspec

from segue.contract.reports import FinishReason
from segue.errors import RequestFailed
from segue.verify.cases import Scope, build_cases
from segue.verify.delivery import Delivered, Logprobs, SeenAnswer, deliver, plan_rounds
from segue.verify.modes import PLAIN, Combination, Evidence, Mode, Setup, Skipped, plan
from segue.verify.workbench import Workbench

LONG_ANSWERS = 2
"""How many times as long as others."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where an answer is not the plain run's."""

    modes: str
    case: str
    what: str
    """token, logprobs, prompt token, prompt logprobs, text or end."""
    position: int
    """Of the answer's token, or the prompt's."""
    plain: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.modes}: request {self.case!r}, {self.what} {self.position}: "
            f"{self.found} instead of {self.plain}"
        )


class Sign(msgspec.Struct, frozen=True):
    """What shows that a mode took effect in a run."""

    mode: str
    sign: str
    count: int | None
    """None: it cannot be seen from outside the engine's process."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One combination, compared."""

    name: str
    modes: tuple[str, ...]
    num_answers: int
    num_tokens: int
    """Compared, prompts not counted."""
    num_logprobs: int
    """Compared, those of prompts included."""
    signs: tuple[Sign, ...]
    difference: Difference | None
    seconds: float

    @property
    def not_exercised(self) -> tuple[str, ...]:
        """Modes that did not take effect, so that their equality proves nothing."""
        return tuple(sign.mode for sign in self.signs if sign.count is not None and sign.count <= 0)

    @property
    def ok(self) -> bool:
        return self.difference is None and not self.not_exercised


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a verification."""

    model: str
    plain: str
    """What the plain run's bits depend on beside the model."""
    seed: int
    runs: list[Run]
    skipped: list[Skipped]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(run.ok for run in self.runs)

    @property
    def first_difference(self) -> Difference | None:
        return next((run.difference for run in self.runs if run.difference is not None), None)


class Verification:
    """A planned verification: `run` carries it out."""

    def __init__(
        self,
        bench: Workbench,
        modes: Sequence[Mode],
        *,
        pairs: bool,
        answer_len: int,
        scope: Scope = Scope.MEDIUM,
        seed: int = 0,
    ) -> None:
        """`scope`: what the modes that do not say otherwise answer. `seed`: of the draws and of where texts are cut."""
        self._bench = bench
        self._seed = seed
        self._base = Setup(scope=scope)
        self._cases = {
            is_long: build_cases(
                bench.tokenizer, max_model_len=bench.max_model_len, answer_len=length, seed=seed
            )
            for is_long, length in ((False, answer_len), (True, LONG_ANSWERS * answer_len))
        }
        self._plain: dict[tuple[bool, str], SeenAnswer] = {}
        """By whether answers are long, and the request's name."""
        self.combinations, self.skipped = plan(modes, pairs=pairs, base=self._base)

    def run(self, model: str, done: Callable[[str], None] = lambda name: None) -> Report:
        """Carries out all runs; calls `done` after each. Raises RequestFailed, EngineDead, CapacityError."""
        start_s = time.perf_counter()
        self._run_plain()
        done("plain")
        runs = []
        for combination in self.combinations:
            runs.append(self._run(combination))
            done(combination.name)
        return Report(
            model=model,
            plain=self._bench.describe(),
            seed=self._seed,
            runs=runs,
            skipped=self.skipped,
            seconds=time.perf_counter() - start_s,
        )

    def _run_plain(self) -> None:
        for is_long in (False, True):
            scopes = [each.setup.scope for each in self.combinations if each.setup.long_answers is is_long]
            if not scopes:
                continue
            setup = msgspec.structs.replace(PLAIN, scope=max(scopes), long_answers=is_long)
            for answer in self._deliver(setup).answers:
                if answer.finish_reason is FinishReason.ERROR:
                    raise RequestFailed(f"the request {answer.case!r} failed: {answer.stop_reason}")
                self._plain[is_long, answer.case] = answer

    def _deliver(self, setup: Setup) -> Delivered:
        cases = [case for case in self._cases[setup.long_answers] if case.scope <= setup.scope]
        sent = plan_rounds(cases, setup)
        bench = self._bench.open(setup, sent[0])
        return deliver(bench, self._bench.tokenizer, sent, setup, self._seed)

    def _run(self, combination: Combination) -> Run:
        start_s = time.perf_counter()
        setup = combination.setup
        delivered = self._deliver(setup)
        differences = (
            compare(combination.name, self._plain[setup.long_answers, answer.case], answer)
            for answer in delivered.answers
        )
        return Run(
            name=combination.name,
            modes=tuple(mode.name for mode in combination.modes),
            num_answers=len(delivered.answers),
            num_tokens=sum(len(answer.token_ids) for answer in delivered.answers),
            num_logprobs=sum(_count_logprobs(answer) for answer in delivered.answers),
            signs=_signs(combination, delivered.evidence),
            difference=next((each for each in differences if each is not None), None),
            seconds=time.perf_counter() - start_s,
        )


def _signs(combination: Combination, evidence: Evidence) -> tuple[Sign, ...]:
    return tuple(Sign(mode.name, mode.sign, mode.count(evidence)) for mode in combination.modes)


def _count_logprobs(answer: SeenAnswer) -> int:
    return sum(len(entry) for entry in (*answer.logprobs, *(answer.prompt_logprobs or ())))


# --- comparison -----------------------------------------------------------------------------------------------


def compare(modes: str, plain: SeenAnswer, found: SeenAnswer) -> Difference | None:
    """The first difference: ids with `==`, log-probabilities by their 64 bits. None: there is none."""
    prompt_logprobs = plain.prompt_logprobs if found.prompt_logprobs is not None else None
    rows: tuple[tuple[str, Sequence[object], Sequence[object]], ...] = (
        ("prompt token", plain.prompt_token_ids, found.prompt_token_ids),
        ("prompt logprobs", _bits(prompt_logprobs or ()), _bits(found.prompt_logprobs or ())),
        ("token", plain.token_ids, found.token_ids),
        ("logprobs", _bits(plain.logprobs), _bits(found.logprobs)),
        ("text", plain.text, found.text),
        ("end", (plain.finish_reason, plain.stop_reason), (found.finish_reason, found.stop_reason)),
    )
    for what, expected, got in rows:
        if expected != got:
            at = _first_difference(expected, got)
            plain_value, found_value = _show(what, at, plain, expected), _show(what, at, found, got)
            return Difference(
                modes=modes, case=plain.case, what=what, position=at, plain=plain_value, found=found_value
            )
    return None


def _bits(logprobs: Sequence[Logprobs]) -> list[list[tuple[int, bytes, int]]]:
    """With floats as bytes, so that NaN equals itself and 0.0 differs from -0.0."""
    return [[(token, struct.pack("<d", value), rank) for token, value, rank in row] for row in logprobs]


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def _show(what: str, at: int, answer: SeenAnswer, values: Sequence[object]) -> str:
    if at >= len(values):
        return "nothing"
    match what:
        case "logprobs":
            return _show_logprobs(answer.logprobs[at])
        case "prompt logprobs":
            return _show_logprobs((answer.prompt_logprobs or ())[at])
        case _:
            return repr(values[at])


def _show_logprobs(row: Logprobs) -> str:
    return ", ".join(f"{token}: {value!r} (rank {rank})" for token, value, rank in row)
