"""The realtime WebSocket: with OpenAI's client, and as anybody might use it."""

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from segue import LLM, AsyncLLM, SamplingParams
from segue.server.realtime import event_log
from segue.server.realtime.client_events import AnyClientEvent
from segue.server.realtime.conversation import ConversationState
from segue.server.realtime.saver import SavedSession
from segue.server.realtime.server_events import AnyServerEvent, ServerEvent
from segue.server.realtime.session import RealtimeSession
from segue.server.shared.options import ServerOptions
from segue.server.shared.serving import Serving
from tests.server.realtime_client import GREEDY, Event, client, run, text_of, url
from tests.server.running import RunningServer, serve_process


def plain(llm: LLM, messages: list[dict[str, str]], max_tokens: int = 12) -> str:
    """The same answer without a session."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    return output.outputs[0].text


# --- OpenAI's client ------------------------------------------------------------------------------------------


def test_openais_client(server: RunningServer, long_llm: LLM) -> None:
    async def test() -> None:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        async with client.realtime.connect(model=server.model) as connection:
            assert (await connection.recv()).type == "session.created"
            await connection.session.update(
                session={  # type: ignore[arg-type]  # the temperature is ours
                    "type": "realtime",
                    "instructions": "the hen",
                    "output_modalities": ["text"],
                    "max_output_tokens": 12,
                    "temperature": 0,
                }
            )
            updated = await connection.recv()
            assert updated.type == "session.updated"
            assert updated.session.type == "realtime"
            assert updated.session.instructions == "the hen"
            await connection.conversation.item.create(
                item={
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "an inn"}],
                }
            )
            await connection.response.create()
            kinds, text = [], ""
            async for event in connection:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.output_text.done":
                    assert event.text == text
                elif event.type == "response.done":
                    break
            assert event.type == "response.done"
            assert event.response.status == "incomplete"
            assert event.response.usage is not None
            assert event.response.usage.output_tokens == 12
        system = {"role": "system", "content": "the hen"}
        assert text == plain(long_llm, [system, {"role": "user", "content": "an inn"}])
        assert list(dict.fromkeys(kinds)) == [
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.done",
        ]

    run(test())


# --- conversations --------------------------------------------------------------------------------------------


def test_turns_follow_each_other(server: RunningServer, long_llm: LLM) -> None:
    async def test() -> None:
        params = SamplingParams(temperature=0, max_tokens=12)
        async with client(server) as c:
            with long_llm.session([]) as expected:
                for text in ("the hen", "an inn", "rain"):
                    expected.append(text)
                    answer = expected.respond(params).text()
                    num_input = len(expected.token_ids) - 12
                    await c.say(text)
                    response = await c.answer(**GREEDY)
                    assert text_of(response) == answer
                    assert response["usage"]["output_tokens"] == 12
                    assert response["usage"]["input_tokens"] == num_input

    run(test())


def test_input_that_is_still_arriving(server: RunningServer, long_llm: LLM) -> None:
    async def test() -> None:
        async with client(server) as c:
            for word in ("an ", "inn ", "in ", "the ", "snow"):
                await c.send("input_text.append", text=word)
            await c.send("input_text.revise", text="an inn in the rain")
            while (progress := await c.until("input_text.progress"))["num_computed"] < progress[
                "num_tokens"
            ] - 1:
                pass
            await c.send("input_text.commit")
            committed = await c.until("input_text.committed")
            done = await c.until("conversation.item.done")
            assert done["item"]["id"] == committed["item_id"]
            assert done["item"]["content"] == [{"type": "input_text", "text": "an inn in the rain"}]
            response = await c.answer(**GREEDY)
            assert text_of(response) == plain(long_llm, [{"role": "user", "content": "an inn in the rain"}])
            # An answer commits what there is.
            await c.send("input_text.append", text="oh")
            await c.send("input_text.clear")
            await c.until("input_text.cleared")
            await c.send("input_text.append", text="the hen")
            await c.send("response.create", response=GREEDY)
            assert (await c.until("conversation.item.done"))["item"]["content"][0]["text"] == "the hen"
            await c.until("response.done")

    run(test())


def test_input_during_an_answer_waits_and_an_answer_can_be_cut_off(server: RunningServer) -> None:
    async def test() -> None:
        async with client(server) as c:
            await c.say("the hen")
            await c.send("response.create", response={"temperature": 0, "max_output_tokens": 4000})
            await c.until("response.output_text.delta")
            await c.send("input_text.append", text="an inn")
            await c.send("response.create", event_id="mine")
            error = await c.until("error")
            assert error["error"]["code"] == "conversation_already_has_active_response"
            assert error["error"]["event_id"] == "mine"
            await c.send("response.cancel")
            response = (await c.until("response.done"))["response"]
            assert response["status"] == "cancelled"
            assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
            deltas = [e["delta"] for e in c.events if e["type"] == "response.output_text.delta"]
            assert text_of(response) == "".join(deltas) != ""
            assert (await c.answer(**GREEDY))["status"] in ("incomplete", "completed")
            texts = [
                e["item"]["content"][0]["text"] for e in c.events if e["type"] == "conversation.item.done"
            ]
            assert "an inn" in texts

    run(test())


def test_items_in_the_middle_and_deleted_ones(server: RunningServer, long_llm: LLM) -> None:
    async def test() -> None:
        async with client(server) as c:
            first = await c.say("the hen")
            wrong = await c.say("no")
            await c.say("an inn")
            await c.send("conversation.item.delete", item_id=wrong)
            await c.until("conversation.item.deleted")
            item = {
                "id": "mine",
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "oh"}],
            }
            await c.send("conversation.item.create", item=item, previous_item_id=first)
            assert (await c.until("conversation.item.added"))["previous_item_id"] == first
            await c.send("conversation.item.retrieve", item_id="mine")
            assert (await c.until("conversation.item.retrieved"))["item"]["role"] == "assistant"
            messages = [
                {"role": "user", "content": "the hen"},
                {"role": "assistant", "content": "oh"},
                {"role": "user", "content": "an inn"},
            ]
            assert text_of(await c.answer(**GREEDY)) == plain(long_llm, messages)

    run(test())


def test_answers_apart(server: RunningServer, long_llm: LLM) -> None:
    async def test() -> None:
        async with client(server) as c:
            await c.say("the hen")
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "an inn"}]}
            response = await c.answer(**GREEDY, conversation="none", input=[item], metadata={"a": "b"})
            assert text_of(response) == plain(long_llm, [{"role": "user", "content": "an inn"}])
            assert response["metadata"] == {"a": "b"}
            response = await c.answer(**GREEDY, instructions="rain")
            messages = [{"role": "system", "content": "rain"}, {"role": "user", "content": "the hen"}]
            assert text_of(response) == plain(long_llm, messages)
            await c.send("conversation.item.retrieve", item_id=response["output"][0]["id"])
            await c.until("conversation.item.retrieved")

    run(test())


# --- what is wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "param", "message"),
    [
        ("{", None, "not valid JSON"),
        ("[1]", None, "Expected `object`"),
        ("{}", "type", "is required"),
        ('{"type": "no.such"}', "type", "Invalid value 'no.such'"),
        ('{"type": "input_text.append"}', "text", "is required"),
        ('{"type": "input_text.append", "text": 5}', "text", "Expected `str`"),
        ('{"type": "input_text.commit"}', None, "no input to commit"),
        ('{"type": "response.create"}', None, "nothing to answer"),
        (
            '{"type": "response.create", "response": {"max_output_tokens": 0}}',
            "max_output_tokens",
            "at least 1",
        ),
        ('{"type": "response.create", "response": {"input": []}}', "response.input", "is empty"),
        ('{"type": "response.cancel"}', None, "no such answer"),
        ('{"type": "session.update", "session": {"temperature": -1}}', "temperature", "must be in"),
        (
            '{"type": "session.update", "session": {"output_modalities": ["audio"]}}',
            "session.output_modalities",
            "gives text",
        ),
        ('{"type": "session.update", "session": {"tools": [{}]}}', "tools", "/v1/chat/completions"),
        ('{"type": "conversation.item.delete", "item_id": "x"}', "item_id", "there is no item"),
        (
            '{"type": "conversation.item.create", "item": {"content": [{"type": "input_audio"}]}}',
            "item.content[0]",
            "text only",
        ),
        (
            '{"type": "conversation.item.create", "item": {"type": "function_call"}}',
            "item.type",
            "only messages",
        ),
        ('{"type": "input_text.append", "text": "' + "the hen " * 20000 + '"}', None, "max_model_len"),
    ],
)
def test_wrong_events(server: RunningServer, data: str, param: str | None, message: str) -> None:
    async def test() -> None:
        async with client(server) as c:
            await c.until("session.created")
            await c.socket.send(data)
            error = (await c.until("error"))["error"]
            assert message in error["message"]
            assert error["param"] == param
            assert error["type"] == "invalid_request_error"
            await c.socket.send(b"{}")
            await c.until("error")
            await c.say("the hen")
            assert (await c.answer(**GREEDY))["usage"]["output_tokens"] > 0

    run(test())


def test_connections_that_cannot_be(server: RunningServer) -> None:
    async def test() -> None:
        for query, code in (({"model": "x"}, "model_not_found"), ({"session_id": "x"}, "session_not_found")):
            async with connect(url(server, **query)) as socket:
                assert json.loads(await socket.recv())["error"]["code"] == code
                with pytest.raises(ConnectionClosed):
                    await socket.recv()

    run(test())


@pytest.mark.parametrize(
    "options",
    [{"additional_headers": {"OpenAI-Beta": "realtime=v1"}}, {"subprotocols": ["openai-beta.realtime-v1"]}],
)
def test_a_beta_client_is_told_what_to_use(server: RunningServer, options: dict[str, Any]) -> None:
    async def test() -> None:
        async with connect(url(server), **options) as socket:
            error = json.loads(await socket.recv())["error"]
            assert error["code"] == "beta_api_shape_disabled"
            assert "newer client" in error["message"]
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4000

    run(test())


def test_null_asks_for_nothing(server: RunningServer, long_llm: LLM) -> None:
    """As LiveKit's client sends it in each turn."""

    async def test() -> None:
        async with client(server) as c:
            await c.send("session.update", session={"instructions": "rain", "temperature": 0})
            nulls = {"instructions": None, "tools": None, "temperature": None, "max_output_tokens": None}
            await c.send("session.update", session=nulls)
            await c.until("session.updated")
            assert (await c.until("session.updated"))["session"]["instructions"] == "rain"
            await c.say("the hen")
            response = await c.answer(
                max_output_tokens=12,
                instructions=None,
                tools=None,
                input=None,
                conversation=None,
                metadata=None,
            )
            messages = [{"role": "system", "content": "rain"}, {"role": "user", "content": "the hen"}]
            assert text_of(response) == plain(long_llm, messages)
            assert response["usage"]["input_token_details"]["cached_tokens"] > 0  # it is not answered apart

    run(test())


