"""Random operations on sessions. After each: the text is what it must be, the engine holds it, and the next answer is
that of an engine which hears the history for the first time."""

from dataclasses import dataclass, field
from random import Random

import pytest

from segue.engine.outputs import FinishReason
from segue.errors import EngineDead, RequestFailed, SegueError, UsageError
from segue.outputs import CompletionOutput, Delta
from segue.session.blocking import BlockingAnswer, BlockingSession, open_session
from segue.session.state import Phase
from segue.stepping import SharedSteps
from tests.session.worlds import MAX_MODEL_LEN, TOKENIZER, World, random_params, random_text

NUM_OPERATIONS = 60


@dataclass
class Mirror:
    """What is known of a session without looking at it."""

    session: BlockingSession
    text: str = ""
    phase: Phase = Phase.OPEN
    history: list[str] = field(default_factory=list)
    """Texts of the turns and answers that are over, oldest first."""
    kept_ids: list[int] = field(default_factory=list)
    answer: BlockingAnswer | None = None
    read: list[Delta] = field(default_factory=list)
    fresh: CompletionOutput | None = None
    """What the answer must become."""


class Play:
    """One seed's operations on some sessions of one engine."""

    def __init__(self, seed: int, *, is_chat: bool, faults: bool) -> None:
        self.rng = Random(f"{seed}/{is_chat}/{faults}")
        self.world = World(self.rng)
        self.is_chat = is_chat
        self.faults = faults
        self.steps = SharedSteps(self.world.engine)
        messages = [{"role": "system", "content": "ab"}] if is_chat else None
        self.mirrors = [Mirror(open_session(self.steps, TOKENIZER, messages, "user", "s"))]
        self.num_answers = 0

    def run(self) -> None:
        operations = (
            *(self.append, self.append, self.revise, self.commit, self.reopen, self.respond, self.respond),
            *(self.read, self.read, self.read, self.interrupt, self.fork),
        )
        for _ in range(NUM_OPERATIONS):
            mirror = self.rng.choice(self.mirrors)
            operation = self.rng.choice(operations)
            if self.faults:
                self.arm()
            try:
                operation(mirror)
            except (EngineDead, RequestFailed):
                assert self.faults
                self.drop_broken_answer(mirror)
            self.world.engine.dies_in = None
            self.world.executor.fail_next = False
            for each in self.mirrors:
                self.check(each)
                if not self.faults:
                    self.check_engine(each)
        for mirror in self.mirrors:
            self.recover(mirror)
            mirror.session.close()
        while self.world.engine.has_unfinished_requests():
            self.steps.step()
        assert not self.world.engine.requests
        assert self.world.engine.pool.num_free == self.world.config.num_kv_blocks

    def arm(self) -> None:
        if self.rng.random() < 0.08:
            self.world.engine.dies_in = self.rng.randrange(3)
            self.world.engine.dies_after = self.rng.random() < 0.5
        elif self.rng.random() < 0.05:
            self.world.executor.fail_next = True

    # --- operations -------------------------------------------------------------------------------------------

    def append(self, mirror: Mirror) -> None:
        more = random_text(self.rng)
        try:
            mirror.session.append(more)
        except UsageError:
            return
        assert mirror.phase is Phase.OPEN
        mirror.text += more

    def revise(self, mirror: Mirror) -> None:
        kept = mirror.text[: self.rng.randrange(len(mirror.text) + 1)]
        text = self.rng.choice(("", kept, kept + random_text(self.rng)))
        try:
            mirror.session.revise(text)
        except UsageError:
            assert text or mirror.phase is not Phase.OPEN, "no text at all can always be had"
            return
        assert mirror.phase is Phase.OPEN
        mirror.text = text

    def commit(self, mirror: Mirror) -> None:
        try:
            mirror.session.commit()
        except UsageError:
            return
        mirror.phase = Phase.COMMITTED

    def reopen(self, mirror: Mirror) -> None:
        try:
            mirror.session.reopen()
        except UsageError:
            return
        mirror.phase = Phase.OPEN

    def respond(self, mirror: Mirror) -> None:
        params = random_params(self.rng)
        try:
            mirror.answer = mirror.session.respond(params)
        except UsageError:
            return
        mirror.phase, mirror.read = Phase.ANSWERING, []
        mirror.fresh = self.world.fresh_answer(mirror.session.token_ids, params)

    def read(self, mirror: Mirror) -> None:
        if mirror.answer is None:
            return
        for _ in range(self.rng.choice((1, 2, 5))):
            try:
                mirror.read.append(next(mirror.answer))
            except StopIteration:
                raise AssertionError("it ended without its last delta") from None
            if mirror.read[-1].finish_reason is not None:
                self.finish(mirror)
                return

    def finish(self, mirror: Mirror) -> None:
        """The answer came to its end by itself."""
        answer, fresh = mirror.answer, mirror.fresh
        assert answer is not None
        assert fresh is not None
        whole = answer.read()
        assert (whole.text, whole.token_ids, whole.logprobs, whole.cumulative_logprob) == (
            (fresh.text, fresh.token_ids, fresh.logprobs, fresh.cumulative_logprob)
        )
        assert (whole.finish_reason, whole.stop_reason) == (fresh.finish_reason, fresh.stop_reason)
        assert list(answer) == []
        self.num_answers += 1
        self.over(mirror)

    def over(self, mirror: Mirror) -> None:
        """What was delivered of the answer is history."""
        mirror.history += [mirror.text, "".join(delta.text for delta in mirror.read)]
        mirror.text, mirror.phase, mirror.answer = "", Phase.OPEN, None

    def interrupt(self, mirror: Mirror) -> None:
        output = mirror.session.interrupt()
        assert (output is None) == (mirror.answer is None)
        if output is not None:
            assert output.finish_reason is FinishReason.ABORT
            assert output.text == "".join(delta.text for delta in mirror.read)
            self.over(mirror)

    def fork(self, mirror: Mirror) -> None:
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
            self.over(fork)
        self.mirrors.append(fork)

    def drop_broken_answer(self, mirror: Mirror) -> None:
        """A fault may have ended an answer: then what was read of it is history."""
        if mirror.answer is not None and not mirror.session.is_answering:
            assert list(mirror.answer) == []
            self.over(mirror)

    # --- what must be true ------------------------------------------------------------------------------------

    def check(self, mirror: Mirror) -> None:
        session = mirror.session
        assert session.text == mirror.text
        assert session._state.phase is mirror.phase
        self.check_text(mirror)
        assert not self.world.executor.violations, self.world.executor.violations

    def check_engine(self, mirror: Mirror) -> None:
        """What was told without a fault is there."""
        link = mirror.session._link
        if link is not None and link.is_usable and mirror.answer is None:
            assert self.world.held(link.line.request_id) == mirror.session.token_ids[:MAX_MODEL_LEN]

    def check_text(self, mirror: Mirror) -> None:
        """The ids say the texts; those of the turn change with it, those of the history never."""
        kept = mirror.session._state.kept
        assert kept[: len(mirror.kept_ids)] == mirror.kept_ids
        mirror.kept_ids = list(kept)
        if not self.is_chat and not any("\ufffd" in text or "<|" in text for text in mirror.history):
            assert TOKENIZER.decode(kept, skip_special_tokens=True) == "".join(mirror.history)

    def recover(self, mirror: Mirror) -> None:
        """Nothing is in the way of a last answer."""
        session = mirror.session
        if session.interrupt() is not None:
            self.over(mirror)
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
        assert answer.text() == fresh.text
        assert answer.read().token_ids == fresh.token_ids


@pytest.mark.parametrize("is_chat", [False, True], ids=["raw", "chat"])
@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
def test_random_operations(is_chat: bool, faults: bool) -> None:
    num_answers = 0
    for seed in range(40):
        play = Play(seed, is_chat=is_chat, faults=faults)
        try:
            play.run()
        except SegueError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        except AssertionError as error:
            error.add_note(f"seed {seed}, is_chat={is_chat}, faults={faults}")
            raise
        num_answers += play.num_answers
    assert num_answers > 50
