"""null in a request is the same as leaving the field out, in every field of every endpoint and event."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from segue.server.app import ENDPOINTS
from segue.server.realtime.client_events import AnyClientEvent
from segue.server.shared.body import read_fields
from segue.server.shared.encoding import for_template
from segue.tokens.chat import Message
from tests.server.running import RunningServer

KINDS = [endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None] + [AnyClientEvent]
SAMPLES = {inspect.StrType: "a", inspect.IntType: 1, inspect.FloatType: 0.5, inspect.BoolType: True}


def sample(kind: inspect.Type) -> Any:
    """The least that can be read as this."""
    match kind:
        case inspect.UnionType(types=(first, *_)):
            return sample(first)
        case inspect.Metadata(type=inner):
            return sample(inner)
        case inspect.LiteralType(values=(first, *_)):
            return first
        case inspect.ListType():
            return []
        case inspect.DictType():
            return {}
        case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
            required = {field.encode_name: sample(field.type) for field in fields if field.required}
            return required if tag_field is None else {tag_field: tag, **required}
        case _:
            return SAMPLES[type(kind)]


def with_and_without(kind: inspect.Type) -> Iterator[tuple[str, Any, Any]]:
    """For each field that may be left out, however deep: its path, and a value with it null and without it."""
    match kind:
        case inspect.UnionType(types=types):
            for each in types:
                yield from with_and_without(each)
        case inspect.Metadata(type=inner):
            yield from with_and_without(inner)
        case inspect.ListType(item_type=item):
            for path, null, absent in with_and_without(item):
                yield f"[]{path}", [null], [absent]
        case inspect.DictType(value_type=value):
            if not isinstance(value, inspect.AnyType | inspect.CustomType):
                yield "[key]", {"1": None}, {}
        case inspect.StructType(fields=fields):
            least = sample(kind)
            for field in fields:
                if not field.required:
                    yield f".{field.encode_name}", {**least, field.encode_name: None}, least
                for path, null, absent in with_and_without(field.type):
                    yield (
                        f".{field.encode_name}{path}",
                        {**least, field.encode_name: null},
                        {**least, field.encode_name: absent},
                    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_null_is_absent(kind: Any) -> None:
    cases = list(with_and_without(inspect.type_info(kind)))
    assert cases
    for path, null, absent in cases:
        assert read_fields(null, kind) == read_fields(absent, kind), path


def test_null_stays_where_it_means_something() -> None:
    schema = {"enum": [None, 1], "default": None, "properties": {"a": {"const": None}}}
    chat = next(endpoint.body for endpoint in ENDPOINTS if endpoint.path == "/v1/chat/completions")
    body: Any = read_fields(
        {
            "messages": [],
            "chat_template_kwargs": {"a": None},
            "structured_outputs": {"json": schema, "regex": None},
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema, "name": None}},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": None}}],
        },
        chat,
    )
    assert body.chat_template_kwargs == {"a": None}
    assert body.structured_outputs.json == schema
    assert body.response_format.json_schema.schema == schema
    assert body.tools[0].function.parameters == schema


def test_messages_for_a_template_have_no_nulls() -> None:
    call = {"id": None, "index": None, "function": {"name": "f", "arguments": None, "strict": None}}
    messages: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}], "name": None},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "assistant", "tool_calls": [call]},
    ]
    assert for_template(messages, "") == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]


def test_null_tells_a_template_nothing(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hen"}]
    tool = {"type": "function", "function": {"name": "look"}}
    nulls = {"type": "function", "function": {"name": "look", "description": None, "parameters": None}}
    with server.client() as client:
        plain, null = (
            client.post("/tokenize", json={"messages": messages, "tools": [each]}).json()
            for each in (tool, nulls)
        )
    assert plain["tokens"] == null["tokens"]