LONG = "the hen " * 20000
"""More than fits into the context."""


def test_instructions_that_do_not_fit_change_nothing(server: RunningServer, long_llm: LLM) -> None:
    async def test() -> None:
        async with client(server) as c:
            await c.send("session.update", session={"instructions": "rain", "temperature": 0})
            await c.say("the hen")
            for fields in ({"instructions": LONG}, {"instructions": "hen", "modalities": ["text"]}):
                await c.send("session.update", session={**fields, "temperature": 1})
                await c.until("error")
            messages = [{"role": "system", "content": "rain"}, {"role": "user", "content": "the hen"}]
            assert text_of(await c.answer(max_output_tokens=12)) == plain(long_llm, messages)

    run(test())


def test_input_that_does_not_fit_after_an_answer_can_be_taken_back(tmp_path: Path, tiny_path: Path) -> None:
    with serve_process(tmp_path / "log", tiny_path, "--max-model-len", "256") as server:

        async def test() -> None:
            async with client(server) as c:
                await c.say("the hen")
                await c.send("response.create", response={"max_output_tokens": 100})
                await c.until("response.created")
                await c.send("input_text.append", text="the hen " * 60)
                error = (await c.until("error"))["error"]
                assert error["code"] == "context_length_exceeded"
                await c.until("response.done")
                await c.send("input_text.append", text="more")
                await c.until("error")
                await c.send("input_text.revise", text="an inn")
                await c.send("input_text.commit")
                await c.until("input_text.committed")
                assert (await c.answer(max_output_tokens=5))["status"] == "incomplete"

        run(test())


