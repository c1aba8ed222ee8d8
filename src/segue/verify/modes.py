"""What may differ between two runs that must give the same answers.

A `Setup` says how an engine is built and how requests are sent; `PLAIN` is the simplest there is. A `Mode` changes some
of its fields. Two modes that change a field to different values contradict each other; any others can be merged.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from segue.errors import ParameterError
from segue.verify.cases import Scope

Pool = Literal["ample", "tight"]
Speculation = Literal["none", "ngram", "draft_model"]


_WHOLE = 4096
"""Tokens of a step in which every prompt is computed at once."""
_LONG_CHUNK = 512


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the requests."""

    threads: int = 1
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = _WHOLE
    pool: Pool = "ample"
    """KV blocks: more than all requests need together, or hardly more than the longest one needs."""
    enable_prefix_caching: bool = False
    async_depth: int = 1
    speculation: Speculation = "none"
    adaptive: bool = False
    own_process: bool = False

    together: bool = False
    """All requests at once, instead of one after the other."""
    repeat: bool = False
    """Send everything twice; both times count."""
    streamed: bool = False
    """As live sessions whose text arrives in pieces that end anywhere, also within a character."""
    revised: bool = False
    """As live sessions: first a wrong text, then the right one."""
    forked: bool = False
    """As live sessions, forked in the middle of the text; both answer."""
    parked: bool = False
    """As live sessions which are all told their text before the first is answered, so that some lose their KV."""

    scope: Scope = Scope.MEDIUM
    long_answers: bool = False
    """Answers that need more blocks than their prompts."""

    @property
    def uses_sessions(self) -> bool:
        return self.streamed or self.revised or self.forked or self.parked


PLAIN = Setup()


