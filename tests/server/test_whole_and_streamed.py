"""What a client makes of a stream, as JSON, is what it gets without one, whatever it asks for at once."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import Scripted
from tests.server.running import RunningServer, read_events

DRAWN_AT_RANDOM = {"id", "created"}
"""Of the answer and of each tool call; and when it was made."""
OF_CHUNKS = {"index", "role", "type", "object", "model", "system_fingerprint"}
"""Strings and numbers that are said again, or that number an item of a list; the others are joined."""

PROMPTS = ["the hen and the inn and on", "an 🦊 in"]
COMPLETION: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 24, "seed": 5, "n": 2}
EVERYTHING: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the hen"}], "max_tokens": 24, "seed": 5}
CONTINUED: dict[str, Any] = {
    "messages": [*CHAT["messages"], {"role": "assistant", "content": "an inn"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "echo": True,
}
TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": name}} for name in ("look", "wait")]
}
CALLS = (
    'So: <tool_call>{"name": "look", "arguments": {"at": "🦊"}}</tool_call>'
    '<tool_call>{"name": "wait"}</tool_call> the end and more'
)
FRAGMENTS = (
    *(
        "the hen",
        " and",
        " 🦊 in",
        "<tool_c",
        "<tool_call>",
        "</tool_call>",
        '{"name": "look"',
        ', "arguments": ',
    ),
    *('{"at": "an 🦊"}', "}", '{"name": "wait"}', '<tool_call>{"name": "wait"}</tool_call>', '"', "\n"),
)


def joined(so_far: Any, new: Any, name: str = "") -> Any:
    """A part of an answer and the same part of the next chunk."""
    if so_far is None or new is None or name in OF_CHUNKS:
        return so_far if new is None else new
    match so_far, new:
        case dict(), dict():
            return {key: joined(so_far.get(key), new.get(key), key) for key in {**so_far, **new}}
        case [*old], [*items] if name in ("choices", "tool_calls"):
            by_index = {item["index"]: item for item in old}
            for item in items:
                by_index[item["index"]] = joined(by_index.get(item["index"]), item)
            return [by_index[index] for index in sorted(by_index)]
        case (str(), str()) | (list(), list()):
            return so_far + new
    return new


def streamed(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    stream_options = {"include_usage": True}
    given = {**body, "stream": True, "stream_options": stream_options}
    with server.client() as client, client.stream("POST", path, json=given) as response:
        *chunks, done = read_events(response.iter_lines())
    assert done == "[DONE]"
    answer: Any = {}
    for chunk in map(json.loads, chunks):
        assert len(chunk["choices"]) <= 1
        answer = joined(answer, {key: chunk[key] for key in chunk.keys() - DRAWN_AT_RANDOM})
    for choice in answer["choices"]:
        if "delta" in choice:
            choice["message"] = choice.pop("delta")
    return answer


def whole(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return {key: answer[key] for key in answer.keys() - DRAWN_AT_RANDOM}


def assert_same(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    """Returns the answer."""
    whole(server, path, body)  # from now on, so much of the prompt is cached
    once, in_parts = whole(server, path, body), streamed(server, path, body)
    for answer in (once, in_parts):
        answer.pop("object")
        for choice in answer["choices"]:
            for number, call in enumerate(choice.get("message", {}).get("tool_calls", ())):
                assert call.pop("id").startswith("call_")
                assert call.pop("index", number) == number
            if "message" in choice:
                assert choice["message"].pop("refusal", None) is None
                choice["message"]["content"] = choice["message"]["content"] or None
    assert once == in_parts
    return once


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": 2, "echo": True},
        {"logprobs": 2, "echo": True, "max_tokens": 0},
        {"logprobs": 0, "return_tokens_as_token_ids": True},
        {"stop": ["a", "hen", "e"], "min_tokens": 3, "include_stop_str_in_output": True, "logprobs": 1},
        {"stop_token_ids": list(range(0, 300, 7)), "logprobs": 1, "echo": True},
        {"prompt": [[0, 60, 61], [70]], "logprobs": 1, "echo": True, "truncate_prompt_tokens": 2},
    ],
)
def test_completions(server: RunningServer, asked: dict[str, Any]) -> None:
    answer = assert_same(server, "/v1/completions", {**COMPLETION, **EVERYTHING, **asked})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"n": 3, "logprobs": True, "top_logprobs": 3},
        {"n": 2, "logprobs": True, "stop": ["a", "hen", "e"], "min_tokens": 3},
        {"n": 2, "stop_token_ids": list(range(0, 300, 7))},
        {**CONTINUED, "n": 2, "logprobs": True, "return_tokens_as_token_ids": True},
        {**TOOLS, "n": 2, "logprobs": True},
    ],
)
def test_chat_completions(server: RunningServer, asked: dict[str, Any]) -> None:
    assert_same(server, "/v1/chat/completions", {**CHAT, **EVERYTHING, **asked})


@pytest.mark.parametrize("said", [CALLS, CALLS.removeprefix("So: "), CALLS[:60], "no call", ""])
@pytest.mark.parametrize("asked", [{}, {"parallel_tool_calls": False, "return_token_ids": False}])
def test_tool_calls(scripted: Scripted, said: str, asked: dict[str, Any]) -> None:
    scripted.say(said)
    body = {**CHAT, **EVERYTHING, "ignore_eos": False, "max_tokens": 400, **TOOLS, **asked}
    body |= {"n": 2, "logprobs": True, "top_logprobs": 1, "stop": " and"}
    answer = assert_same(scripted.server, "/v1/chat/completions", body)
    num_calls = 0 if "tool_call" not in said else 1 if asked or said == CALLS[:60] else 2
    for choice in answer["choices"]:
        assert len(choice["message"].get("tool_calls", ())) == num_calls
        if num_calls and said != CALLS[:60]:
            assert choice["stop_reason"] == " and"
            assert choice["finish_reason"] == "tool_calls"


def responded(server: RunningServer, body: dict[str, Any], *, stream: bool) -> Any:
    """An answer of /v1/responses; that of a stream is made of all events but the last, which must tell the same."""
    if not stream:
        return without_ids(whole(server, "/v1/responses", body))
    output: list[Any] = []
    with (
        server.client() as client,
        client.stream("POST", "/v1/responses", json={**body, "stream": True}) as response,
    ):
        *events, last = (json.loads(data) for data in read_events(response.iter_lines()))
    for event in events:
        item: dict[str, Any] = next(iter(output[event.get("output_index", 0) :]), {})
        match event["type"].removeprefix("response."):
            case "output_item.added":
                output.append(event["item"])
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta":
                item["content"][0]["text"] += event["delta"]
                item["content"][0]["logprobs"] += event["logprobs"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "output_item.done":
                item["status"] = event["item"]["status"]
                assert item == event["item"]
    assert last["response"]["output"] == output
    return without_ids({key: value for key, value in last["response"].items() if key not in DRAWN_AT_RANDOM})


def without_ids(response: Any) -> Any:
    """All that says the same each time."""
    response.pop("created_at")
    for item in response["output"]:
        for name in {"id", "call_id"} & item.keys():
            item.pop(name)
    return response


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    max_tokens=st.integers(1, 120),
    logprobs=st.booleans(),
    n=st.integers(1, 2),
    parallel=st.booleans(),
    with_tools=st.booleans(),
)
def test_whatever_is_said(
    scripted: Scripted,
    *,
    said: str,
    max_tokens: int,
    logprobs: bool,
    n: int,
    parallel: bool,
    with_tools: bool,
) -> None:
    scripted.say(said)
    body: dict[str, Any] = {**(TOOLS if with_tools else {}), "parallel_tool_calls": parallel}
    more = {"max_tokens": max_tokens, "logprobs": logprobs, "n": n, "return_token_ids": logprobs}
    assert_same(scripted.server, "/v1/chat/completions", {**CHAT, **body, **more})
    if with_tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in TOOLS["tools"]]
    if logprobs:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    body |= {"input": "the hen", "max_output_tokens": max_tokens}
    responded(scripted.server, body, stream=False)  # from now on, so much of the prompt is cached
    once, in_parts = (responded(scripted.server, body, stream=stream) for stream in (False, True))
    assert once == in_parts


def test_cached_tokens_are_told_in_every_form(server: RunningServer) -> None:
    text = "the hen is in the inn and on and on and on and on and on"
    messages = [{"role": "user", "content": text}]

    def post(path: str, **body: Any) -> dict[str, Any]:
        with server.client() as client:
            answer = client.post(path, json={"cache_salt": "its own", **body}).json()
        return dict(answer["usage"])

    post("/v1/chat/completions", messages=messages, max_tokens=1)
    chat = post("/v1/chat/completions", messages=messages, max_tokens=1)
    response = post("/v1/responses", input=text, max_output_tokens=1)
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    assert response["input_tokens_details"]["cached_tokens"] == cached >= 16
