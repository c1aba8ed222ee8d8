"""`segue verify` finds what is wrong, and says so when it could not have found anything."""

import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from segue.cli.main import run_command
from segue.cli.verify import check
from segue.contract.reports import FinishReason
from segue.contract.step import Executor, ForwardResult, SeqStep
from segue.errors import FailedError, ParameterError
from segue.tokens import Tokenizer
from segue.verify.cases import Scope, build_cases, prompt_ids
from segue.verify.delivery import SeenAnswer
from segue.verify.matrix import Report, Verification, compare
from segue.verify.modes import MODES, Combination, Skipped, combine, find_modes
from segue.verify.workbench import Workbench
from segue.weights.gguf import load_gguf
from tests.weights.make_gguf import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=1024)


class Faulty:
    """An executor that errs when more than one sequence is computed, as kernels do whose sums depend on the batch."""

    def __init__(self, executor: Executor, err: Callable[[ForwardResult], None]) -> None:
        self._executor = executor
        self._err = err
        self.vocab_size = executor.vocab_size
        self.max_model_len = executor.max_model_len
        self.kv_bytes_per_token = executor.kv_bytes_per_token

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._executor.allocate_kv(num_blocks, block_size)

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        result = self._executor.forward(seqs, copies)
        if len(seqs) > 1:
            self._err(result)
        return result

    def close(self) -> None:
        self._executor.close()


def last_bit(result: ForwardResult) -> None:
    """The smallest error that there is, in one log-probability."""
    for row, entry in result.logprobs.items():
        result.logprobs[row] = msgspec.structs.replace(
            entry, logprob=math.nextafter(entry.logprob, -math.inf)
        )
        return


def other_token(result: ForwardResult) -> None:
    if result.tokens:
        result.tokens[0] ^= 1


def verify(model: Path, *names: str, err: Callable[[ForwardResult], None] | None = None) -> Report:
    wrap = None if err is None else lambda executor: Faulty(executor, err)
    workbench = Workbench(model, wrap=wrap)
    return Verification(workbench, find_modes(names), pairs=True, answer_len=6).run("tiny")


@pytest.mark.parametrize(("err", "what"), [(last_bit, "logprobs"), (other_token, "token")])
def test_a_difference_that_depends_on_the_batch_is_found(
    model: Path, err: Callable[[ForwardResult], None], what: str
) -> None:
    report = verify(model, "together", "blocks of 5", err=err)
    by_name = {run.name: run for run in report.runs}
    assert by_name["blocks of 5"].ok
    difference = by_name["together"].difference
    assert difference is not None
    assert difference.what == what
    assert difference.plain != difference.found
    assert by_name["together + blocks of 5"].difference is not None
    assert not report.ok
    with pytest.raises(FailedError, match=f"an answer differs: together: request .*, {what} "):
        check(report)


def test_the_same_without_a_fault_is_equal(model: Path) -> None:
    report = verify(model, "together", "blocks of 5")
    assert report.ok
    check(report)


def test_a_mode_that_has_no_effect_fails(tiny_path: Path) -> None:
    """A model of 256 positions has no prompt that is longer than 512 tokens."""
    report = verify(tiny_path, "chunks of 512")
    (run,) = report.runs
    assert run.difference is None
    assert run.not_exercised == ("chunks of 512",)
    with pytest.raises(FailedError, match="chunks of 512 did not take effect"):
        check(report)


# --- what is compared -----------------------------------------------------------------------------------------


def an_answer(**changes: object) -> SeenAnswer:
    answer = SeenAnswer(
        case="fact",
        prompt_token_ids=(1, 2),
        token_ids=(3, 4),
        logprobs=(((3, -0.5, 1),), ((4, 0.0, 1), (5, -1.5, 2))),
        prompt_logprobs=(((2, -2.0, 7),),),
        text="ab",
        finish_reason=FinishReason.LENGTH,
        stop_reason=None,
    )
    return msgspec.structs.replace(answer, **changes)


