"""Sessions for scripts."""

import pytest

from segue.contract.reports import FinishReason
from segue.errors import SessionClosed, SessionError
from segue.llm.llm import LLM
from segue.sample.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)


def test_turns_equal_plain_runs_of_the_history(smollm2_llm: LLM) -> None:
    with smollm2_llm.session([{"role": "system", "content": "Be brief."}]) as session:
        for text in ("Name an animal.", "And another one."):
            for word in text.split(" "):
                session.append(word if not session.text else " " + word)
            session.revise(session.text + "!")
            session.commit()
            prompt = session.token_ids
            answer = session.respond(GREEDY)
            entries = [entry for delta in answer for entry in delta.logprobs or ()]
            plain = smollm2_llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
            assert session.token_ids == prompt + plain.token_ids
            assert entries == plain.logprobs
            assert answer.read(None).text == plain.text


def test_interrupt_keeps_what_was_read_and_fork_goes_on(smollm2_llm: LLM) -> None:
    with smollm2_llm.session() as session:
        session.append("Once upon a time there was")
        length = len(session.token_ids)
        answer = session.respond(SamplingParams(temperature=0, max_tokens=50))
        for _ in range(3):
            next(answer)
        fork = session.fork()
        with pytest.raises(SessionError, match="answering"):
            session.append("x")
        kept = session.interrupt()
        assert kept is not None
        assert kept.finish_reason is FinishReason.ABORT
        assert session.token_ids[length:] == kept.token_ids == fork.token_ids[length:]
        assert len(kept.token_ids) == 3
        assert list(answer) == []
        assert fork.respond(GREEDY).text() == session.respond(GREEDY).text()
        fork.close()
        with pytest.raises(SessionClosed):
            fork.append("x")


def test_stop_strings_and_end_of_sequence_are_not_history(smollm2_llm: LLM) -> None:
    with smollm2_llm.session([]) as session:
        session.append("Say hello.")
        text = session.respond(SamplingParams(temperature=0, max_tokens=60)).text()
        tokenizer = smollm2_llm.get_tokenizer()
        assert session.token_ids[-1] not in tokenizer.eos_token_ids
        assert tokenizer.decode(session.token_ids).endswith(text)
    with smollm2_llm.session() as session:
        session.append("one two three four")
        text = session.respond(SamplingParams(temperature=0, max_tokens=40, stop=" s")).text()
        assert " s" not in text