class Evidence(msgspec.Struct, kw_only=True):
    """What happened in a run. None: not visible from outside the engine's process."""

    setup: Setup
    threads: int
    max_requests_in_step: int | None = None
    num_split_prompts: int | None = 0
    """Prompts that were computed in several steps because the step's budget was used up."""
    num_cached_tokens: int | None = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_planned_ahead: int | None = None
    """Parts of steps that were planned before the step that they go on from had ended."""
    num_draft_lengths: int | None = None
    """How many different numbers of drafts were asked for."""
    num_pieces: int = 0
    """Pieces of text that sessions were told, beyond one each."""
    num_revisions: int = 0
    num_forks: int = 0
    num_evicted_sessions: int | None = 0
    """Sessions that had lost KV when their answer was asked for."""
    is_own_process: bool = False


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the setup, and what shows that it really took effect."""

    name: str
    changes: Mapping[str, object]
    sign: str
    """What is counted."""
    count: Callable[[Evidence], int | None]
    """More than 0: it happened. None: cannot be seen."""
    needs: Scope | None = None
    """What must be answered for it to take effect."""
    at_most: Scope | None = None
    """It is too slow to answer more, or takes effect with less."""


def _mode(
    name: str,
    sign: str,
    count: Callable[[Evidence], int | None],
    *,
    needs: Scope | None = None,
    at_most: Scope | None = None,
    **changes: object,
) -> Mode:
    assert set(changes) <= set(Setup.__struct_fields__)
    return Mode(name=name, changes=changes, sign=sign, count=count, needs=needs, at_most=at_most)


def _requests_beside(evidence: Evidence) -> int | None:
    most = evidence.max_requests_in_step
    return None if most is None else most - 1


def _split_prompts(evidence: Evidence) -> int | None:
    return evidence.num_split_prompts


def _accepted(evidence: Evidence) -> int:
    return evidence.num_accepted_tokens


def _ahead(evidence: Evidence) -> int | None:
    return evidence.num_planned_ahead


def _other_lengths(evidence: Evidence) -> int | None:
    lengths = evidence.num_draft_lengths
    return None if lengths is None else lengths - 1


MODES: tuple[Mode, ...] = (
    _mode("together", "requests beside another", _requests_beside, together=True, max_num_seqs=64),
    _mode("three at a time", "requests beside another", _requests_beside, together=True, max_num_seqs=3),
    _mode(
        "chunks of 1",
        "prompts in chunks",
        _split_prompts,
        max_num_batched_tokens=1,
        max_num_seqs=1,
        at_most=Scope.SHORT,
    ),
    _mode("chunks of 7", "prompts in chunks", _split_prompts, max_num_batched_tokens=7),
    _mode("chunks of 64", "prompts in chunks", _split_prompts, needs=Scope.MEDIUM, max_num_batched_tokens=64),
    _mode(
        "chunks of 512",
        "prompts in chunks",
        _split_prompts,
        max_num_batched_tokens=_LONG_CHUNK,
        needs=Scope.LONG,
    ),
    _mode("2 threads", "more threads", lambda seen: seen.threads - 1, threads=2),
    _mode("3 threads", "more threads", lambda seen: seen.threads - 1, at_most=Scope.SHORT, threads=3),
    _mode("blocks of 5", "blocks of 5", lambda seen: int(seen.setup.block_size == 5), block_size=5),
    _mode("blocks of 32", "blocks of 32", lambda seen: int(seen.setup.block_size == 32), block_size=32),
    _mode(
        "prefix cache",
        "cached tokens",
        lambda seen: seen.num_cached_tokens,
        enable_prefix_caching=True,
        repeat=True,
    ),
    _mode(
        "preemption",
        "preemptions and evictions",
        lambda seen: seen.num_preemptions + (seen.num_evicted_sessions or 0),
        pool="tight",
        together=True,
        long_answers=True,
        at_most=Scope.SHORT,
    ),
    _mode("n-gram drafts", "drafts kept", _accepted, speculation="ngram"),
    _mode("draft model", "drafts kept", _accepted, speculation="draft_model"),
    _mode("adaptive drafts", "changes of k", _other_lengths, adaptive=True),
    _mode("depth 2", "parts planned ahead", _ahead, async_depth=2),
    _mode("depth 3", "parts planned ahead", _ahead, async_depth=3),
    _mode("streamed", "more pieces", lambda seen: seen.num_pieces, streamed=True),
    _mode("revised", "revisions", lambda seen: seen.num_revisions, revised=True),
    _mode("forked", "forks", lambda seen: seen.num_forks, forked=True),
    _mode("parked", "evicted sessions", lambda seen: seen.num_evicted_sessions, parked=True, pool="tight"),
    _mode("own process", "processes", lambda seen: int(seen.is_own_process), own_process=True),
)


class Combination(msgspec.Struct, frozen=True):
    """Modes that are on at the same time."""

    modes: tuple[Mode, ...]
    setup: Setup

    @property
    def name(self) -> str:
        return " + ".join(mode.name for mode in self.modes)


class Skipped(msgspec.Struct, frozen=True):
    """Modes that cannot be on at the same time."""

    name: str
    why: str


def combine(modes: Sequence[Mode], base: Setup = PLAIN) -> Combination | Skipped:
    """The setup with all these modes on, or why there is none."""
    name = " + ".join(mode.name for mode in modes)
    changes: dict[str, object] = {}
    for mode in modes:
        for field, value in mode.changes.items():
            if changes.setdefault(field, value) != value:
                return Skipped(name, f"{field} is {changes[field]} or {value}")
    setup = msgspec.structs.replace(base, **changes, scope=_scope(modes, base.scope))
    if setup.adaptive and setup.speculation == "none":
        # Drafts that are often wrong: there is something to adapt to.
        setup = msgspec.structs.replace(setup, speculation="ngram")
    why = _contradiction(setup)
    return Combination(tuple(modes), setup) if why is None else Skipped(name, why)


def _scope(modes: Sequence[Mode], default: Scope) -> Scope:
    """As much as one of the modes needs, else as little as one of them wants."""
    needed = [mode.needs for mode in modes if mode.needs is not None]
    wanted = [mode.at_most for mode in modes if mode.at_most is not None]
    if needed:
        return max(*needed, default) if default is Scope.LONG else max(needed)
    return min(wanted, default=default)


def _contradiction(setup: Setup) -> str | None:
    if setup.max_num_batched_tokens == 1:
        if setup.speculation != "none":
            return "a step of one token has no room for drafts"
        if setup.together and setup.pool == "tight":
            return "with one request a step nobody is preempted"
    in_pieces = setup.streamed or setup.revised or setup.forked
    if not setup.together and in_pieces and _LONG_CHUNK <= setup.max_num_batched_tokens < _WHOLE:
        return "text that arrives in pieces is shorter than a chunk"
    if setup.own_process and setup.async_depth > 2:
        return "the engine's own process has a depth of 1 or 2"
    return None


def find_modes(names: Sequence[str]) -> tuple[Mode, ...]:
    """The modes of these names. Raises ParameterError for an unknown one."""
    by_name = {mode.name: mode for mode in MODES}
    for name in names:
        if name not in by_name:
            raise ParameterError("modes", name, f"unknown; known are {', '.join(by_name)}")
    return tuple(mode for mode in MODES if mode.name in names)


def plan(
    modes: Sequence[Mode], *, pairs: bool, base: Setup = PLAIN
) -> tuple[list[Combination], list[Skipped]]:
    """Each mode alone, with `pairs` every pair of them, and as many as possible at once; and what is contradictory.

    What needs no longer prompts gets the long ones alone only, unless `base` says that everything does.
    """
    several = base if base.scope is Scope.LONG else msgspec.structs.replace(base, scope=Scope.SHORT)
    planned = [combine((mode,), base) for mode in modes]
    if pairs:
        planned += [combine(pair, several) for pair in itertools.combinations(modes, 2)]
    combinations = [each for each in planned if isinstance(each, Combination)]
    skipped = [each for each in planned if isinstance(each, Skipped)]
    everything = _everything(modes, several)
    return combinations + (everything if pairs else everything[:1]), skipped


def _everything(modes: Sequence[Mode], base: Setup) -> list[Combination]:
    """Few combinations of as many modes as go together, which have each mode in one of them.

    Little can be seen of an engine in its own process, so that mode is in the last one only.
    """
    inside = [mode for mode in modes if "own_process" not in mode.changes]
    found: list[Combination] = []
    left = inside
    while left:
        largest = _extend([], [*left, *inside], base)
        found.append(largest)
        left = [mode for mode in left if mode not in largest.modes]
    apart = [mode for mode in modes if mode not in inside]
    if apart:
        found.append(_extend(apart, inside, base))
    return [combination for combination in found if len(combination.modes) > 2]


def _extend(chosen: list[Mode], candidates: Sequence[Mode], base: Setup) -> Combination:
    """The chosen modes, and each of the candidates in turn that goes with those before it."""
    for mode in candidates:
        if mode not in chosen and isinstance(combine([*chosen, mode], base), Combination):
            chosen = [*chosen, mode]
    combination = combine(chosen, base)
    assert isinstance(combination, Combination)
    return combination
