"""What a session tells its engine, without an engine."""

import random
from collections.abc import Callable, Sequence
from datetime import datetime

import pytest

from segue.answers.outputs import CompletionOutput
from segue.contract.reports import EngineOutput, FinishReason
from segue.errors import CapacityError, ParameterError, SessionClosed, SessionError
from segue.sample.params import SamplingParams
from segue.session.answer import AnswerSoFar
from segue.session.link import Link
from segue.session.state import Phase, SessionState
from segue.session.turns import ChatTurn, RawTurn, TurnText
from segue.tokens import Tokenizer
from segue.tokens.chat import encode_chat
from segue.weights.gguf import load_gguf
from tests.session.texts import TEXTS

NOW = datetime(2026, 12, 2, 9, 30)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: object) -> Tokenizer:
    return Tokenizer.from_model(load_gguf(str(smollm2_path)))


class History:
    """A session's text, and an engine's side of it that counts what it would compute."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self.request_id = "r"
        self.is_open = True
        self.ids: list[int] = []
        self.num_added = 0
        self.params: SamplingParams | None = None
        self.link = Link(self._connect, [])

    def carry_out(self, state: SessionState, answer: AnswerSoFar | None = None) -> None:
        self.link.tell(state.token_ids, answer)
        self.state = state
        assert self.ids == state.token_ids

    def say(self, token_ids: Sequence[int]) -> None:
        """What the model answers."""
        self.ids += token_ids
        self.link.receive(EngineOutput(request_id="r", token_ids=token_ids))

    def truncate(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.ids)
        del self.ids[num_tokens:]
        if self.params is not None:
            self.params = None
            self.link.receive(EngineOutput(request_id="r", finish_reason=FinishReason.ABORT))

    def add_chunk(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> None:
        self.ids += token_ids
        self.num_added += len(token_ids)
        self.params = params

    def abort(self) -> None:
        self.is_open = False

    def _connect(self, handler: object) -> "History":
        return self


def history(turn: TurnText, max_model_len: int = 4096) -> History:
    return History(SessionState(turn=turn, max_model_len=max_model_len))


def split(text: str, rng: random.Random) -> list[bytes]:
    """The UTF-8 bytes of a text, cut at random places, also within characters."""
    data = text.encode()
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(0, 12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("name", TEXTS)
def test_split_input_gives_the_ids_of_the_whole_text(tokenizer: Tokenizer, name: str) -> None:
    rng = random.Random(name)
    text = TEXTS[name]
    messages = [{"role": "system", "content": "Be brief."}]
    for _ in range(30):
        raw, chat = history(RawTurn(tokenizer)), history(ChatTurn(tokenizer, messages, "user", NOW))
        for piece in split(text, rng):
            raw.carry_out(raw.state.append(piece))
            chat.carry_out(chat.state.append(piece))
        raw.carry_out(raw.state.commit())
        chat.carry_out(chat.state.commit())
        assert raw.ids == tokenizer.encode(text)
        assert chat.ids == encode_chat(tokenizer, [*messages, {"role": "user", "content": text}], now=NOW)


def test_a_long_text_is_not_encoded_again_and_again(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    words = [word for text in TEXTS.values() for word in text.split(" ")]
    text = " ".join(rng.choice(words) for _ in range(3000))
    raw = history(RawTurn(tokenizer), max_model_len=1 << 20)
    for start in range(0, len(text), 40):
        raw.carry_out(raw.state.append(text[start : start + 40]))
    raw.carry_out(raw.state.commit())
    assert raw.ids == tokenizer.encode(text)
    assert raw.num_added < 1.3 * len(raw.ids)


def test_revise_sends_only_what_differs(tokenizer: Tokenizer) -> None:
    chat = history(ChatTurn(tokenizer, [], "user", NOW))
    chat.carry_out(chat.state.append("Please book a table for two people on Tuesday at seven o'clock"))
    before = chat.num_added
    chat.carry_out(chat.state.revise("Please book a table for two people on Thursday at eight o'clock"))
    changed = tokenizer.encode(" Thursday at eight o'clock")
    assert chat.num_added - before == len(changed)
    before = chat.num_added
    chat.carry_out(chat.state.revise(chat.state.text))
    assert chat.num_added == before
    chat.carry_out(chat.state.revise(""))
    chat.carry_out(chat.state.append("Please"))
    assert chat.num_added - before == 1, "the head of the turn stayed"


def answer(tokenizer: Tokenizer, text: str, reason: FinishReason = FinishReason.LENGTH) -> CompletionOutput:
    ids = tokenizer.encode(text)
    if reason is FinishReason.STOP:
        ids.append(2)
    return CompletionOutput(index=0, text=text, token_ids=ids, finish_reason=reason)


def test_a_conversation_keeps_what_was_delivered(tokenizer: Tokenizer) -> None:
    chat = history(ChatTurn(tokenizer, [{"role": "system", "content": "S"}], "user", NOW))
    messages = [{"role": "system", "content": "S"}]
    for turn, reason in enumerate((FinishReason.STOP, FinishReason.ABORT, FinishReason.LENGTH)):
        chat.carry_out(chat.state.append(f"Question {turn}?"))
        chat.carry_out(
            chat.state.respond(SamplingParams()),
            AnswerSoFar("a", tokenizer, SamplingParams(), lambda: None),
        )
        assert chat.params is not None
        messages.append({"role": "user", "content": f"Question {turn}?"})
        assert chat.ids == encode_chat(tokenizer, messages, now=NOW)
        chat.say([*tokenizer.encode(f" Answer {turn}"), 2, 17, 18])  # more than was delivered
        before = chat.num_added
        chat.carry_out(chat.state.answered(answer(tokenizer, f" Answer {turn}", reason)))
        assert chat.num_added == before, "its ids were there"
        messages.append({"role": "assistant", "content": f" Answer {turn}"})
        assert tokenizer.decode(chat.ids, skip_special_tokens=False).endswith(f"assistant\n Answer {turn}")


def test_phases(tokenizer: Tokenizer) -> None:
    state = SessionState(turn=ChatTurn(tokenizer, [], "user", NOW), max_model_len=4096)
    committed = state.append("Hi").commit()
    refused: list[Callable[[], object]] = [
        lambda: committed.append("x"),
        lambda: committed.revise("x"),
        committed.commit,
    ]
    for operation in refused:
        with pytest.raises(SessionError, match="committed"):
            operation()
    answering = committed.reopen().append(" there").respond(SamplingParams())
    for operation in (lambda: answering.append("x"), lambda: answering.respond(SamplingParams())):
        with pytest.raises(SessionError, match="answering"):
            operation()
    assert answering.phase is Phase.ANSWERING
    closed = answering.closed("the session timed out")
    with pytest.raises(SessionClosed, match="timed out"):
        closed.append("x")


def test_bad_input_is_refused(tokenizer: Tokenizer) -> None:
    state = SessionState(turn=RawTurn(tokenizer), max_model_len=12)
    with pytest.raises(SessionError, match="nothing to answer"):
        state.respond(SamplingParams())
    with pytest.raises(SessionError, match="no roles"):
        state.with_role("tool")
    state = state.append("one two three")
    with pytest.raises(CapacityError, match="max_model_len=12"):
        state.append(" four five six seven eight nine ten eleven twelve thirteen")
    with pytest.raises(ParameterError, match="UTF-8"):
        state.append(b"\xff")
    with pytest.raises(ParameterError, match="surrogate"):
        state.append("\ud800")
    with pytest.raises(ParameterError, match="one answer"):
        state.respond(SamplingParams(n=2))
    state = state.append(" é".encode()[:-1])
    with pytest.raises(ParameterError, match="within a UTF-8 character"):
        state.commit()
    with pytest.raises(ParameterError, match="within a UTF-8 character"):
        state.append("x")
    state = state.append(" é".encode()[-1:]).commit()
    assert state.token_ids == tokenizer.encode("one two three é")


@pytest.mark.parametrize("is_chat", [False, True])
def test_input_leaves_room_for_an_answer(tokenizer: Tokenizer, is_chat: bool) -> None:
    """What is taken can be committed and answered; what is refused is refused at once."""
    max_model_len = 48
    turn = ChatTurn(tokenizer, [], "user", NOW) if is_chat else RawTurn(tokenizer)
    state = SessionState(turn=turn, max_model_len=max_model_len)
    while len(state.token_ids) + turn.num_closing_ids(" one") < max_model_len - 1:
        state = state.append(" one")
    with pytest.raises(CapacityError, match=f"max_model_len={max_model_len}"):
        state.append(" one")
    assert len(state.respond(SamplingParams()).token_ids) == max_model_len - 1
    assert state.revise("").append(" one").commit().token_ids


def test_a_history_without_room_can_still_be_cleared(tokenizer: Tokenizer) -> None:
    state = SessionState(turn=ChatTurn(tokenizer, [], "user", NOW), max_model_len=64)
    state = state.append("Go").respond(SamplingParams())
    filling = tokenizer.encode(" one") * (64 - len(state.token_ids))
    state = state.answered(
        CompletionOutput(
            index=0, text=tokenizer.decode(filling), token_ids=filling, finish_reason=FinishReason.LENGTH
        )
    )
    assert len(state.token_ids) == 64
    with pytest.raises(CapacityError):
        state.append("x")
    assert state.revise("").token_ids == state.token_ids
