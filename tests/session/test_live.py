"""Live sessions on a real engine: the answers are those of the whole text, bit for bit."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from segue.answers.outputs import Delta, TokensPrompt
from segue.args import EngineArgs, EngineOptions
from segue.contract.reports import EngineStats
from segue.errors import CapacityError, SessionClosed, SessionError
from segue.host.build import build
from segue.host.loop import EngineLoop
from segue.llm.async_llm import AsyncLLM
from segue.llm.llm import LLM
from segue.sample.params import SamplingParams
from segue.session.live import Answer, Session, SessionManager
from segue.tokens.chat import encode_chat
from tests.session.test_state import split
from tests.session.texts import TEXTS

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=6, logprobs=1, frequency_penalty=0.5)


@asynccontextmanager
async def sessions(
    path: Path, options: EngineOptions, *, max_sessions: int | None = None, timeout_s: float | None = None
) -> AsyncIterator[SessionManager]:
    """A manager over an engine of this process; all blocks must be free at the end."""
    loaded = build(EngineArgs.of(path, options))
    loop = EngineLoop(loaded.engine)
    manager = SessionManager(loop, loaded.tokenizer, max_sessions=max_sessions, timeout_s=timeout_s)
    try:
        yield manager
        manager.close()
        state = await stats(manager)
        assert state.num_free_blocks == state.num_kv_blocks
    finally:
        loop.close()


def test_async_llm_has_sessions(smollm2_path: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(smollm2_path, max_model_len=256, max_sessions=1) as llm:
            async with llm.session(
                [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
            ) as one:
                with pytest.raises(CapacityError):
                    llm.session()
                one.append("What is your name?")
                text = await one.respond(GREEDY).text()
            outputs = [
                output async for output in llm.generate({"prompt_token_ids": one.token_ids[:-6]}, GREEDY)
            ]
            assert outputs[-1].outputs[0].text == text

    asyncio.run(run())


async def stats(manager: SessionManager) -> EngineStats:
    return await asyncio.wrap_future(manager.loop.call(lambda client: client.stats))


async def read(answer: Answer) -> tuple[list[int], list[object]]:
    deltas: list[Delta] = [delta async for delta in answer]
    ids = [token for delta in deltas for token in delta.token_ids]
    return ids, [entry for delta in deltas for entry in delta.logprobs or ()]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_streamed_input_equals_the_whole_text(
    smollm2_path: Path, smollm2_llm: LLM, params: SamplingParams
) -> None:
    rng = random.Random(3)
    prompts = [
        TokensPrompt(prompt_token_ids=smollm2_llm.get_tokenizer().encode(text)) for text in TEXTS.values()
    ]
    plain = [output.outputs[0] for output in smollm2_llm.generate(prompts, params, use_tqdm=False)]

    async def run() -> None:
        options: EngineOptions = {
            "max_model_len": 512,
            "async_scheduling": True,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 8,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        }
        async with sessions(smollm2_path, options) as manager:

            async def one(text: str) -> tuple[list[int], list[object]]:
                session = manager.open()
                sent = 0
                for piece in split(text, rng):
                    session.append(piece)
                    sent += len(piece)
                    await asyncio.sleep(rng.choice((0, 0, 0.002)))
                    right = session.text
                    if rng.random() < 0.3 and len(right.encode()) == sent:
                        session.revise(right[: len(right) // 2] + " wrong words here")
                        await asyncio.sleep(0.002)
                        session.revise(right)
                return await read(session.respond(params))

            results = await asyncio.gather(*[one(text) for text in TEXTS.values()])
            for (ids, logprobs), expected in zip(results, plain, strict=True):
                assert ids == expected.token_ids
                assert logprobs == expected.logprobs

    asyncio.run(run())


def test_turns_forks_and_interruptions_see_exactly_what_was_delivered(
    smollm2_path: Path, smollm2_llm: LLM
) -> None:
    """Each later turn equals a plain run of the history that the session shows."""

    async def run() -> None:
        options: EngineOptions = {"max_model_len": 512, "async_scheduling": True}
        async with sessions(smollm2_path, options) as manager:
            session = manager.open([{"role": "system", "content": "You are terse."}])
            session.append("Tell me a story about a fox.")
            answer = session.respond(SamplingParams(temperature=0, max_tokens=60))
            delivered: list[int] = []
            async for delta in answer:
                delivered += delta.token_ids
                if len(delivered) >= 7:
                    kept = session.interrupt()
                    break
            assert kept is not None
            assert kept.token_ids == delivered
            assert session.token_ids[-len(delivered) :] == delivered
            fork = session.fork()
            session.append("Stop. What is two plus two?")
            fork.append("Go on.")
            results = await asyncio.gather(read(session.respond(GREEDY)), read(fork.respond(GREEDY)))
            for one, (ids, logprobs) in zip((session, fork), results, strict=True):
                prompt = one.token_ids[: len(one.token_ids) - len(ids)]
                plain = smollm2_llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
                assert ids == plain.token_ids
                assert logprobs == plain.logprobs

    asyncio.run(run())


def test_chat_session_equals_chat(smollm2_path: Path, smollm2_llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    plain = smollm2_llm.chat(messages, GREEDY, use_tqdm=False)[0]

    async def run() -> None:
        async with sessions(smollm2_path, {"max_model_len": 512}) as manager:
            session = manager.open([])
            for piece in ("Na", "me a ", "colour", "."):
                session.append(piece)
            session.commit()
            assert session.token_ids == encode_chat(manager.tokenizer, messages) == plain.prompt_token_ids
            ids, logprobs = await read(session.respond(GREEDY))
            assert ids == plain.outputs[0].token_ids
            assert logprobs == plain.outputs[0].logprobs

    asyncio.run(run())


def test_revise_computes_only_what_differs(smollm2_path: Path) -> None:
    async def run() -> None:
        async with sessions(smollm2_path, {"max_model_len": 512}) as manager:
            session = manager.open()
            words = " ".join(f"word{i}" for i in range(60))
            session.append(words + " and the end is near")
            before = (await settled(manager)).num_computed_tokens
            session.revise(words + " and the end is far away")
            after = (await settled(manager)).num_computed_tokens
            assert 0 < after - before <= 5

    asyncio.run(run())


async def settled(manager: SessionManager) -> EngineStats:
    """The engine's state when all input is computed."""
    while True:
        state = await stats(manager)
        if not state.num_running and not state.num_waiting:
            return state
        await asyncio.sleep(0.005)