def test_a_full_conversation_can_be_shortened(tmp_path: Path, tiny_path: Path) -> None:
    with serve_process(tmp_path / "log", tiny_path, "--max-model-len", "256") as server:

        async def test() -> None:
            async with client(server) as c:
                first = await c.say("the hen")
                answer = await c.answer(temperature=0)
                assert answer["status"] == "incomplete"
                await c.send("input_text.append", text="more")
                await c.until("error")
                await c.send("input_text.clear")
                await c.until("input_text.cleared")
                for item_id in (first, answer["output"][0]["id"]):
                    await c.send("conversation.item.delete", item_id=item_id)
                    await c.until("conversation.item.deleted")
                await c.say("an inn")
                await c.answer(**GREEDY)

        run(test())


def test_cached_tokens_are_those_that_were_there_before(server: RunningServer) -> None:
    async def test() -> None:
        async with client(server) as c:
            await c.send("input_text.append", text="the hen and the inn " * 50)
            while True:
                progress = await c.until("input_text.progress")
                if progress["num_computed"] >= progress["num_tokens"] - 1:
                    break
            usage = (await c.answer(**GREEDY))["usage"]
            cached = usage["input_token_details"]["cached_tokens"]
            assert progress["num_computed"] - 10 <= cached < usage["input_tokens"]

    run(test())


