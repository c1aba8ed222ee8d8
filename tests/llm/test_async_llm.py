"""`AsyncLLM`: the answers of `LLM`, to any number of tasks; and what becomes of a request whose reader goes away."""

import asyncio
import contextlib
import gc
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue import (
    LLM,
    AsyncLLM,
    CapacityError,
    EngineArgs,
    EngineDead,
    ParameterError,
    RequestFailed,
    RequestOutput,
    SamplingParams,
    StreamingInput,
    TokensPrompt,
)
from segue.answers.outputs import Delta
from segue.contract.reports import EngineOutput, EngineStats, FinishReason
from segue.contract.step import ForwardResult, SeqStep
from segue.engine.engine import Engine
from segue.host.build import build
from segue.host.loop import EngineLoop
from segue.runtime.reference import ReferenceExecutor
from tests.host.processes import process_of as process_of_engine

PARAMS = SamplingParams(seed=5, max_tokens=8, ignore_eos=True, logprobs=1)
LONG = SamplingParams(seed=5, max_tokens=200, ignore_eos=True)
PROMPTS = ["the hen", "an inn in the", "of", "she said on and on"]


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "own process"])
def llm(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[AsyncLLM]:
    """Each test uses it from an event loop of its own."""
    llm = AsyncLLM(tiny_path, runtime="reference", max_num_seqs=8, engine_process=request.param)
    yield llm
    llm.shutdown()


@pytest.fixture
def mortal(tiny_path: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_path, runtime="reference", engine_process=True, max_engine_restarts=0)
    yield llm
    llm.shutdown()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def process_of(llm: AsyncLLM) -> "subprocess.Popen[bytes]":
    return process_of_engine(llm.engine_loop.client)


async def until_idle(llm: AsyncLLM) -> EngineStats:
    """Waits until no request is left, and says how it is then."""
    while (await llm.snapshot()).requests:
        await asyncio.sleep(0.01)
    return await stats_now(llm)


async def stats_now(llm: AsyncLLM) -> EngineStats:
    """After all that was said before."""
    for _ in range(2):  # the second question comes after the step that answered the first
        await llm.snapshot()
    return await llm.stats()


async def check_all_is_free(llm: AsyncLLM) -> None:
    stats = await until_idle(llm)
    assert stats.num_free_blocks == stats.num_kv_blocks
    assert not llm._answers


# --- answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True),
        msgspec.structs.replace(PARAMS, prompt_logprobs=2, temperature=0.5),
    ],
    ids=["plain", "n", "prompt_logprobs"],
)
def test_answers_are_those_of_llm(llm: AsyncLLM, tiny_llm: LLM, params: SamplingParams) -> None:
    (expected,) = tiny_llm.generate("the hen", params, use_tqdm=False)

    async def test() -> None:
        outputs = [output async for output in llm.generate("the hen", params, "mine")]
        final = outputs[-1]
        assert (final.request_id, final.prompt, final.prompt_token_ids) == (
            "mine",
            expected.prompt,
            expected.prompt_token_ids,
        )
        assert final.outputs == expected.outputs
        assert final.prompt_logprobs == expected.prompt_logprobs
        assert final.metrics.num_computed_tokens > 0
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for earlier, later in itertools.pairwise(outputs):
            for one, other in zip(earlier.outputs, later.outputs, strict=True):
                assert other.token_ids[: len(one.token_ids)] == one.token_ids
                assert other.text.startswith(one.text)

    run(test)


def test_deltas_join_to_the_answers(llm: AsyncLLM, tiny_llm: LLM) -> None:
    params = msgspec.structs.replace(PARAMS, n=2)
    (expected,) = tiny_llm.generate("the hen", params, use_tqdm=False)

    async def test() -> None:
        deltas = [delta async for delta in llm.deltas("the hen", params)]
        for answer in expected.outputs:
            mine = [delta for delta in deltas if delta.index == answer.index]
            assert "".join(delta.text for delta in mine) == answer.text
            assert [token for delta in mine for token in delta.token_ids] == answer.token_ids
            assert [entry for delta in mine for entry in delta.logprobs or ()] == answer.logprobs
            assert [each.finish_reason for each in mine] == [None] * (len(mine) - 1) + ["length"]

    run(test)


