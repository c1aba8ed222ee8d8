"""Structured output through the server: only valid answers, and clear errors."""

import json
import re
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError, OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [{"role": "user", "content": "the hen"}]


def check(text: str | None) -> None:
    answer = json.loads(text or "")
    assert set(answer) == {"colour", "count"}
    assert answer["colour"] in ("red", "green")
    assert 1 <= answer["count"] <= 9


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_schema_in_all_endpoints(openai: OpenAI, temperature: float) -> None:
    response_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "egg", "schema": SCHEMA, "strict": True},
    }
    chat = openai.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=response_format, temperature=temperature, n=2, seed=1
    )
    for choice in chat.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)
    stream = openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format=response_format,
        temperature=temperature,
        seed=1,
        stream=True,
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert streamed == chat.choices[0].message.content
    text: Any = {"format": {"type": "json_schema", "name": "egg", "schema": SCHEMA}}
    check(
        openai.responses.create(model="tiny", input="the hen", text=text, temperature=temperature).output_text
    )
    completion = openai.completions.create(
        model="tiny", prompt="the hen", max_tokens=400, extra_body={"structured_outputs": {"json": SCHEMA}}
    )
    check(completion.choices[0].text)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", "it depends"]}, "yes|no|it depends"),
        ({"grammar": 'start: "a" start "b" | "c"'}, "a*cb*"),
    ],
)
def test_other_forms(openai: OpenAI, structured: dict[str, object], pattern: str) -> None:
    num_ended = 0
    for seed in range(4):
        completion = openai.completions.create(
            model="tiny",
            prompt="the hen",
            max_tokens=60,
            temperature=1.0,
            seed=seed,
            extra_body={"structured_outputs": structured},
        )
        (choice,) = completion.choices
        if choice.finish_reason == "stop":
            num_ended += 1
            assert re.fullmatch(pattern, choice.text), choice.text
        else:
            assert "grammar" in structured, "this answer can have an end only"
            assert re.fullmatch("a+(cb*)?", choice.text), choice.text
    assert num_ended > 0


def test_json_object_with_a_schema(openai: OpenAI) -> None:
    response_format: Any = {"type": "json_object", "schema": SCHEMA}
    answer = openai.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=response_format, max_tokens=400
    )
    check(answer.choices[0].message.content)


def test_json_object(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_tokens=30,
        temperature=0,
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("extra", "param", "why"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"structured_outputs": {"regex": "((("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "Expected"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "cannot go together",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"a": {"items": {"pattern": "((("}}}}},
                }
            },
            "response_format.json_schema.schema",
            "at properties.a.items: regex parse error",
        ),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
    ],
)
def test_errors_name_the_field(openai: OpenAI, extra: dict[str, object], param: str, why: str) -> None:
    with pytest.raises(BadRequestError, match=re.escape(why)) as caught:
        openai.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    assert (caught.value.param or "").startswith(param)


def test_a_wrong_schema_of_a_response_names_its_field(openai: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "egg", "schema": {"type": "strin"}}}
    with pytest.raises(BadRequestError, match="Invalid type") as caught:
        openai.responses.create(model="tiny", input="x", text=text)
    assert caught.value.param == "text.format.schema"


def test_a_grammar_over_a_limit_is_an_error_and_others_go_on(openai: OpenAI) -> None:
    grammar = "start: " + " | ".join(f'"w{i}x"' for i in range(3000))
    with pytest.raises(InternalServerError, match="the grammar of the answer is over a limit"):
        openai.with_options(max_retries=0).completions.create(
            model="tiny", prompt="the hen", extra_body={"structured_outputs": {"grammar": grammar}}
        )
    assert openai.completions.create(model="tiny", prompt="the hen").choices[0].finish_reason == "length"
