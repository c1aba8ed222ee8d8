"""Random operations on a conversation. After each, its live session asks the model just what a session would ask that
is told the conversation for the first time, and the next answer is the same."""

from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from segue import AsyncLLM, SamplingParams
from segue.answers.outputs import CompletionOutput
from segue.errors import SegueError, UsageError
from segue.server.realtime.conversation import ConversationItem, ConversationState, Role
from segue.server.realtime.live_conversation import GivenAnswer, LiveConversation
from segue.session.state import Phase
from tests.server.realtime_client import run

MAX_MODEL_LEN = 192
NUM_OPERATIONS = 120
ROLES: list[Role] = ["user", "user", "system", "assistant"]
WORDS = ["the hen ", "é", "an inn", " in", "\n", "👩"]


class Play:
    """One seed's operations on one conversation."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self.llm = llm
        self.rng = Random(seed)
        self.conversation = LiveConversation(llm, ConversationState(now=datetime(2026, 1, 2)))
        self.given: GivenAnswer | None = None
        self.fresh: CompletionOutput | None = None
        """What the answer must become."""
        self.num_answers = 0
        self.num_refused = 0

    async def run(self) -> None:
        operations = (
            *(self.insert, self.insert, self.delete, self.set_instructions, self.lose),
            *(self.append, self.append, self.revise, self.clear, self.commit, self.commit),
            *(
                self.respond,
                self.respond,
                self.respond,
                self.respond_apart,
                self.read,
                self.read,
                self.interrupt,
            ),
        )
        for _ in range(NUM_OPERATIONS):
            before, was_answering = self.conversation.state, self.given is not None
            operation = self.rng.choice(operations)
            try:
                await operation()
            except UsageError:
                self.num_refused += 1
                has_ended = was_answering and self.given is None
                assert has_ended or self.conversation.state is before or operation == self.respond
            else:
                if self.conversation.state is not before:
                    self.check_known()
            if self.rng.random() < 0.7:  # which also tells what a refused operation left untold
                self.check()
        await self.recover()
        self.conversation.close()
        assert not self.llm.sessions._sessions

    # --- operations -------------------------------------------------------------------------------------------

    def text(self) -> str:
        count = self.rng.choice((0, 1, 2, 4)) if self.rng.random() < 0.95 else 80
        return "".join(self.rng.choice(WORDS) for _ in range(count))

    async def insert(self) -> None:
        length = len(self.conversation.state.items)
        index = length if self.rng.random() < 0.6 else self.rng.randrange(length + 1)
        self.conversation.insert(index, ConversationItem.new(self.rng.choice(ROLES), f"a{self.text()}"))

    async def delete(self) -> None:
        length = len(self.conversation.state.items)
        if length:
            self.conversation.delete(length - 1 if self.rng.random() < 0.5 else self.rng.randrange(length))

    async def set_instructions(self) -> None:
        self.conversation.set_instructions(self.text())

    async def lose(self) -> None:
        """As when it was idle for too long."""
        if self.given is None and self.conversation.session is not None:
            self.conversation.session.end("the session timed out")

    async def append(self) -> None:
        self.conversation.revise(self.conversation.state.input_text + self.text())

    async def revise(self) -> None:
        self.conversation.revise(self.text())

    async def clear(self) -> None:
        self.conversation.clear()

    async def commit(self) -> None:
        self.conversation.commit()

    async def respond(self) -> None:
        conversation = self.conversation
        if conversation.state.input_text and not conversation.is_answering:
            conversation.commit()
        params = self.params()
        self.given = conversation.respond(params)
        self.fresh = await self.fresh_answer(params)

    async def respond_apart(self) -> None:
        messages = [item.message for item in self.conversation.state.items[-1:]]
        becomes_item = self.rng.random() < 0.5
        self.given = self.conversation.respond_apart(messages, self.params(), becomes_item=becomes_item)
        self.fresh = None

    async def read(self) -> None:
        if self.given is None:
            return
        for _ in range(self.rng.choice((1, 3, 30, 30))):
            try:
                await anext(self.given.answer)
            except StopAsyncIteration:
                output = self.given.answer.delivered()
                if self.fresh is not None:
                    assert (output.token_ids, output.text) == (self.fresh.token_ids, self.fresh.text)
                    self.num_answers += 1
                await self.finish()
                return

    async def interrupt(self) -> None:
        if self.given is not None:
            self.conversation.interrupt()
            await self.finish()

    async def finish(self) -> None:
        assert self.given is not None
        given, self.given = self.given, None
        text = given.answer.delivered().text
        self.conversation.answered(ConversationItem.new("assistant", text))
        assert given.is_apart or self.conversation.session is given.session, "what is computed stays"

    async def recover(self) -> None:
        """Nothing is in the way of a last answer."""
        self.conversation.clear()
        await self.interrupt()
        self.conversation.set_instructions("")
        while self.conversation.state.items:
            self.conversation.delete(0)
            self.check()
        self.conversation.insert(0, ConversationItem.new("user", "the hen"))
        await self.respond()
        while self.given is not None:
            await self.read()
        self.check()

    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.rng.choice((1, 5, 20)), ignore_eos=True)

    async def fresh_answer(self, params: SamplingParams) -> CompletionOutput:
        fresh = LiveConversation(self.llm, self.conversation.state)
        answer = fresh.respond(params).answer
        await answer.text()
        fresh.close()
        return answer.delivered()

    # --- what must be true ------------------------------------------------------------------------------------

    def check_known(self) -> None:
        """What was carried out was told, and nothing else."""
        live, state = self.conversation._live, self.conversation.state
        if live is None or self.given is not None or live.session.closed.is_set():
            return
        is_complete = live.session._state.phase is Phase.COMMITTED
        assert (live.known.text, live.known.is_complete) == (live.session.text, is_complete)
        assert live.known == state.to_know

    def check(self) -> None:
        if self.given is not None:
            return
        fresh = LiveConversation(self.llm, self.conversation.state)
        assert question(self.conversation) == question(fresh)
        fresh.close()


def question(conversation: LiveConversation) -> tuple[list[int], str, Phase] | str:
    """What the model is asked if the turn ends here; or why it cannot be."""
    try:
        state = conversation._reconcile(conversation.state)._state
    except SegueError as error:
        return str(error)
    return state.kept + state.turn.closed_ids(state.text), state.text, state.phase


@pytest.mark.parametrize("seed", range(8))
def test_a_live_session_knows_what_a_fresh_one_is_told(long_path: Path, seed: int) -> None:
    async def test() -> None:
        async with AsyncLLM(long_path, max_model_len=MAX_MODEL_LEN) as llm:
            play = Play(llm, seed)
            await play.run()
            assert play.num_answers > 0
            assert play.num_refused > 0

    run(test())


def test_what_was_refused_is_not_taken_for_what_comes_next(long_path: Path) -> None:
    """The live session knows as many items as it is to know, and others."""

    async def test() -> None:
        async with AsyncLLM(long_path, max_model_len=MAX_MODEL_LEN) as llm:
            conversation = LiveConversation(llm, ConversationState(now=datetime(2026, 1, 2)))
            conversation.insert(0, ConversationItem.new("user", "the hen"))
            with pytest.raises(UsageError):
                conversation.insert(1, ConversationItem.new("user", "in the rain" * MAX_MODEL_LEN))
            conversation.insert(0, ConversationItem.new("user", "an inn"))
            fresh = LiveConversation(llm, conversation.state)
            assert question(conversation) == question(fresh)
            assert [item.text for item in conversation.state.items] == ["an inn", "the hen"]

    run(test())