def test_stop_string_ends_the_answer_and_the_request(llm: AsyncLLM, tiny_llm: LLM) -> None:
    whole = tiny_llm.generate("the hen", LONG, use_tqdm=False)[0].outputs[0].text
    stop = whole[9:12]
    (expected,) = tiny_llm.generate("the hen", msgspec.structs.replace(LONG, stop=stop), use_tqdm=False)

    async def test() -> None:
        final = await last(llm.generate("the hen", msgspec.structs.replace(LONG, stop=stop)))
        assert final.outputs == expected.outputs
        assert final.outputs[0].stop_reason == stop
        assert final.metrics.num_computed_tokens > 0
        await check_all_is_free(llm)

    run(test)


def test_many_at_once_are_the_same_as_one_by_one(llm: AsyncLLM, tiny_llm: LLM) -> None:
    prompts = [TokensPrompt(prompt_token_ids=[3 + i, 9, 7] * (1 + i % 5)) for i in range(50)]
    params = [msgspec.structs.replace(PARAMS, seed=i) for i in range(50)]
    expected = tiny_llm.generate(prompts, params, use_tqdm=False)

    async def test() -> None:
        streams = [
            llm.generate(prompt, each, priority=i % 3)
            for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        outputs = await asyncio.gather(*map(last, streams))
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]
        await check_all_is_free(llm)

    run(test)


def test_chat(llm: AsyncLLM, tiny_llm: LLM) -> None:
    messages = [{"role": "user", "content": "the hen"}]
    (expected,) = tiny_llm.chat(messages, PARAMS, use_tqdm=False)

    async def test() -> None:
        output = await last(llm.chat(messages, PARAMS))
        assert output.outputs == expected.outputs
        assert output.prompt_token_ids == llm.encode_chat(messages)
        assert llm.get_tokenizer().vocab_size == llm.engine_loop.intake.vocab_size

    run(test)


def test_slow_reader_gets_it_all_and_holds_up_nobody(llm: AsyncLLM, tiny_llm: LLM) -> None:
    params = msgspec.structs.replace(LONG, max_tokens=60)
    (expected,) = tiny_llm.generate("the hen", params, use_tqdm=False)

    async def test() -> None:
        slow, slow_deltas = llm.generate("the hen", params), llm.deltas("the hen", params)
        await last(llm.generate("of", LONG))
        await until_idle(llm)
        outputs = [output async for output in slow]
        assert len(outputs) == 1  # merged while nobody read
        assert outputs[0].outputs == expected.outputs
        deltas = [delta async for delta in slow_deltas]
        assert len(deltas) == 1
        assert deltas[0].token_ids == expected.outputs[0].token_ids
        assert deltas[0].text == expected.outputs[0].text

    run(test)


