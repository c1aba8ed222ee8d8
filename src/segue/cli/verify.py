"""`segue verify`: proof that the schedule never changes an answer, on this machine and with this model."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from segue.args import EngineArgs
from segue.cli.output import print_json
from segue.display import escape
from segue.errors import FailedError
from segue.verify.cases import Scope
from segue.verify.matrix import Report, Run, Verification
from segue.verify.modes import MODES, find_modes
from segue.verify.workbench import Workbench

if TYPE_CHECKING:
    from rich.console import Console


class Effort(StrEnum):
    """How much is compared."""

    QUICK = "quick"
    """Each mode alone, and all together."""
    PAIRS = "pairs"
    FULL = "full"
    """Pairs, longer prompts and answers."""


ANSWER_LEN = {Effort.QUICK: 12, Effort.PAIRS: 12, Effort.FULL: 40}
"""Tokens of each answer."""


def verify(
    args: EngineArgs,
    effort: Effort,
    modes: Sequence[str],
    *,
    draft: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Prints what was compared, as tables or as JSON. Raises FailedError when not all is equal, or a mode did not
    take effect."""
    bench = Workbench(args.model, draft=draft, runtime=args.runtime, kv_cache_dtype=args.kv_cache_dtype)
    with contextlib.closing(bench):
        verification = Verification(
            bench,
            find_modes(modes) if modes else MODES,
            pairs=effort is not Effort.QUICK,
            answer_len=ANSWER_LEN[effort],
            scope=Scope.LONG if effort is Effort.FULL else Scope.MEDIUM,
            seed=seed,
        )
        with _progress(1 + len(verification.combinations)) as done:
            report = verification.run(args.model, done)
    if as_json:
        print_json(msgspec.to_builtins(report) | {"ok": report.ok})
    else:
        _print(report)
    check(report)


def check(report: Report) -> None:
    """Raises FailedError with the first difference, else with the first run in which a mode did not take effect."""
    difference = report.first_difference
    if difference is not None:
        raise FailedError(f"an answer differs: {difference}")
    for run in report.runs:
        if run.not_exercised:
            raise FailedError(
                f"{run.name}: {', '.join(run.not_exercised)} did not take effect, so the run proves nothing about it"
            )


@contextlib.contextmanager
def _progress(num_runs: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr, if that is a terminal; yields what takes the name of each run that is done."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("plain", total=num_runs)

        def done(name: str) -> None:
            progress.update(task, advance=1, description=name)

        yield done


# --- tables ---------------------------------------------------------------------------------------------------


def _print(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=200)
    console.print(f"{escape(report.model)}: {report.plain}, seed {report.seed}", soft_wrap=True)
    _print_modes(console, report)
    pairs = {frozenset(run.modes): run for run in report.runs if len(run.modes) == 2}
    if pairs:
        _print_pairs(console, report, pairs)
    for run in report.runs:
        if len(run.modes) > 2:
            console.print(f"{_mark(run)} all at once: {run.name} ({_amount(run)})", soft_wrap=True)
    _print_sum(console, report)


def _print_modes(console: "Console", report: Report) -> None:
    """Each mode by itself: what was compared, and what shows that it took effect, there and in all runs."""
    from rich.table import Table

    table = Table(box=None, header_style="", pad_edge=False)
    for name in ("", "", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "logprobs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("took effect", no_wrap=True)
    alone = [run for run in report.runs if len(run.modes) == 1]
    for number, run in enumerate(alone, 1):
        (sign,) = run.signs
        table.add_row(
            _mark(run),
            str(number),
            run.name,
            f"{run.num_tokens:,}",
            f"{run.num_logprobs:,}",
            f"{sign.sign}: {sign.count:,}",
        )
    console.print(table)


def _print_pairs(console: "Console", report: Report, pairs: dict[frozenset[str], Run]) -> None:
    """A triangle of marks, numbered like the modes."""
    from rich.table import Table

    names = [run.name for run in report.runs if len(run.modes) == 1]
    table = Table(box=None, header_style="", pad_edge=False, title="pairs", title_justify="left")
    table.add_column("", justify="right")
    for number in range(1, len(names)):
        table.add_column(str(number), justify="center", no_wrap=True)
    for row, name in enumerate(names[1:], 1):
        marks = [_pair_mark(pairs.get(frozenset((name, other)))) for other in names[:row]]
        table.add_row(str(row + 1), *marks)
    console.print(table)


def _print_sum(console: "Console", report: Report) -> None:
    num_tokens = sum(run.num_tokens for run in report.runs)
    num_logprobs = sum(run.num_logprobs for run in report.runs)
    num_different = sum(run.difference is not None for run in report.runs)
    num_idle = sum(bool(run.not_exercised) for run in report.runs)
    console.print("= equal   ≠ different   ○ a mode did not take effect   · contradictory")
    for skipped in report.skipped:
        console.print(f"· {skipped.name}: {skipped.why}", soft_wrap=True)
    console.print(
        f"{len(report.runs)} runs in {report.seconds:,.0f} s: {num_tokens:,} tokens and {num_logprobs:,} logprobs "
        f"compared bit for bit with the plain run; {num_different} runs differ, {num_idle} prove nothing",
        soft_wrap=True,
    )


def _amount(run: Run) -> str:
    seen = ", ".join(f"{sign.sign}: {sign.count:,}" for sign in run.signs if sign.count is not None)
    return f"{run.num_tokens:,} tokens, {run.num_logprobs:,} logprobs; {seen}"


def _pair_mark(run: Run | None) -> str:
    return "·" if run is None else _mark(run)


def _mark(run: Run) -> str:
    if run.difference is not None:
        return "≠"
    return "○" if run.not_exercised else "="
