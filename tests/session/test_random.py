"""Random operations on sessions. After each: the text is what it must be, the engine holds it, and the next answer is
that of an engine which hears the history for the first time."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from segue.answers.outputs import CompletionOutput, Delta
from segue.contract.reports import FinishReason
from segue.errors import EngineDead, RequestFailed, UsageError
from segue.host.loop import EngineLoop
from segue.host.stepping import SharedSteps
from segue.session.blocking import BlockingAnswer, BlockingSession, open_session
from segue.session.link import Line, Link
from segue.session.live import Answer, Session, SessionManager
from segue.session.state import Phase
from tests.session.worlds import MAX_MODEL_LEN, TOKENIZER, World, random_params, random_text
from tests.sim.oracle import Failure

NUM_OPERATIONS = 60

AnySession = Session | BlockingSession
AnyAnswer = Answer | BlockingAnswer


@dataclass
class Mirror:
    """What is known of a session without looking at it."""

    session: AnySession
    text: str = ""
    phase: Phase = Phase.OPEN
    history: list[str] = field(default_factory=list)
    """Texts of the turns and answers that are over, oldest first."""
    kept_ids: list[int] = field(default_factory=list)
    answer: AnyAnswer | None = None
    read: list[Delta] = field(default_factory=list)
    fresh: CompletionOutput | None = None
    """What the answer must become."""


class Play(ABC):
    """One seed's operations on some sessions of one engine."""

    def __init__(self, seed: int, *, is_chat: bool, faults: bool) -> None:
        self.rng = Random(f"{seed}/{is_chat}/{faults}")
        self.world = World(self.rng)
        self.messages = [{"role": "system", "content": "ab"}] if is_chat else None
        self.is_chat = is_chat
        self.faults = faults
        self.mirrors: list[Mirror] = []
        self.num_answers = 0

    async def run(self) -> None:
        operations = (
            *(self.append, self.append, self.revise, self.commit, self.reopen, self.respond, self.respond),
            *(self.read, self.read, self.read, self.interrupt, self.fork),
        )
        async with self.sessions() as session:
            self.mirrors.append(Mirror(session))
            for _ in range(NUM_OPERATIONS):
                mirror = self.rng.choice(self.mirrors)
                if self.faults:
                    self.arm()
                try:
                    await self.rng.choice(operations)(mirror)
                except (EngineDead, RequestFailed):
                    assert self.faults
                    await self.drop_broken_answer(mirror)
                self.disarm()
                for each in self.mirrors:
                    await self.check(each)
            await self.calm_down()
            for mirror in self.mirrors:
                await self.recover(mirror)
                mirror.session.close()
        assert not self.world.engine.requests
        assert self.world.engine.pool.num_free == self.world.config.num_kv_blocks

    @abstractmethod
    def sessions(self) -> Any:
        """A context with the first session; at its end, the engine has done all that it was told."""

    @abstractmethod
    async def next_delta(self, answer: Any) -> Delta:
        """Raises StopAsyncIteration at the end."""

    @abstractmethod
    async def held(self, line: Line) -> list[int]:
        """What the engine holds of a request."""

    @abstractmethod
    def arm(self) -> None:
        """Something may go wrong in the next operation."""

    @abstractmethod
    def disarm(self) -> None: ...

    @abstractmethod
    async def calm_down(self) -> None:
        """Nothing goes wrong any more."""

    # --- operations -------------------------------------------------------------------------------------------

    async def append(self, mirror: Mirror) -> None:
        more = random_text(self.rng)
        try:
            mirror.session.append(more)
        except UsageError:
            return
        assert mirror.phase is Phase.OPEN
        mirror.text += more

    async def revise(self, mirror: Mirror) -> None:
        kept = mirror.text[: self.rng.randrange(len(mirror.text) + 1)]
        text = self.rng.choice(("", kept, kept + random_text(self.rng)))
        try:
            mirror.session.revise(text)
        except UsageError:
            assert text or mirror.phase is not Phase.OPEN, "no text at all can always be had"
            return
        assert mirror.phase is Phase.OPEN
        mirror.text = text

    async def commit(self, mirror: Mirror) -> None:
        try:
            mirror.session.commit()
        except UsageError:
            return
        mirror.phase = Phase.COMMITTED

    async def reopen(self, mirror: Mirror) -> None:
        try:
            mirror.session.reopen()
        except UsageError:
            return
        mirror.phase = Phase.OPEN

    async def respond(self, mirror: Mirror) -> None:
        params = random_params(self.rng)
        try:
            mirror.answer = mirror.session.respond(params)
        except UsageError:
            return
        mirror.phase, mirror.read = Phase.ANSWERING, []
        mirror.fresh = self.world.fresh_answer(mirror.session.token_ids, params)

    async def read(self, mirror: Mirror) -> None:
        if mirror.answer is None:
            return
        for _ in range(self.rng.choice((1, 2, 5))):
            try:
                mirror.read.append(await self.next_delta(mirror.answer))
            except StopAsyncIteration:
                raise AssertionError("it ended without its last delta") from None
            if mirror.read[-1].finish_reason is not None:
                await self.finish(mirror)
                return

    async def finish(self, mirror: Mirror) -> None:
        """The answer came to its end by itself."""
        answer, fresh = mirror.answer, mirror.fresh
        assert answer is not None
        assert fresh is not None
        whole = answer.so_far.delivered()
        assert (whole.text, whole.token_ids, whole.logprobs, whole.cumulative_logprob) == (
            (fresh.text, fresh.token_ids, fresh.logprobs, fresh.cumulative_logprob)
        )
        assert (whole.finish_reason, whole.stop_reason) == (fresh.finish_reason, fresh.stop_reason)
        await self.check_over(answer)
        self.num_answers += 1
        await self.over(mirror)

    async def over(self, mirror: Mirror) -> None:
        """What was delivered of the answer is history."""
        mirror.history += [mirror.text, "".join(delta.text for delta in mirror.read)]
        mirror.text, mirror.phase, mirror.answer = "", Phase.OPEN, None

    async def interrupt(self, mirror: Mirror) -> None:
        output = mirror.session.interrupt()
        assert (output is None) == (mirror.answer is None)
        if output is not None:
            assert output.finish_reason is FinishReason.ABORT
            assert output.text == "".join(delta.text for delta in mirror.read)
            await self.over(mirror)

    async def fork(self, mirror: Mirror) -> None:
        if len(self.mirrors) > 3:
            return
        fork = Mirror(
            mirror.session.fork(),
            mirror.text,
            mirror.phase,
            list(mirror.history),
            read=list(mirror.read),
        )
        if mirror.answer is not None:
            await self.over(fork)
        self.mirrors.append(fork)

    async def drop_broken_answer(self, mirror: Mirror) -> None:
        """A fault may have ended an answer: then what was read of it is history."""
        if mirror.answer is not None and not mirror.session.is_answering:
            await self.check_over(mirror.answer)
            await self.over(mirror)

    # --- what must be true ------------------------------------------------------------------------------------

    async def check(self, mirror: Mirror) -> None:
        session = mirror.session
        assert session.text == mirror.text
        assert session._state.phase is mirror.phase
        await self.check_text(mirror)
        if not self.faults:
            await self.check_engine(mirror)
        assert not self.world.executor.violations, self.world.executor.violations

    async def check_engine(self, mirror: Mirror) -> None:
        """What was told without a fault is there."""
        link: Link[Any] | None = mirror.session._link
        if link is not None and link.is_usable and mirror.answer is None:
            assert await self.held(link.line) == mirror.session.token_ids[:MAX_MODEL_LEN]

    async def check_text(self, mirror: Mirror) -> None:
        """The ids say the texts; those of the turn change with it, those of the history never."""
        kept = mirror.session._state.kept
        assert kept[: len(mirror.kept_ids)] == mirror.kept_ids
        mirror.kept_ids = list(kept)
        if not self.is_chat and not any("\ufffd" in text or "<|" in text for text in mirror.history):
            assert TOKENIZER.decode(kept, skip_special_tokens=True) == "".join(mirror.history)

    async def recover(self, mirror: Mirror) -> None:
        """Nothing is in the way of a last answer."""
        session = mirror.session
        if session.interrupt() is not None:
            await self.over(mirror)
        if session._state.phase is Phase.COMMITTED:
            session.reopen()
        session.revise("")
        try:
            session.append("hi")
            answer = session.respond(random_params(self.rng))
        except UsageError:
            assert len(session.token_ids) > self.world.config.max_model_len - 40, "the history takes it all"
            return
        fresh = self.world.fresh_answer(session.token_ids, answer.so_far.params)
        mirror.answer, mirror.read, mirror.fresh = answer, [], fresh
        while mirror.answer is not None:
            await self.read(mirror)

    async def check_over(self, answer: AnyAnswer) -> None:
        with pytest.raises(StopAsyncIteration):
            await self.next_delta(answer)