def test_event_loops_of_several_threads_at_once(llm: AsyncLLM, tiny_llm: LLM) -> None:
    expected = [output.outputs for output in tiny_llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    seen: list[object] = []

    async def test() -> None:
        outputs = await asyncio.gather(*(last(llm.generate(prompt, PARAMS)) for prompt in PROMPTS))
        seen.append([output.outputs for output in outputs])

    threads = [threading.Thread(target=run, args=(test,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 4


def test_state_of_the_engine(llm: AsyncLLM) -> None:
    async def test() -> None:
        await llm.reset_prefix_cache()
        prompt = TokensPrompt(prompt_token_ids=list(range(3, 40)))
        cached = [(await last(llm.generate(prompt, PARAMS))).num_cached_tokens for _ in range(2)]
        assert (await stats_now(llm)).num_cached_blocks > 0
        await llm.reset_prefix_cache()
        assert (await stats_now(llm)).num_cached_blocks == 0
        assert cached == [0, 32]
        await llm.check_health()

    run(test)


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (3, ParameterError),
        ({}, ParameterError),
        (TokensPrompt(prompt_token_ids=[]), ParameterError),
        (TokensPrompt(prompt_token_ids=[320]), ParameterError),
        (TokensPrompt(prompt_token_ids=[5] * 256), CapacityError),
    ],
)
def test_what_is_wrong_is_raised_at_the_call(llm: AsyncLLM, prompt: Any, error: type[Exception]) -> None:
    async def test() -> None:
        for call in (llm.generate, llm.deltas):
            with pytest.raises(error):
                call(prompt, msgspec.structs.replace(PARAMS, n=2), "mine")
        await last(llm.generate("of", PARAMS, "mine"))

    run(test)


def test_request_id_is_in_use_until_the_end(llm: AsyncLLM) -> None:
    async def test() -> None:
        stream = llm.generate("of", LONG, "mine")
        assert stream.request_id == "mine"
        with pytest.raises(ParameterError, match="in use"):
            llm.generate("of", PARAMS, "mine")
        await stream.aclose()
        await last(llm.generate("of", PARAMS, "mine"))
        await last(llm.generate("of", PARAMS, "mine"))

    run(test)


def test_failed_request_fails_alone(tiny_path: Path, tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ReferenceExecutor.forward

    def failing(self: ReferenceExecutor, seqs: list[SeqStep], copies: Any = ()) -> ForwardResult:
        bad = [msgspec.structs.replace(seq, blocks=[-1]) if seq.tokens[0] == 7 else seq for seq in seqs]
        return forward(self, bad, copies)

    monkeypatch.setattr(ReferenceExecutor, "forward", failing)
    params = msgspec.structs.replace(PARAMS, n=2)

    async def test() -> None:
        async with AsyncLLM(tiny_path, runtime="reference") as llm:
            prompts = [TokensPrompt(prompt_token_ids=[first, 9, 9]) for first in (5, 7)]
            good, bad = await asyncio.gather(
                *(last(llm.generate(prompt, params)) for prompt in prompts), return_exceptions=True
            )
            assert isinstance(good, RequestOutput)
            assert good.finished
            assert isinstance(bad, RequestFailed)
            await check_all_is_free(llm)

    run(test)


def test_killed_process_ends_every_stream(mortal: AsyncLLM) -> None:
    async def silent() -> AsyncIterator[StreamingInput]:
        await asyncio.sleep(60)
        yield StreamingInput("never")

    async def one_turn() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("the hen")
        await asyncio.sleep(60)

    async def test() -> None:
        busy = [mortal.generate("the hen", LONG) for _ in range(5)]
        busy += [mortal.generate(silent()), mortal.generate(one_turn(), PARAMS)]
        tasks = [asyncio.create_task(last(stream)) for stream in busy]
        deltas = mortal.deltas("of", LONG)
        await anext(deltas)
        process_of(mortal).kill()
        for task in tasks:
            with pytest.raises(EngineDead, match="SIGKILL"):
                await task
        with pytest.raises(EngineDead, match="SIGKILL"):
            await check_all_is_free(mortal)
        with pytest.raises(EngineDead, match="SIGKILL"):
            mortal.generate("of", PARAMS)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await mortal.check_health()
        with pytest.raises(EngineDead, match="SIGKILL"):
            await mortal.reset_prefix_cache()
        with pytest.raises(EngineDead, match="SIGKILL"):
            async for _ in deltas:
                pass

    run(test)


def test_killed_while_only_idle_streams_are_open(mortal: AsyncLLM) -> None:
    async def chunks() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("the hen")
        await asyncio.sleep(0.1)
        process_of(mortal).kill()
        await asyncio.sleep(60)

    async def test() -> None:
        with pytest.raises(EngineDead, match="SIGKILL"):
            await last(mortal.generate(chunks(), PARAMS))

    run(test)


def test_killed_while_nobody_asks_anything(mortal: AsyncLLM) -> None:
    async def silent() -> AsyncIterator[StreamingInput]:
        await asyncio.sleep(60)
        yield StreamingInput("never")

    async def test() -> None:
        stream = mortal.generate(silent())
        await asyncio.sleep(0)
        process_of(mortal).kill()
        with pytest.raises(EngineDead, match="SIGKILL"):
            await anext(stream)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await mortal.check_health()

    run(test)


def test_engine_that_raises_is_dead(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine) -> list[EngineOutput]:
        raise ZeroDivisionError("oops")

    async def test() -> None:
        async with AsyncLLM(tiny_path, runtime="reference") as llm:
            monkeypatch.setattr(Engine, "step", broken)
            with pytest.raises(EngineDead, match="the engine failed: ZeroDivisionError: oops"):
                await last(llm.generate("of", PARAMS))

    run(test)


# --- readers that go away -------------------------------------------------------------------------------------


def test_leaving_the_loop_aborts(llm: AsyncLLM) -> None:
    async def test() -> None:
        async for _ in llm.generate("the hen", LONG):
            break
        async for _ in llm.deltas("the hen", msgspec.structs.replace(LONG, n=2)):
            break
        llm.generate("never read", LONG)
        await check_all_is_free(llm)

    run(test)


def test_aclose_aborts(llm: AsyncLLM) -> None:
    async def test() -> None:
        async with contextlib.aclosing(llm.generate("the hen", LONG)) as stream:
            read = (await anext(stream)).outputs[0].text
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert stream.output.outputs[0].text.startswith(read)
        await check_all_is_free(llm)

    run(test)


def test_cancelled_task_aborts(llm: AsyncLLM) -> None:
    async def test() -> None:
        begun = [asyncio.Event() for _ in PROMPTS]

        async def read(prompt: str, event: asyncio.Event) -> None:
            async for _ in llm.generate(prompt, LONG):
                event.set()
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(read(*each)) for each in zip(PROMPTS, begun, strict=True)]
        for event in begun:
            await event.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        await check_all_is_free(llm)

    run(test)


def test_abort_by_name(llm: AsyncLLM) -> None:
    async def test() -> None:
        stream = llm.generate("the hen", msgspec.structs.replace(LONG, n=2), "mine")
        deltas = llm.deltas("the hen", LONG, "deltas")
        await anext(stream)
        await llm.abort(["mine", "unknown", "deltas"])
        await llm.abort("mine")
        final = await last(stream)
        assert final.finished
        assert [answer.finish_reason for answer in final.outputs] == ["abort", "abort"]
        assert [delta async for delta in deltas][-1].finish_reason is FinishReason.ABORT
        await check_all_is_free(llm)

    run(test)


def test_event_loop_that_is_closed_without_a_word(llm: AsyncLLM) -> None:
    stream = []
    event_loop = asyncio.new_event_loop()

    async def start() -> None:
        stream.append(llm.generate("the hen", LONG, "mine"))

    event_loop.run_until_complete(start())
    event_loop.close()

    async def test() -> None:
        await check_all_is_free(llm)
        await last(llm.generate("of", PARAMS, "mine"))

    run(test)


# --- streaming input ------------------------------------------------------------------------------------------


def expected_turns(
    llm: LLM, chunks: list[tuple[list[int], SamplingParams]], keep: str
) -> list[RequestOutput]:
    """What plain requests say, each with all of the history in its prompt."""
    history: list[int] = []
    turns = []
    for token_ids, params in chunks:
        history = history + token_ids
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=history), params, use_tqdm=False)
        turns.append(output)
        answer = output.outputs[0].token_ids
        history = history + (answer if keep == "all" else answer[:-1])
    return turns