def test_metrics_know_realtime_answers(server: RunningServer) -> None:
    names = ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count",
             "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total", "vllm:request_success_total")  # fmt: skip
    before = [server.metric(name) for name in names]

    async def test() -> None:
        async with client(server) as c:
            await c.say("the hen")
            usage = (await c.answer(**GREEDY))["usage"]
            cached = usage["input_token_details"]["cached_tokens"]
            gained = [server.metric(name) - value for name, value in zip(names, before, strict=True)]
            assert gained == [12, 1, cached, usage["input_tokens"], 1]

    run(test())


# --- lost connections, slow readers ---------------------------------------------------------------------------


def test_a_lost_connection_is_taken_up_again(server: RunningServer) -> None:
    async def test() -> None:
        async with client(server) as c:
            created = await c.until("session.created")
            await c.say("the hen")
            await c.send("response.create", response={"temperature": 0, "max_output_tokens": 40})
            last = await c.until("response.output_text.delta")
            c.socket.transport.abort()
        async with client(
            server, session_id=created["session"]["id"], last_event_id=last["event_id"]
        ) as again:
            response = (await again.until("response.done"))["response"]
            if all(event["type"] != "session.resumed" for event in again.events):
                await again.until("session.resumed")  # the answer was faster
            deltas = [
                event["delta"]
                for event in c.events + again.events
                if event["type"] == "response.output_text.delta"
            ]
            assert "".join(deltas) == text_of(response)
            numbers = [int(event["event_id"].removeprefix("event_")) for event in c.events + again.events]
            assert numbers == list(range(len(numbers)))
            # A second connection takes it over.
            async with client(server, session_id=created["session"]["id"]) as third:
                await third.until("session.resumed")
                with pytest.raises(ConnectionClosed) as closed:
                    await again.until("never")
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 4001
                await third.say("an inn")
                await third.answer(**GREEDY)

    run(test())


def test_events_that_are_lost_are_not_passed_over(server: RunningServer) -> None:
    async def test() -> None:
        async with client(server) as c:
            created = await c.until("session.created")
            c.socket.transport.abort()
        # The last one is longer than Python takes for an integer.
        for event_id in ("event_99", "event_-1", "x", "event_" + "9" * 5000):
            async with client(server, session_id=created["session"]["id"], last_event_id=event_id) as again:
                assert (await again.until("error"))["error"]["code"] == "events_lost"
                await again.until("session.resumed")
                again.socket.transport.abort()

    run(test())


class Numbered(ServerEvent, kw_only=True, tag="numbered"):
    text: str
    number: int


def test_the_log_is_bounded_and_gives_again_what_was_sent() -> None:
    async def test() -> None:
        log = event_log.EventLog()
        text = "x" * 1000
        written = 0

        async def write() -> None:
            nonlocal written
            for number in range(2000):
                await log.add(Numbered(text=text, number=number))
                written += 1

        writer = asyncio.create_task(write())
        await asyncio.sleep(0.01)
        assert written * 1000 <= event_log.MAX_UNSENT_BYTES
        seen: list[Event] = []
        while len(seen) < 2000:
            seen.append(json.loads(await log.next()))
            log.sent()
        await writer
        assert [event["number"] for event in seen] == list(range(2000))
        assert not log.go_back("event_0")
        while log._unsent:
            log.sent()
        assert log.go_back(seen[-10]["event_id"])
        assert json.loads(await log.next()) == seen[-9]
        for wrong in ("event_2000", "x", "event_", "event_-1", "event_²", "event_" + "1" * 5000):
            assert not log.go_back(wrong)

    run(test())


