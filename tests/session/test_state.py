"""What a session tells its engine, without an engine."""

import random
from datetime import datetime

import pytest

from segue.engine.outputs import FinishReason
from segue.errors import CapacityError, ParameterError, SessionClosed, SessionError
from segue.outputs import CompletionOutput
from segue.sample.params import SamplingParams
from segue.session.state import Command, Extend, Phase, SessionState, Truncate
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
    """An engine's side of a session: it carries out commands and counts what it would compute."""

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self.ids: list[int] = []
        self.num_added = 0
        self.params: SamplingParams | None = None

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Truncate(num_tokens):
                    assert num_tokens <= len(self.ids)
                    del self.ids[num_tokens:]
                case Extend(token_ids, params):
                    self.ids += token_ids
                    self.num_added += len(token_ids)
                    self.params = params
        assert self.ids == [*self.state.kept, *self.state.sent]


def open_state(turn: TurnText, max_model_len: int = 4096) -> tuple[SessionState, History]:
    state = SessionState(turn, max_model_len=max_model_len)
    return state, History(state)


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
        raw, raw_history = open_state(RawTurn(tokenizer))
        chat, chat_history = open_state(ChatTurn(tokenizer, messages, "user", NOW))
        for piece in split(text, rng):
            raw_history.carry_out(raw.append(piece))
            chat_history.carry_out(chat.append(piece))
        raw_history.carry_out(raw.commit())
        chat_history.carry_out(chat.commit())
        assert raw_history.ids == tokenizer.encode(text)
        assert chat_history.ids == encode_chat(
            tokenizer, [*messages, {"role": "user", "content": text}], now=NOW
        )


def test_a_long_text_is_not_encoded_again_and_again(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    words = [word for text in TEXTS.values() for word in text.split(" ")]
    text = " ".join(rng.choice(words) for _ in range(3000))
    state, history = open_state(RawTurn(tokenizer), max_model_len=1 << 20)
    for start in range(0, len(text), 40):
        history.carry_out(state.append(text[start : start + 40]))
    history.carry_out(state.commit())
    assert history.ids == tokenizer.encode(text)
    assert history.num_added < 1.3 * len(history.ids)


def test_revise_sends_only_what_differs(tokenizer: Tokenizer) -> None:
    state, history = open_state(ChatTurn(tokenizer, [], "user", NOW))
    history.carry_out(state.append("Please book a table for two people on Tuesday at seven o'clock"))
    before = history.num_added
    history.carry_out(state.revise("Please book a table for two people on Thursday at eight o'clock"))
    changed = tokenizer.encode(" Thursday at eight o'clock")
    assert history.num_added - before == len(changed)
    same_text = state.text
    before = history.num_added
    history.carry_out(state.revise(same_text))
    assert history.num_added == before


def answer(tokenizer: Tokenizer, text: str, reason: FinishReason = FinishReason.LENGTH) -> CompletionOutput:
    ids = tokenizer.encode(text)
    if reason is FinishReason.STOP:
        ids.append(2)
    return CompletionOutput(index=0, text=text, token_ids=ids, finish_reason=reason)


def test_a_conversation_keeps_what_was_delivered(tokenizer: Tokenizer) -> None:
    state, history = open_state(ChatTurn(tokenizer, [{"role": "system", "content": "S"}], "user", NOW))
    messages = [{"role": "system", "content": "S"}]
    for turn, reason in enumerate((FinishReason.STOP, FinishReason.ABORT, FinishReason.LENGTH)):
        history.carry_out(state.append(f"Question {turn}?"))
        history.carry_out(state.respond(SamplingParams()))
        assert history.params is not None
        messages.append({"role": "user", "content": f"Question {turn}?"})
        assert history.ids == encode_chat(tokenizer, messages, now=NOW)
        history.ids += [*tokenizer.encode(f" Answer {turn}"), 2, 17, 18]  # more than was delivered
        history.carry_out(state.answered(answer(tokenizer, f" Answer {turn}", reason)))
        messages.append({"role": "assistant", "content": f" Answer {turn}"})
        assert tokenizer.decode(history.ids, skip_special_tokens=False).endswith(f"assistant\n Answer {turn}")


def test_phases(tokenizer: Tokenizer) -> None:
    state, history = open_state(ChatTurn(tokenizer, [], "user", NOW))
    history.carry_out(state.append("Hi"))
    history.carry_out(state.commit())
    for operation in (lambda: state.append("x"), lambda: state.revise("x"), state.commit):
        with pytest.raises(SessionError, match="committed"):
            operation()
    state.reopen()
    history.carry_out(state.append(" there"))
    history.carry_out(state.respond(SamplingParams()))
    for operation in (lambda: state.append("x"), lambda: state.respond(SamplingParams())):
        with pytest.raises(SessionError, match="answering"):
            operation()
    assert state.phase is Phase.ANSWERING
    state.close("the session timed out")
    with pytest.raises(SessionClosed, match="timed out"):
        state.append("x")


def test_bad_input_changes_nothing(tokenizer: Tokenizer) -> None:
    state, history = open_state(RawTurn(tokenizer), max_model_len=12)
    with pytest.raises(SessionError, match="nothing to answer"):
        state.respond(SamplingParams())
    with pytest.raises(SessionError, match="no roles"):
        state.set_role("tool")
    history.carry_out(state.append("one two three"))
    before = (state.text, list(history.ids))
    with pytest.raises(CapacityError, match="max_model_len=12"):
        state.append(" four five six seven eight nine ten eleven twelve thirteen")
    with pytest.raises(ParameterError, match="UTF-8"):
        state.append(b"\xff")
    with pytest.raises(ParameterError, match="surrogate"):
        state.append("\ud800")
    with pytest.raises(ParameterError, match="one answer"):
        state.respond(SamplingParams(n=2))
    assert (state.text, history.ids) == before
    history.carry_out(state.append(" é".encode()[:-1]))
    with pytest.raises(ParameterError, match="within a UTF-8 character"):
        state.commit()
    history.carry_out(state.append(" é".encode()[-1:]))
    history.carry_out(state.commit())
    assert history.ids == tokenizer.encode("one two three é")