@pytest.mark.parametrize("keep", ["computed", "all"])
@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_streaming_input_is_the_same_as_plain_requests(
    llm: AsyncLLM, tiny_llm: LLM, keep: Any, pause_s: float
) -> None:
    encode = tiny_llm.get_tokenizer().encode
    other = msgspec.structs.replace(PARAMS, max_tokens=3, temperature=0.3)
    inputs = [
        StreamingInput("the hen"),
        StreamingInput([9, 8], other),
        StreamingInput({"prompt": "an inn"}),
        StreamingInput([]),
        StreamingInput(TokensPrompt(prompt_token_ids=[11] * 40), other),
    ]
    chunks = [
        (encode("the hen"), PARAMS),
        ([9, 8], other),
        (encode("an inn"), PARAMS),
        ([], PARAMS),
        ([11] * 40, other),
    ]
    expected = expected_turns(tiny_llm, chunks, keep)

    async def source() -> AsyncIterator[StreamingInput]:
        for each in inputs:
            yield each
            await asyncio.sleep(pause_s)

    async def test() -> None:
        outputs = [output async for output in llm.generate(source(), PARAMS, keep=keep)]
        turns = [output for output in outputs if output.outputs[0].finish_reason is not None]
        if len(turns) == len(chunks) + 1:
            assert turns.pop().outputs == turns[-1].outputs  # again, because it was the last one
        assert [turn.outputs for turn in turns] == [turn.outputs for turn in expected]
        assert [turn.prompt_token_ids for turn in turns] == [token_ids for token_ids, _ in chunks]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

        deltas: list[Delta] = [delta async for delta in llm.deltas(source(), PARAMS, keep=keep)]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == [token for turn in expected for token in turn.outputs[0].token_ids]
        assert sum(delta.finish_reason is not None for delta in deltas) == len(chunks)
        await check_all_is_free(llm)

    run(test)