def test_a_fork_costs_no_prefill(smollm2_path: Path) -> None:
    async def run() -> None:
        async with sessions(smollm2_path, {"max_model_len": 512}) as manager:
            session = manager.open()
            session.append("The history of the town is long and full of surprises, " * 8)
            before = (await settled(manager)).num_computed_tokens
            forks = [session.fork() for _ in range(3)]
            answers = [fork.respond(GREEDY) for fork in forks]
            texts = await asyncio.gather(*[read(answer) for answer in answers])
            assert texts[0] == texts[1] == texts[2]
            after = (await stats(manager)).num_computed_tokens
            assert after - before <= 3 * (1 + 6)

    asyncio.run(run())


def test_idle_sessions_make_room_and_come_back(smollm2_path: Path) -> None:
    """Far more sessions than the pool holds; each answers as if it were alone."""

    async def run() -> None:
        options: EngineOptions = {"max_model_len": 128, "num_kv_blocks": 24, "max_num_seqs": 4}
        async with sessions(smollm2_path, options) as manager:
            opened: list[Session] = []
            for i in range(40):
                session = manager.open()
                session.append(
                    f"Session number {i} says hello to the world and all that is in it, number {i}"
                )
                opened.append(session)
            await settled(manager)
            ids, _ = await read(opened[0].respond(GREEDY))
            again = manager.open()
            again.append("Session number 0 says hello to the world and all that is in it, number 0")
            assert (await read(again.respond(GREEDY)))[0] == ids

    asyncio.run(run())


def test_limits_and_timeouts(tiny_path: Path) -> None:
    async def run() -> None:
        options: EngineOptions = {"runtime": "reference"}
        async with sessions(tiny_path, options, max_sessions=2, timeout_s=0.2) as manager:
            first, second = manager.open(), manager.open()
            with pytest.raises(CapacityError, match="max_sessions=2"):
                manager.open()
            first.append("ab")
            await second.closed.wait()
            await first.closed.wait()
            with pytest.raises(SessionClosed, match="timed out"):
                first.append("c")
            third = manager.open()
            third.append("ab")
            third.respond(GREEDY)
            with pytest.raises(SessionError, match="answering"):
                third.append("c")
            third.close()
            third.close()
            with pytest.raises(SessionClosed, match="closed"):
                third.respond(GREEDY)

    asyncio.run(run())


def test_a_failed_step_fails_the_answer_and_not_the_session(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segue.errors import RequestFailed
    from segue.runtime.reference import ReferenceExecutor

    async def run() -> None:
        async with sessions(tiny_path, {"runtime": "reference"}) as manager:
            session = manager.open()
            session.append("abcabc")
            await settled(manager)
            forward = ReferenceExecutor.forward

            def fail(*args: object) -> object:
                monkeypatch.setattr(ReferenceExecutor, "forward", forward)
                raise RuntimeError("broken")

            monkeypatch.setattr(ReferenceExecutor, "forward", fail)
            with pytest.raises(RequestFailed, match="RuntimeError"):
                await read(session.respond(GREEDY))
            ids, _ = await read(session.fork().respond(GREEDY))
            assert len(ids) == 6
            session.append("c")
            assert len((await read(session.respond(GREEDY)))[0]) == 6

    asyncio.run(run())
