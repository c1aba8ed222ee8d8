"""All interleavings of a few events, to a stated depth, over tiny setups.

What random seeds find by luck is certain here, as far as it needs no more events than this (the small-scope
hypothesis: most bugs show in small cases). Each interleaving starts with a first request, ends with everything
drained, and passes all checks of the simulation on the way.
"""

from collections.abc import Callable, Iterator

import pytest

from segue.engine.config import EngineConfig, SpeculativeConfig, SpeculativeMethod
from segue.sample.params import SamplingParams
from tests.sim.checks import Violation
from tests.sim.driver import EOS, Client, Setup, World
from tests.sim.oracle import Failure

Event = str
Events = tuple[Event, ...]

ANSWER = SamplingParams(max_tokens=3, temperature=0.0, seed=1, stop_token_ids=[8])
LONGER = SamplingParams(max_tokens=5, temperature=1.0, seed=2, frequency_penalty=0.5, ignore_eos=True)


def _speculative(method: SpeculativeMethod | None) -> SpeculativeConfig | None:
    if method is None:
        return None
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=2,
        prompt_lookup_min=1,
        prompt_lookup_max=2,
        model="draft" if method == "draft_model" else None,
        adaptive=False,
    )


def _setup(
    method: SpeculativeMethod | None, depth: int, *, block_size: int = 2, num_blocks: int = 8
) -> Setup:
    """The pool is barely enough for one request of full length."""
    config = EngineConfig(
        max_model_len=16,
        num_kv_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=2,
        max_num_batched_tokens=5,
        async_depth=depth,
        speculative=_speculative(method),
        eos_token_ids=EOS,
    )
    return Setup(config, faults=True)


SETUPS = {
    "sync": _setup(None, 1),
    "async": _setup(None, 2),
    "ngram, sync": _setup("ngram", 1),
    "ngram, async": _setup("ngram", 2),
    "draft_model, sync": _setup("draft_model", 1),
    "draft_model, async": _setup("draft_model", 3),
}

# --- the events -------------------------------------------------------------------------------------------------


def _arrive(name: str, prompt: list[int], params: SamplingParams | None) -> Callable[[World], None]:
    return lambda world: world.arrive(name, prompt, params, resumable=True)


def _to(name: str, act: Callable[[World, Client], None]) -> Callable[[World], None]:
    return lambda world: act(world, world.clients[name])


def _reset_and_step(world: World) -> None:
    world.reset_prefix_cache()
    world.step()


def _fail_and_step(world: World) -> None:
    world.target.fail_next = Failure.BEFORE_COPIES
    world.step()
    world.target.fail_next = None


ACTIONS: dict[Event, Callable[[World], None]] = {
    "step": World.step,
    "reset": _reset_and_step,
    "fail": _fail_and_step,
    "restart": lambda world: world.restart(lose_outputs=True),
    "arrive a": _arrive("a", [2, 6, 2, 6, 2], ANSWER),
    "arrive b": _arrive("b", [2, 6, 2, 6, 3, 4], LONGER),
    "chunk a": _to("a", lambda world, client: world.send_chunk(client, [6, 2], ANSWER)),
    "empty a": _to("a", lambda world, client: world.send_chunk(client, [], LONGER)),
    "prefill a": _to("a", lambda world, client: world.send_chunk(client, [6, 2, 6], None)),
    "cut a": _to("a", lambda world, client: world.truncate(client, 2)),
    "fork a": _to("a", lambda world, client: world.fork(client, "f", 0)),
    "end a": _to("a", World.end_input),
    "abort a": _to("a", World.abort),
    "chunk b": _to("b", lambda world, client: world.send_chunk(client, [6], LONGER)),
    "end b": _to("b", World.end_input),
    "abort b": _to("b", World.abort),
}
"""`reset` and `fail` act on the next step, so they come with it. `restart` loses a step with its outputs."""

ONE_REQUEST = (
    "step",
    "reset",
    "fail",
    "restart",
    "chunk a",
    "empty a",
    "prefill a",
    "cut a",
    "fork a",
    "end a",
    "abort a",
)
TWO_REQUESTS = (
    "step",
    "reset",
    "fail",
    "restart",
    "arrive b",
    "chunk a",
    "cut a",
    "end a",
    "abort a",
    "chunk b",
    "abort b",
)


def _is_possible(event: Event, before: Events) -> bool:
    """Whether a user could do this now. Of events that commute, only one order is run."""
    verb, _, name = event.partition(" ")
    if not name:
        return True
    if verb == "arrive":
        return event not in before
    if f"abort {name}" in before or (name != "a" and f"arrive {name}" not in before):
        return False
    if verb in ("chunk", "empty", "prefill", "cut", "fork", "end") and f"end {name}" in before:
        return False
    if verb == "fork":
        return event not in before
    # Whoever goes away at once might as well not have acted.
    last = before[-1]
    return verb != "abort" or last in ("step", "reset", "fail", "restart") or last.startswith("arrive")


def _interleavings(alphabet: Events, depth: int, before: Events) -> Iterator[Events]:
    if depth == 0:
        yield before
        return
    for event in alphabet:
        if _is_possible(event, before):
            yield from _interleavings(alphabet, depth - 1, (*before, event))


def _play(setup: Setup, events: Events) -> None:
    world = World(setup)
    try:
        for event in events:
            _, _, name = event.partition(" ")
            if name and not event.startswith("arrive") and name not in world.clients:
                continue  # A failed step has ended it.
            ACTIONS[event](world)
        world.drain()
    except Exception as error:
        raise Violation(f"{events}: {type(error).__name__}: {error} ({setup})") from error


@pytest.mark.parametrize("name", SETUPS)
def test_one_request(name: str) -> None:
    """One session and its fork: every order of 4 events after its arrival."""
    for events in _interleavings(ONE_REQUEST, 4, ("arrive a",)):
        _play(SETUPS[name], events)


@pytest.mark.parametrize("name", SETUPS)
def test_two_requests(name: str) -> None:
    """Two sessions that share a prefix, in a pool for one: every order of 4 events after the first has begun."""
    for events in _interleavings(TWO_REQUESTS, 4, ("arrive a", "step")):
        _play(SETUPS[name], events)