def test_exception_of_the_input_is_the_readers(llm: AsyncLLM) -> None:
    async def source() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("the hen")
        raise ZeroDivisionError("mine")

    async def test() -> None:
        with pytest.raises(ZeroDivisionError, match="mine"):
            await last(llm.generate(source(), LONG))
        await check_all_is_free(llm)

    run(test)


@pytest.mark.parametrize(
    ("chunk", "parameter"),
    [
        ("the hen", "prompt"),
        (StreamingInput([400]), "prompt_token_ids"),
        (StreamingInput("on", SamplingParams(n=2)), "n"),
        (StreamingInput("on", SamplingParams(stop="x")), "stop"),
        (StreamingInput("on", SamplingParams(prompt_logprobs=1)), "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_bad_chunk(llm: AsyncLLM, chunk: Any, parameter: str, first: bool) -> None:
    cleaned_up = []

    async def source() -> AsyncIterator[StreamingInput]:
        try:
            if not first:
                yield StreamingInput("the hen")
            yield chunk
        finally:
            await asyncio.sleep(0.01)
            cleaned_up.append(True)

    async def test() -> None:
        with pytest.raises(ParameterError) as caught:
            await last(llm.generate(source(), LONG))
        assert caught.value.parameter == parameter
        await check_all_is_free(llm)
        while not cleaned_up:
            await asyncio.sleep(0.001)

    run(test)


def test_input_that_outgrows_the_model(llm: AsyncLLM) -> None:
    async def source() -> AsyncIterator[StreamingInput]:
        yield StreamingInput([5] * 200)
        yield StreamingInput([5] * 100)
        yield StreamingInput([6])

    async def test() -> None:
        ended = [
            output.outputs[0]
            async for output in llm.generate(source(), PARAMS)
            if output.outputs[0].finish_reason is not None
        ]
        first, refused, second = ended[:3]
        assert (refused.finish_reason, refused.token_ids) == (FinishReason.ERROR, [])
        assert "context length is 256 tokens" in (refused.error or "")
        assert first.token_ids
        assert second.token_ids
        await check_all_is_free(llm)

    run(test)


def test_input_without_a_chunk_and_with_an_empty_first_one(llm: AsyncLLM) -> None:
    async def nothing() -> AsyncIterator[StreamingInput]:
        chunks: tuple[StreamingInput, ...] = ()
        for chunk in chunks:
            yield chunk

    async def empty() -> AsyncIterator[StreamingInput]:
        yield StreamingInput("")

    async def test() -> None:
        stream = llm.generate(nothing(), PARAMS)
        assert stream.output.outputs == []
        assert [output async for output in stream] == []
        assert stream.output.outputs == []
        with pytest.raises(ParameterError, match="at least one token"):
            await last(llm.generate(empty(), PARAMS))
        with pytest.raises(ParameterError, match="streaming input"):
            llm.generate(nothing(), SamplingParams(stop="x"))
        await check_all_is_free(llm)

    run(test)


def test_leaving_a_streaming_input_ends_its_source(llm: AsyncLLM) -> None:
    ended = []

    async def source() -> AsyncIterator[StreamingInput]:
        try:
            yield StreamingInput("the hen")
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def test() -> None:
        async for _ in llm.generate(source(), LONG):
            break
        await check_all_is_free(llm)
        stream = llm.generate(source(), PARAMS, "mine")
        while (await anext(stream)).outputs[0].finish_reason is None:
            pass
        await llm.abort("mine")
        assert (await last(stream)).finished
        await check_all_is_free(llm)
        while len(ended) < 2:
            await asyncio.sleep(0.001)

    run(test)


# --- the engine's loop ----------------------------------------------------------------------------------------


def test_raw_outputs_come_in_order_on_the_event_loop(tiny_path: Path) -> None:
    loop = EngineLoop(build(EngineArgs(model=str(tiny_path), runtime="reference")).engine)
    raw = msgspec.structs.replace(PARAMS, logprobs=None)

    async def test() -> None:
        news: asyncio.Queue[tuple[str, EngineOutput | EngineDead]] = asyncio.Queue()
        thread = threading.current_thread()

        def handler(name: str) -> Callable[[EngineOutput | EngineDead], None]:
            def handle(output: EngineOutput | EngineDead) -> None:
                assert threading.current_thread() is thread
                news.put_nowait((name, output))
                if name == "broken":
                    raise ZeroDivisionError

            return handle

        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        submission = loop.intake.submission
        first = submission([5, 6], raw, request_id="one", resumable=True, keep="all")
        one = loop.open(first, handler("one"))
        with pytest.raises(ParameterError, match="in use"):
            loop.open(submission([5, 6], raw, request_id="one"), handler("other"))
        loop.open(submission([5, 6], raw), handler("broken"))
        one.add_chunk([7])
        one.truncate(2)
        fork = one.fork(handler("fork"))
        fork.add_chunk([7], raw)
        fork.end_input()
        gone = loop.open(submission([5, 6], LONG), handler("gone"))
        gone.abort()
        gone.abort()
        with pytest.raises(ParameterError, match="open input"):
            gone.add_chunk([5])
        one.truncate(10**6)
        said: dict[str, list[EngineOutput]] = {"one": [], "broken": [], "fork": []}
        while not all(outputs and outputs[-1].finished for outputs in said.values()):
            name, output = await news.get()
            assert isinstance(output, EngineOutput)
            said[name].append(output)
        assert said["one"][-1].finish_reason is FinishReason.ERROR
        assert "num_tokens" in (said["one"][-1].error or "")
        assert sum(len(output.token_ids) for output in said["fork"]) == 8
        assert sum(len(output.token_ids) for output in said["broken"]) == 8
        assert len(errors) == len(said["broken"])
        waiting = loop.open(submission([5], None, resumable=True), handler("waiting"))
        loop.close()
        name, last_news = await news.get()
        assert (name, str(last_news)) == ("waiting", "the engine was shut down")
        assert not waiting.is_open
        with pytest.raises(EngineDead, match="shut down"):
            loop.open(submission([5], raw), handler("late"))

    run(test)


# --- the end --------------------------------------------------------------------------------------------------


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "segue-engine"]


@pytest.mark.parametrize("engine_process", [False, True])
def test_shutdown_ends_streams_and_threads(tiny_path: Path, engine_process: bool) -> None:
    before = len(engine_threads())

    async def test() -> None:
        async with AsyncLLM(tiny_path, runtime="reference", engine_process=engine_process) as llm:
            stream = llm.generate("the hen", LONG)
            await anext(stream)
        with pytest.raises(EngineDead, match="shut down"):
            await last(stream)
        llm.shutdown()
        assert len(engine_threads()) == before

    run(test)


def test_dropping_it_ends_its_thread(tiny_path: Path) -> None:
    before = len(engine_threads())
    llm = AsyncLLM(tiny_path, runtime="reference")
    assert len(engine_threads()) == before + 1
    del llm
    gc.collect()
    assert len(engine_threads()) == before


SCRIPT = """
import asyncio, os, signal, sys
from segue import AsyncLLM, SamplingParams

llm = AsyncLLM(sys.argv[1], runtime="reference", engine_process=sys.argv[2] == "True")

async def main():
    async for output in llm.generate("the hen", SamplingParams(max_tokens=200, ignore_eos=True)):
        INTERRUPT
    print(output.finished)

asyncio.run(main())
"""


@pytest.mark.parametrize("engine_process", [False, True])
@pytest.mark.parametrize("interrupt", [False, True])
def test_scripts_end_without_shutdown(tiny_path: Path, engine_process: bool, interrupt: bool) -> None:
    code = SCRIPT.replace("INTERRUPT", "os.kill(os.getpid(), signal.SIGINT)" if interrupt else "pass")
    script = subprocess.run(
        [sys.executable, "-c", code, str(tiny_path), str(engine_process)],
        capture_output=True,
        text=True,
    )
    if interrupt:
        assert script.returncode == -signal.SIGINT
        assert script.stderr.rstrip().endswith("KeyboardInterrupt")
        assert script.stderr.count("Traceback") <= 2
    else:
        assert (script.returncode, script.stdout, script.stderr) == (0, "True\n", "")