def test_a_slow_reader_gets_it_all_in_larger_parts(long_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_UNSENT_BYTES", 4096)

    def changed(_: RealtimeSession, *, is_border: bool) -> None:
        pass

    async def test() -> None:
        async with AsyncLLM(long_path, max_model_len=2048) as llm:
            saved = SavedSession(conversation=ConversationState(now=datetime.now()))
            realtime = RealtimeSession(Serving(llm, "tiny", ServerOptions()), "sess", saved, changed)
            for wish in (
                {"type": "input_text.append", "text": "the hen"},
                {"type": "response.create", "response": {"temperature": 0, "max_output_tokens": 1000}},
            ):
                await realtime.receive(json.dumps(wish))
            while not (await llm.stats()).num_running:
                await asyncio.sleep(0.01)
            while (await llm.stats()).num_running:
                await asyncio.sleep(0.01)
            assert realtime.log._num_unsent_bytes < 2 * 4096
            kinds, text = [], ""
            while "response.done" not in kinds:
                event: Event = json.loads(await realtime.log.next())
                realtime.log.sent()
                kinds.append(event["type"])
                text += event.get("delta", "")
            assert text == text_of(event["response"])
            assert event["response"]["usage"]["output_tokens"] == 1000
            assert kinds.count("response.output_text.delta") < 100
            realtime.close()

    run(test())


# --- documentation --------------------------------------------------------------------------------------------

DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "realtime.md").read_text()
ELIDED = "..."
"""The key of what an example leaves out."""


def examples() -> Iterator[dict[str, Any]]:
    """The events that the documentation shows."""
    for block in re.findall(r"```json\n(.*?)```", DOCUMENTATION, re.DOTALL):
        rest = block.strip()
        while rest:
            event, end = json.JSONDecoder().raw_decode(rest)
            yield event
            rest = rest[end:].lstrip()


def field_names(known: inspect.StructType) -> set[str]:
    tag = [] if known.tag_field is None else [known.tag_field]
    return {*tag, *(field.encode_name for field in known.fields)}


def struct_in(known: inspect.Type) -> inspect.StructType | None:
    """What a field holds, or holds several of."""
    match known:
        case inspect.StructType():
            return known
        case inspect.ListType(item_type=item):
            return struct_in(item)
        case inspect.UnionType(types=types):
            return next(filter(None, map(struct_in, types)), None)
    return None


def all_fields(known: inspect.StructType) -> Iterator[tuple[type, str]]:
    """Its own, and those of what it holds."""
    for name in field_names(known):
        yield known.cls, name
    for field in known.fields:
        if (inner := struct_in(field.type)) is not None:
            yield from all_fields(inner)


def fields_shown(example: dict[str, Any], known: inspect.StructType) -> Iterator[tuple[type, str]]:
    """Those of `all_fields` that an example has. Others are no fields."""
    names = set(example) - {ELIDED}
    assert names <= field_names(known), (known.cls, names)
    for name in names:
        yield known.cls, name
    for field in known.fields:
        inner, value = struct_in(field.type), example.get(field.encode_name)
        if inner is not None and value is not None:
            for each in value if isinstance(value, list) else [value]:
                yield from fields_shown(each, inner)


def events_of(union: object) -> dict[str, inspect.StructType]:
    known = inspect.type_info(union)
    assert isinstance(known, inspect.UnionType)
    return {str(each.tag): each for each in known.types if isinstance(each, inspect.StructType)}


CLIENT_EVENTS = events_of(AnyClientEvent)
SERVER_EVENTS = events_of(AnyServerEvent)


def test_the_documentation_shows_every_event_with_its_fields() -> None:
    """And none that does not exist."""
    events = CLIENT_EVENTS | SERVER_EVENTS
    shown = {field for each in examples() for field in fields_shown(each, events[each["type"]])}
    assert {each["type"] for each in examples()} == set(events)
    for event in SERVER_EVENTS.values():
        assert set(all_fields(event)) <= shown
    code = " ".join(re.findall(r"`([^`\n]+)`", DOCUMENTATION))
    words = {*re.findall(r"[a-z_]+", code), "modalities", "max_response_output_tokens"}
    for event in CLIENT_EVENTS.values():
        assert {name for cls, name in all_fields(event) if (cls, name) not in shown} <= words


def test_the_documentation_has_a_table_of_the_servers_events() -> None:
    rows: dict[str, set[str]] = {}
    for names, fields in re.findall(
        r"^\| (`[a-z_]+(?:\.[a-z_]+)*`.*?)\|.*?\|(.*)\|$", DOCUMENTATION, re.MULTILINE
    ):
        first, *others = re.findall(r"`([a-z_.]+)`", names)
        for name in (first, *(first.rpartition(".")[0] + other for other in others)):
            rows[name] = set(re.findall(r"`([a-z_]+)`", fields))
    assert set(rows) == set(SERVER_EVENTS)
    for name, event in SERVER_EVENTS.items():
        assert field_names(event) - {"type", "event_id"} <= rows[name], name
        assert rows[name] <= {field for _, field in all_fields(event)}, name
