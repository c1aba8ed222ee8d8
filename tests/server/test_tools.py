"""Tool calls: read from a model's text in each format however it arrives, and as OpenAI's clients see them."""

import json
import threading
from typing import Any

import openai as api
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from segue.server.shared.options import ServerOptions, ToolFormat
from segue.server.shared.tools.formats import READERS, tool_format_of
from segue.server.shared.tools.reader import CallArguments, CallStart, Content
from tests.server.conftest import Scripted

CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    # format, what the model writes, content, calls
    ("hermes", "just text", "just text", []),
    ("hermes", "", "", []),
    ("hermes", '<tool_call>\n{"name": "a", "arguments": {"x": "<b>"}}\n</tool_call>', "", [("a", '{"x": "<b>"}')]),
    (
        "hermes",
        'First:\n<tool_call>{"name": "a", "arguments": {"x": [1, {"y": "}"}]}}</tool_call>\n'
        '<tool_call>{"arguments": {}, "id": 3, "name": "b"}</tool_call> done',
        "First:\ndone",
        [("a", '{"x": [1, {"y": "}"}]}'), ("b", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    ("hermes", r'<tool_call>{"name": "a", "arguments": "{\"x\": \"\\n\"}"}</tool_call>', "", [("a", r'{"x": "\n"}')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "cut o', "", [("a", '{"x": "cut o')]),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>!', '<tool_call>{"arguments": {}}</tool_call>!', []),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {}, "arguments": {"city": "Oslo"}, "parameters": {"x": 1}}</tool_call>',
        "",
        [("a", '{"city": "Oslo"}')],
    ),
    ("hermes", '<tool_call>{"parameters": { }, "arguments": {}, "name": "a"}</tool_call>', "", [("a", "{}")]),
    ("hermes", '<tool_call>{"name": "a" "arguments": {"x": 1}}</tool_call> ok', "ok", [("a", '{"x": 1}')]),
    ("hermes", 'A <tool_call>{"name": "a", "arguments": {"x": 1}; 7}</tool_call> ok', "A ok", [("a", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {', "", [("a", "{")]),
    ("hermes", '<tool_call>{"name": "a": "b", "x"', "", [("a", "")]),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": [1]} {"name": "b"}]', "", [("a", "[1]"), ("b", "{}")]),
    ("hermes", "<tool_cal", "<tool_cal", []),
    ("hermes", "<<tool_call>", "<<tool_call>", []),
    ("hermes", "a < b <tool> c", "a < b <tool> c", []),
    ("llama3_json", '{"name": "look", "parameters": {"at": "x"}}', "", [("look", '{"at": "x"}')]),
    ("llama3_json", ' <|python_tag|>{"name": "look", "parameters": {}}', "", [("look", "{}")]),
    (
        "llama3_json",
        '{"name": "look", "parameters": {"a": 1}}; {"name": "look", "parameters": {"a": 2}}',
        "",
        [("look", '{"a": 1}'), ("look", '{"a": 2}')],
    ),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", ' Look: {"name": "look"}', ' Look: {"name": "look"}', []),
    ("llama3_json", "<|python", "<|python", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]',
        "",
        [("a", '{"x": 1}'), ("b", "{}")],
    ),
    ("mistral", 'So [TOOL_CALLS] [{"name": "a", "arguments": {}}]', "So ", [("a", "{}")]),
    ("mistral", '[TOOL_CALLS]a[ARGS]{"x": [2]}[TOOL_CALLS]b{"y": 3}', "", [("a", '{"x": [2]}'), ("b", '{"y": 3}')]),
    ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "[TOOL", "[TOOL", []),
]  # fmt: skip


def read(kind: ToolFormat, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of a text that arrives in these parts."""
    reader = READERS[kind](["look"])
    pieces = [piece for part in parts for piece in reader.push(part)] + reader.finish()
    content = ""
    names: list[str] = []
    arguments: list[str] = []
    for piece in pieces:
        match piece:
            case Content():
                content += piece.text
            case CallStart():
                assert piece.index == len(names)
                names.append(piece.name)
                arguments.append("")
            case CallArguments():
                assert piece.index == len(names) - 1
                arguments[-1] += piece.text
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_calls_are_found(kind: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(kind, [text]) == (content, calls)
    assert read(kind, list(text)) == (content, calls)


@given(st.data(), st.sampled_from(list(READERS)))
def test_how_a_text_arrives_changes_nothing(data: st.DataObject, kind: ToolFormat) -> None:
    fragments = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "look"', ', "arguments": ',
                 '{"a": "\\"}"}', "}", "[", "]", ";", " ", "look", '"', "\\", "{", ",", ":", "é", "null"]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = read(kind, parts)
    assert (content, calls) == read(kind, [text])
    if not calls:
        assert content == text


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = READERS["hermes"](["look"])
    assert reader.push('ok <tool_call>{"name": "look", "arguments": {"text": "once') == [
        Content("ok "),
        CallStart(0, "look"),
        CallArguments(0, '{"text": "once'),
    ]
    assert reader.push(" upon") == [CallArguments(0, " upon")]
    assert reader.push(' a"}}</tool') == [CallArguments(0, ' a"}')]
    assert reader.push("_call>") == []


def test_formats_of_templates() -> None:
    assert tool_format_of("{% for m in messages %}") is None
    assert tool_format_of("{% if tools %}<tool_call>") == "hermes"
    assert tool_format_of("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]") == "mistral"
    assert tool_format_of("{% if tools %}<|python_tag|>") == "llama3_json"


TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
    },
    {"type": "function", "function": {"name": "wait"}},
]
ASK: Any = {
    "model": "script",
    "messages": [{"role": "user", "content": "x"}],
    "tools": TOOLS,
    "max_tokens": 300,
}
LOOK = '<tool_call>{"name": "look", "arguments": {"at": "the inn"}}</tool_call>'
WAIT = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'


def client_of(scripted: Scripted) -> OpenAI:
    return OpenAI(base_url=f"{scripted.server.url}/v1", api_key="none", max_retries=0)


def test_calls_of_a_chat_completion(scripted: Scripted) -> None:
    scripted.say(f"Let me see. {LOOK}\n{WAIT}")
    with client_of(scripted) as client:
        (choice,) = client.chat.completions.create(**ASK).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see. "
        calls = [call.function for call in choice.message.tool_calls or [] if call.type == "function"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("look", {"at": "the inn"}),
            ("wait", {}),
        ]
        ids = [call.id for call in choice.message.tool_calls or []]
        assert len(set(ids)) == 2

        (one,) = client.chat.completions.create(**ASK, parallel_tool_calls=False).choices
        assert len(one.message.tool_calls or []) == 1
        (none,) = client.chat.completions.create(**ASK, tool_choice="none").choices
        assert none.message.tool_calls is None
        assert none.message.content == f"Let me see. {LOOK}\n{WAIT}"


def test_calls_of_a_stream(scripted: Scripted) -> None:
    scripted.say(f"Let me see. {LOOK}\n{WAIT}")
    num_until_inside = len(scripted.tokenizer.encode(f"Let me see. {LOOK}".partition("inn")[0]))
    scripted.script.gate = gate = threading.Semaphore(num_until_inside)
    content, reason = "", None
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    with client_of(scripted) as client:
        for chunk in client.chat.completions.create(**ASK, stream=True):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.function.name:
                    assert call.id
                    assert call.type == "function"
                    names[call.index] = call.function.name
                arguments.setdefault(call.index, []).append(call.function.arguments or "")
                if call.function.arguments:
                    gate.release(1000)
    assert (content, reason, names) == ("Let me see. ", "tool_calls", {0: "look", 1: "wait"})
    assert json.loads("".join(arguments[0])) == {"at": "the inn"}
    assert len(arguments[0]) >= 2


def test_calls_of_a_response(scripted: Scripted) -> None:
    scripted.say(f"Hm. {LOOK}")
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]
    with client_of(scripted) as client:
        response = client.responses.create(model="script", input="x", tools=tools)
        message, call = response.output
        assert response.status == "completed"
        assert response.output_text == "Hm. "
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("look", {"at": "the inn"})
        events = list(client.responses.create(model="script", input="x", tools=tools, stream=True))
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == call.arguments
        assert done.output_index == 1

        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a hen"}
        conversation: Any = [{"role": "user", "content": "x"}, message.to_dict(), call.to_dict(), output]
        scripted.say("A hen.")
        assert client.responses.create(model="script", input=conversation).output_text == "A hen."


def test_choices_that_the_model_does_not_follow(scripted: Scripted) -> None:
    named: Any = {"type": "function", "function": {"name": "wait"}}
    with client_of(scripted) as client:
        scripted.say(LOOK)
        assert client.chat.completions.create(**ASK, tool_choice="required").choices[0].message.tool_calls
        with pytest.raises(api.UnprocessableEntityError) as caught:
            client.chat.completions.create(**ASK, tool_choice=named)
        assert (caught.value.param, caught.value.code) == ("tool_choice", "tool_not_called")
        scripted.say("no")
        with pytest.raises(api.UnprocessableEntityError):
            client.chat.completions.create(**ASK, tool_choice="required")
        with pytest.raises(api.APIError, match="called no tool"):
            list(client.chat.completions.create(**ASK, tool_choice="required", stream=True))


def test_calls_and_their_results_go_back_into_the_template(scripted: Scripted) -> None:
    scripted.say("A hen.")
    messages: Any = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "a hen"},
    ]
    with client_of(scripted) as client:
        answer = client.chat.completions.create(**{**ASK, "messages": messages})
        assert answer.choices[0].message.content == "A hen."
        messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
        with pytest.raises(api.BadRequestError, match="not JSON"):
            client.chat.completions.create(**{**ASK, "messages": messages})


@pytest.mark.parametrize("scripted", [ServerOptions()], indirect=True)
def test_a_model_without_tools_says_so(scripted: Scripted) -> None:
    scripted.say("hi")
    with client_of(scripted) as client:
        with pytest.raises(api.BadRequestError) as caught:
            client.chat.completions.create(**ASK)
        assert caught.value.param == "tools"
        assert client.chat.completions.create(**ASK, tool_choice="none").choices[0].message.content == "hi"
