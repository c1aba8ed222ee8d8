"""The journal against the engine itself: another engine that is told what it holds goes on the same."""

import random
from pathlib import Path
from typing import Any

import pytest

from segue import EngineArgs, SamplingParams
from segue.contract.reports import EngineOutput
from segue.engine.engine import Engine
from segue.engine.submission import KvScope
from segue.host import wire
from segue.host.build import build
from segue.host.journal import Journal
from tests.engine.calls import add_request

MAX_TOKENS = 12
LENGTH = 6


def make_engine(path: Path, **options: Any) -> Engine:
    args = EngineArgs(
        model=str(path), runtime="reference", max_num_seqs=4, max_num_batched_tokens=16, **options
    )
    engine = build(args).engine
    assert isinstance(engine, Engine)
    return engine


class Client:
    """Tells an engine and a journal the same, at random."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.journal = Journal(engine.config)
        self.said: dict[str, list[tuple[list[int], object]]] = {}
        self._rng = rng
        self._num_sent = 0
        self._num_names = 0

    def call(self, method: str, **arguments: Any) -> None:
        getattr(self.engine, method)(**arguments)
        self.journal.told(wire.CALL_TYPES[method](**arguments))
        self._num_sent += 1

    def step(self) -> None:
        outputs = self.engine.step()
        self.journal.progress(self._num_sent, outputs)
        note(self.said, outputs)

    def params(self) -> SamplingParams:
        return SamplingParams(
            seed=self._rng.randrange(100),
            max_tokens=self._rng.randint(1, MAX_TOKENS),
            temperature=self._rng.choice((0.0, 1.0)),
            presence_penalty=self._rng.choice((0.0, 1.5)),
            logprobs=self._rng.choice((None, 1)),
            ignore_eos=self._rng.random() < 0.7,
        )

    def ids(self) -> list[int]:
        return [self._rng.randrange(3, 300) for _ in range(self._rng.randint(1, LENGTH))]

    def name(self) -> str:
        self._num_names += 1
        return f"r{self._num_names}"

    def act(self) -> None:
        """Something that a user could do now."""
        open_ids = [id for id, request in self.engine.requests.items() if request.input_open]
        kind = self._rng.choice(("add", "add", "chunk", "chunk", "truncate", "fork", "end", "abort"))
        if kind == "add" or not open_ids:
            submission = self.engine.intake.submission(
                self.ids(),
                self.params(),
                request_id=self.name(),
                scope=KvScope(self._rng.choice((None, "salt"))),
                resumable=self._rng.random() < 0.7,
                keep=self._rng.choice(("computed", "all")),
            )
            self.call("add_request", submission=submission)
            return
        request_id = self._rng.choice(open_ids)
        length = len(self.engine.requests[request_id].timeline.tokens)
        match kind:
            case "chunk":
                params = self._rng.choice((None, self.params()))
                ids = self.engine.intake.chunk(self.ids(), params)
                self.call("add_chunk", request_id=request_id, token_ids=ids, params=params)
            case "truncate":
                self.call("truncate", request_id=request_id, num_tokens=self._rng.randint(0, length))
            case "fork":
                self.call(
                    "fork",
                    request_id=request_id,
                    new_request_id=self.name(),
                    num_tokens=self._rng.choice((None, self._rng.randint(0, length))),
                    default_seed=self.engine.intake.next_seed(),
                )
            case "end":
                self.call("end_input", request_id=request_id)
            case "abort":
                self.call("abort_request", request_id=request_id)


def note(said: dict[str, list[tuple[list[int], object]]], outputs: list[EngineOutput]) -> None:
    """Joins what is told in parts."""
    for output in outputs:
        turns = said.setdefault(output.request_id, [([], None)])
        turns[-1][0].extend(output.token_ids)
        if output.finish_reason is not None:
            turns[-1] = (turns[-1][0], (output.finish_reason, output.stop_reason, output.finished))
            turns.append(([], None))


def drain(engine: Engine, said: dict[str, list[tuple[list[int], object]]]) -> None:
    while engine.has_unfinished_requests():
        note(said, engine.step())


@pytest.mark.parametrize("seed", range(30))
def test_another_engine_goes_on_the_same(tiny_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    options = {"async_scheduling": rng.random() < 0.5, "num_kv_blocks": 16}
    first, second = make_engine(tiny_path, **options), make_engine(tiny_path)
    client = Client(first, rng)
    for _ in range(rng.randint(5, 40)):
        if rng.random() < 0.5:
            client.act()
        else:
            client.step()
    client.step()  # so that all calls are confirmed
    said = {id: [(list(ids), end) for ids, end in turns] for id, turns in client.said.items()}
    assert client.journal.unconfirmed == []
    assert set(client.journal.requests) == set(first.requests)
    for request_id, held in client.journal.requests.items():
        assert held.tokens == first.requests[request_id].timeline.tokens
    for held in client.journal.requests.values():
        for call in held.calls():
            arguments = {name: getattr(call, name) for name in call.__struct_fields__}
            getattr(second, type(call).__name__)(**arguments)
    drain(first, client.said)
    drain(second, said)
    for request_id in client.journal.requests:
        assert said.get(request_id) == client.said.get(request_id), request_id
    assert {id: request.timeline.tokens for id, request in first.requests.items()} == {
        id: request.timeline.tokens for id, request in second.requests.items()
    }
    first.close()
    second.close()


def test_a_snapshot_says_who_holds_what(tiny_path: Path) -> None:
    engine = make_engine(tiny_path)
    add_request(engine, "a", list(range(3, 43)), None, resumable=True)
    add_request(engine, "b", list(range(50, 90)), SamplingParams(max_tokens=40, ignore_eos=True))
    seen = {engine.snapshot().requests[0].state}
    while engine.has_unfinished_requests():
        engine.step()
        snapshot = engine.snapshot()
        seen.add(snapshot.requests[0].state)
        held = [block for request in snapshot.requests for block in request.blocks]
        assert len(set(held)) == engine.pool.num_blocks - engine.pool.num_free
        assert len(snapshot.cached_blocks) == engine.stats.num_cached_blocks
        assert not set(held) & set(snapshot.cached_blocks)
    assert seen == {"waiting", "running", "idle"}
    (a,) = engine.snapshot("a").requests
    assert (a.request_id, a.state, a.num_tokens, a.num_computed, len(a.blocks)) == ("a", "idle", 40, 39, 3)
    assert engine.snapshot("b").requests == []
    assert engine.snapshot().cached_blocks != []
    engine.close()