class BlockingPlay(Play):
    """On an engine of this thread; every call of it may fail."""

    @asynccontextmanager
    async def sessions(self) -> AsyncIterator[BlockingSession]:
        steps = SharedSteps(self.world.engine)
        yield open_session(steps, TOKENIZER, self.messages, "user", "s")
        while self.world.engine.has_unfinished_requests():
            steps.step()

    async def next_delta(self, answer: BlockingAnswer) -> Delta:
        for delta in answer:
            return delta
        raise StopAsyncIteration

    async def held(self, line: Line) -> list[int]:
        return self.world.held(line.request_id)

    def arm(self) -> None:
        if self.rng.random() < 0.08:
            self.world.engine.dies_in = self.rng.randrange(3)
            self.world.engine.dies_after = self.rng.random() < 0.5
        elif self.rng.random() < 0.05:
            self.world.executor.fail_next = Failure.BEFORE_COPIES

    def disarm(self) -> None:
        self.world.engine.dies_in = None
        self.world.executor.fail_next = None

    async def calm_down(self) -> None:
        self.disarm()


class LoopPlay(Play):
    """On an engine with a thread of its own; steps may fail at any time, whatever is said meanwhile."""

    @asynccontextmanager
    async def sessions(self) -> AsyncIterator[Session]:
        self.loop = EngineLoop(self.world.engine)
        try:
            yield SessionManager(self.loop, TOKENIZER).open(self.messages)
            await self.settle()
        finally:
            self.loop.close()

    async def settle(self) -> None:
        await asyncio.wrap_future(self.loop.call(lambda client: None))

    async def next_delta(self, answer: Answer) -> Delta:
        return await anext(answer)

    async def held(self, line: Line) -> list[int]:
        return await asyncio.wrap_future(self.loop.call(lambda client: self.world.held(line.request_id)))

    def arm(self) -> None:
        if self.rng.random() < 0.1:
            self.world.executor.fail_next = Failure.BEFORE_COPIES

    def disarm(self) -> None:
        """A step that was to fail may still come."""

    async def calm_down(self) -> None:
        self.world.executor.fail_next = None
        await self.settle()

    async def check(self, mirror: Mirror) -> None:
        await super().check(mirror)
        if self.rng.random() < 0.5:
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_chat", [False, True], ids=["raw", "chat"])
@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
@pytest.mark.parametrize("kind", [BlockingPlay, LoopPlay], ids=["blocking", "loop"])
def test_random_operations(kind: type[Play], is_chat: bool, faults: bool) -> None:
    num_answers = 0
    for seed in range(40):
        play = kind(seed, is_chat=is_chat, faults=faults)
        try:
            asyncio.run(play.run())
        except Exception as error:
            error.add_note(f"{kind.__name__}({seed}, {is_chat=}, {faults=})")
            raise
        num_answers += play.num_answers
    assert num_answers > 50