@pytest.mark.parametrize(
    ("changes", "what", "position"),
    [
        ({"prompt_token_ids": (1, 9)}, "prompt token", 1),
        ({"prompt_token_ids": (1, 2, 3)}, "prompt token", 2),
        ({"prompt_logprobs": (((2, -2.0, 8),),)}, "prompt logprobs", 0),
        ({"token_ids": (3, 5)}, "token", 1),
        ({"token_ids": (3,)}, "token", 1),
        ({"logprobs": (((3, -0.5, 1),), ((4, -0.0, 1), (5, -1.5, 2)))}, "logprobs", 1),
        ({"logprobs": (((3, math.nextafter(-0.5, 0), 1),), ((4, 0.0, 1), (5, -1.5, 2)))}, "logprobs", 0),
        ({"text": "ac"}, "text", 1),
        ({"finish_reason": FinishReason.STOP}, "end", 0),
        ({"stop_reason": 4}, "end", 1),
    ],
)
def test_every_field_counts(changes: dict[str, object], what: str, position: int) -> None:
    difference = compare("modes", an_answer(), an_answer(**changes))
    assert difference is not None
    assert (difference.what, difference.position) == (what, position)


def test_equal_answers_have_no_difference() -> None:
    assert compare("modes", an_answer(), an_answer()) is None
    assert compare("modes", an_answer(), an_answer(prompt_logprobs=None)) is None, "sessions have none"
    nan = (((3, math.nan, 1),),)
    assert compare("modes", an_answer(logprobs=nan), an_answer(logprobs=nan)) is None


# --- modes and cases ------------------------------------------------------------------------------------------


def names_of(combination: Combination | Skipped) -> str:
    assert isinstance(combination, Combination)
    return combination.name


def test_values_of_one_setting_contradict_each_other() -> None:
    skipped = combine(find_modes(["chunks of 7", "chunks of 64"]))
    assert skipped == Skipped("chunks of 7 + chunks of 64", "max_num_batched_tokens is 7 or 64")
    assert isinstance(combine(find_modes(["chunks of 1", "n-gram drafts"])), Skipped)
    assert names_of(combine(find_modes(["depth 2", "chunks of 7"]))) == "chunks of 7 + depth 2"


def test_each_mode_changes_something_and_goes_by_itself() -> None:
    plain = combine(())
    assert isinstance(plain, Combination)
    for mode in MODES:
        alone = combine((mode,))
        assert isinstance(alone, Combination)
        assert alone.setup != plain.setup


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ParameterError, match="unknown; known are together"):
        find_modes(["turbo"])


@pytest.mark.parametrize("max_model_len", [40, 256, 1024])
def test_cases_fit_the_model(tiny_path: Path, max_model_len: int) -> None:
    tokenizer = Tokenizer.from_model(load_gguf(tiny_path))
    cases = build_cases(tokenizer, max_model_len=max_model_len, answer_len=12)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.scope for case in cases} == set(Scope)
    for case in cases:
        assert case.num_tokens <= max_model_len
        assert case.token_ids == tuple(prompt_ids(tokenizer, case.text, case.messages))


# --- the command ----------------------------------------------------------------------------------------------


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    code = run_command(["verify", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(capsys, monkeypatch, str(model), "--modes", "together, depth 2,depth 3,forked")
    assert (code, err) == (0, "")
    assert "requests beside another: 13" in out
    assert "· depth 2 + depth 3: async_depth is 2 or 3" in out
    assert "= all at once: together + depth 2 + forked" in out
    assert "≠" not in out.replace("≠ different", "")


def test_command_json(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(
        capsys, monkeypatch, str(model), "--quick", "--modes", "together,2 threads", "--json", "--seed", "3"
    )
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["ok"]
    assert report["seed"] == 3
    assert [run["name"] for run in report["runs"]] == ["together", "2 threads"]
    assert all(run["difference"] is None for run in report["runs"])


def test_command_fails_when_it_proves_nothing(
    tiny_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, str(tiny_path), "--modes", "chunks of 512")
    assert code == 1
    assert "○" in out.splitlines()[2]
    assert "did not take effect" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quick", "--full"), "choose one"),
        (("--modes", "turbo"), "turbo"),
        (("--draft", "/nonexistent.gguf"), "no such file"),
    ],
)
def test_command_refuses(
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    code, out, err = run(capsys, monkeypatch, str(model), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
