"""What goes wrong between a session and its engine leaves the session as it was, or as it says."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from segue.answers.outputs import CompletionOutput
from segue.answers.prompts import EncodedPrompt
from segue.contract.reports import FinishReason
from segue.contract.step import Sampling
from segue.errors import CapacityError, EngineDead, ParameterError, RequestFailed, SessionClosed
from segue.host.loop import EngineLoop
from segue.host.stepping import SharedSteps
from segue.llm.llm import LLM, _Batch
from segue.sample.params import SamplingParams
from segue.session.answer import AnswerSoFar
from segue.session.blocking import open_session
from segue.session.core import LiveSession
from segue.session.link import Link
from segue.session.live import Answer, Session, SessionManager
from segue.session.state import SessionState
from segue.session.turns import RawTurn, delivered_ids
from tests.session.worlds import MAX_MODEL_LEN, TOKENIZER, TalkingModel, World
from tests.sim.oracle import Failure
from tests.tokens.small import TOKENS

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)


def ids(*texts: str) -> list[int]:
    """One token for each text."""
    return [token for text in texts for token in TOKENIZER.encode(text)]


def cut(text: str, token_ids: list[int], **params: object) -> list[int]:
    answer = CompletionOutput(index=0, text=text, token_ids=token_ids, finish_reason=FinishReason.ABORT)
    return delivered_ids(TOKENIZER, answer, SamplingParams(**params))  # type: ignore[arg-type]


def test_the_ids_of_a_delivered_text() -> None:
    assert cut("hi", ids("hi", "stop")) == ids("hi")
    assert cut("hist", ids("hi", "stop")) == ids("hi", "st"), "within a token: the rest is encoded anew"
    assert cut("hié", ids("hi", "é")) == ids("hi", "é")
    first = TOKENIZER.encode("👩")[0]
    assert cut("hi", [*ids("hi"), first]) == ids("hi"), "the begin of a character was not delivered"
    assert cut("hi\ufffd", [*ids("hi"), first]) == [*ids("hi"), first], "it was, as U+FFFD"
    assert cut("\ufffd\ufffda", [first, first, *ids("abc")]) == ids("\ufffd\ufffda")
    assert cut("hi", [*ids("hi"), 2, *ids("stop")]) == [*ids("hi"), 2], "special tokens have no text"
    assert cut("", ids("hi")) == []


def test_a_stop_string_is_not_history(smollm2_llm: LLM) -> None:
    """Neither in the text nor in the ids, in plain text and in a chat."""
    tokenizer = smollm2_llm.get_tokenizer()
    for messages in (None, [{"role": "system", "content": "Count on: one, two, three, four, five, six"}]):
        with smollm2_llm.session(messages) as session:
            session.append("Count: one, two,")
            whole = session.fork().respond(GREEDY).text()
            stop = whole[len(whole) // 2 :][:6]
            session.commit()
            prompt = session.token_ids
            text = session.respond(SamplingParams(temperature=0, stop=stop)).text()
            assert text == whole[: whole.index(stop)]
            assert tokenizer.decode(session.token_ids[len(prompt) :]) == text
            session.append(" And so on,")
            session.commit()
            plain = smollm2_llm.generate(session.token_ids, GREEDY, use_tqdm=False)[0].outputs[0]
            answer = session.respond(GREEDY)
            assert answer.text() == plain.text
            assert answer.read().logprobs == plain.logprobs
            assert answer.read().cumulative_logprob == plain.cumulative_logprob


def test_text_held_back_for_a_stop_string_is_not_history_when_interrupted(smollm2_llm: LLM) -> None:
    with smollm2_llm.session() as session:
        session.append("Count: one, two,")
        session.commit()
        before = session.token_ids
        first = session.fork().respond(GREEDY).text()
        answer = session.respond(SamplingParams(temperature=0, stop=first[:40] + "#"))
        deltas = [next(answer), next(answer)]
        assert [delta.text for delta in deltas] == ["", ""]
        output = session.interrupt()
        assert output is not None
        assert output.text == ""
        assert session.token_ids == before


@pytest.mark.parametrize("is_chat", [False, True])
def test_an_answer_at_the_very_limit(is_chat: bool) -> None:
    """`respond` is carried out or refused; either way the engine has what the session says."""
    world = World(Random(1))
    steps = SharedSteps(world.engine)
    session = open_session(steps, TOKENIZER, [] if is_chat else None, "user", "s")
    while True:
        try:
            session.append("a")
        except CapacityError:
            break
    assert session._link is not None
    assert world.held(session._link.line.request_id) == session.token_ids
    assert len(session.respond(GREEDY).read().token_ids) == 0
    assert len(session.token_ids) == MAX_MODEL_LEN - 1
    session.interrupt()
    assert world.held(session._link.line.request_id) == session.token_ids


def test_forking_leaves_the_answer_alone(smollm2_llm: LLM) -> None:
    with smollm2_llm.session() as session:
        session.append("Once upon a time")
        plain = session.fork().respond(GREEDY).text()
        answer = session.respond(GREEDY)
        text = "".join(next(answer).text for _ in range(5))
        fork = session.fork()
        assert fork.respond(GREEDY).text()[: len(plain) - len(text)] == plain[len(text) :]
        assert text + "".join(delta.text for delta in answer) == plain
        assert not session.is_answering
        session.close()
        with pytest.raises(SessionClosed, match="fork: the session is closed"):
            session.fork()


def test_a_stream_and_a_session_at_once(smollm2_llm: LLM) -> None:
    """Whoever steps the engine, everybody gets what is theirs."""
    (plain,) = smollm2_llm.generate("The sea", GREEDY, use_tqdm=False)
    with smollm2_llm.session() as session:
        session.append("Once upon a time")
        alone = session.fork().respond(GREEDY).text()
        stream = smollm2_llm.stream("The sea", GREEDY)
        first = next(stream)
        session.append(" there")
        session.revise("Once upon a time")
        answer = session.respond(GREEDY)
        text = next(answer).text
        (again,) = smollm2_llm.generate("The sea", GREEDY, use_tqdm=False)
        assert again.outputs[0].logprobs == plain.outputs[0].logprobs
        assert text + "".join(delta.text for delta in answer) == alone
        assert first.text + "".join(delta.text for delta in stream) == plain.outputs[0].text
        assert stream.output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_blocking_answer_ends_with_its_error() -> None:
    world = World(Random(2))
    session = open_session(SharedSteps(world.engine), TOKENIZER, None, "user", "s")
    session.append("hi stop")
    expected = world.fresh_answer(session.token_ids, GREEDY)
    for error in (RequestFailed, EngineDead):
        answer = session.fork().respond(GREEDY)
        next(answer)
        if error is RequestFailed:
            world.executor.fail_next = Failure.BEFORE_COPIES
        else:
            world.engine.dies_in = 0
        with pytest.raises(error, match="injected"):
            list(answer)
        assert list(answer) == []
    assert session.respond(GREEDY).text() == expected.text


def test_an_append_between_the_end_of_a_request_and_the_notice_of_it() -> None:
    """The text is there once, and the session goes on with another request."""
    world = World(Random(3))

    async def run() -> None:
        loop = EngineLoop(world.engine)
        try:
            session = SessionManager(loop, TOKENIZER).open()
            session.append("hi")
            assert session._link is not None
            channel = session._link.line
            await asyncio.wrap_future(loop.ask_snapshot())
            world.executor.fail_next = Failure.BEFORE_COPIES
            session.append("stop")
            while channel.is_open:  # the event loop does not run, so the notice does not come
                pass
            session.append("!")
            assert session.text == "histop!"
            assert session._link.line is not channel
            expected = world.fresh_answer(session.token_ids, GREEDY)
            answer = session.respond(GREEDY)
            assert await answer.text() == expected.text
            assert answer.delivered().cumulative_logprob == expected.cumulative_logprob
        finally:
            loop.close()

    asyncio.run(run())


class _Line:
    """A request that ends just before something is added to it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.request_id = "r"
        self.is_open = True
        self.held = list(token_ids)
        self.ends_next = False

    def truncate(self, num_tokens: int) -> None:
        del self.held[num_tokens:]

    def add_chunk(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        if self.ends_next:
            self.is_open = False
            raise ParameterError("request_id", "r", "is no request with open input")
        self.held += token_ids

    def abort(self) -> None:
        self.is_open = False


class _LineSession(LiveSession[Answer, _Line]):
    @property
    def _vocab_size(self) -> int:
        return len(TOKENS)

    def _new_answer(self, params: SamplingParams) -> Answer:
        raise AssertionError

    def _open(self, token_ids: Sequence[int], answer: AnswerSoFar | None) -> Link[_Line]:
        return Link(lambda handler: _Line(token_ids), token_ids)


def test_a_request_that_ends_in_the_middle_of_an_operation() -> None:
    session = _LineSession("s", SessionState(turn=RawTurn(TOKENIZER), max_model_len=MAX_MODEL_LEN))
    session.append("hi stop")
    link = session._link
    assert link is not None
    link.line.ends_next = True
    session.revise("hi there")
    assert session._link is not None
    assert session._link.line.held == session.token_ids == TOKENIZER.encode("hi there")
    assert session._link is not link


def test_progress_says_that_there_will_be_none() -> None:
    world = World(Random(7))

    async def run() -> None:
        loop = EngineLoop(world.engine)
        try:
            session = SessionManager(loop, TOKENIZER).open()
            world.executor.fail_next = Failure.BEFORE_COPIES
            session.append("hi stop")
            with pytest.raises(RequestFailed):
                await computed(session)
            later = session.progress()  # raises when it is awaited, not in what is done meanwhile
            with pytest.raises(RequestFailed):
                await later
            session.append("!")
            await computed(session)
        finally:
            loop.close()

    async def computed(session: Session) -> None:
        while (await session.progress())[1] < len(session.token_ids) - 1:
            await asyncio.sleep(0)

    asyncio.run(run())


def test_a_session_of_a_dead_engine_keeps_what_was_delivered() -> None:
    world = World(Random(4))

    async def run() -> None:
        loop = EngineLoop(world.engine)
        session = SessionManager(loop, TOKENIZER).open()
        session.append("hi")
        await asyncio.wrap_future(loop.ask_snapshot())
        world.engine.dies_in = 9
        answer = session.respond(SamplingParams(temperature=0, ignore_eos=True))
        read = await anext(answer)
        with pytest.raises(EngineDead, match="injected"):
            await answer.text()
        assert not session.is_answering
        before = session.token_ids
        for operation in (lambda: session.append("x"), session.fork, session.commit, session.respond):
            with pytest.raises(EngineDead):
                operation()
        assert (session.text, session.token_ids) == ("", before)
        assert len(read.token_ids) <= len(answer.delivered().token_ids) < 9 * 4
        assert TOKENIZER.decode(session.token_ids) == "hi" + answer.delivered().text
        session.close()

    asyncio.run(run())


@dataclass(frozen=True)
class StrangeModel(TalkingModel):
    """Says an id that is not in the vocabulary when it was told "12"."""

    def draw(
        self,
        prefix: int,
        last: int,
        sampling: Sampling,
        position: int,
        history: Sequence[int],
        mask: bytes | None,
    ) -> int:
        if ids("12")[0] in history[-3:]:
            return len(TOKENS)
        return super().draw(prefix, last, sampling, position, history, mask)


def test_an_answer_that_cannot_be_read_is_nobody_elses_trouble() -> None:
    world = World(Random(5), StrangeModel(vocab_size=len(TOKENS) + 1))
    steps = SharedSteps(world.engine)
    session, strange = (open_session(steps, TOKENIZER, None, "user", name) for name in ("a", "b"))
    session.append("hi")
    strange.append("12")
    expected = world.fresh_answer(session.token_ids, GREEDY)
    answer = session.respond(GREEDY)
    with pytest.raises(RequestFailed, match="could not be read"):
        strange.respond(GREEDY).text()
    assert answer.text() == expected.text
    strange.append("hi hi hi")
    expected = world.fresh_answer(strange.token_ids, GREEDY)
    assert strange.respond(GREEDY).text() == expected.text


def test_a_stream_that_cannot_be_read_is_nobody_elses_trouble() -> None:
    world = World(Random(6), StrangeModel(vocab_size=len(TOKENS) + 1))
    steps = SharedSteps(world.engine)
    batch = _Batch(steps, TOKENIZER)
    batch.add(0, EncodedPrompt(text=None, token_ids=ids("12")), GREEDY, priority=0)
    session = open_session(steps, TOKENIZER, None, "user", "a")
    session.append("hi")
    expected = world.fresh_answer(session.token_ids, GREEDY)
    assert session.respond(GREEDY).text() == expected.text
    with pytest.raises(ParameterError, match="token_id"):
        batch.step()
    batch.close()
    session.close()
    assert not world.engine.requests
