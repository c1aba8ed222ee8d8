"""The OpenAPI document, made from the endpoints and their structs."""

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from segue import __version__
from segue.server.shared.body import RequestBody
from segue.server.shared.http_errors import ErrorResponse

Schema = dict[str, Any]


class Endpoint(NamedTuple):
    """One path and method."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type[RequestBody] | None = None
    answer: type[msgspec.Struct] | None = None
    chunk: Any = None
    """What each event of a stream holds; None: it does not stream."""
    media_type: str | None = None
    """Of an answer that is no JSON."""


@cache
def openapi_json(endpoints: Sequence[Endpoint]) -> bytes:
    """The document, as JSON."""
    return msgspec.json.encode(_document(endpoints))


def _document(endpoints: Sequence[Endpoint]) -> Schema:
    types = list(dict.fromkeys(_types(endpoints)))
    schemas, components = msgspec.json.schema_components(
        types, schema_hook=_any_schema, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Schema] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path.replace(":path}", "}"), {})[endpoint.method.lower()] = _operation(
            endpoint, schema_of
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Segue",
            "version": __version__,
            "description": "OpenAI's API, as vLLM serves it. Fields that are not known are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _any_schema(kind: type) -> Schema:
    """`object`, the only type that msgspec has no schema for, may be anything."""
    assert kind is object, kind
    return {"description": "any JSON value"}


def _types(endpoints: Sequence[Endpoint]) -> Iterator[Any]:
    yield ErrorResponse
    for endpoint in endpoints:
        yield from (each for each in (endpoint.body, endpoint.answer, endpoint.chunk) if each is not None)


def _operation(endpoint: Endpoint, schema_of: dict[Any, Schema]) -> Schema:
    answer: Schema = {"description": endpoint.summary}
    if endpoint.answer is not None:
        answer["content"] = {"application/json": {"schema": schema_of[endpoint.answer]}}
    if endpoint.chunk is not None:
        answer["content"]["text/event-stream"] = {"schema": schema_of[endpoint.chunk]}
    if endpoint.media_type is not None:
        answer["content"] = {endpoint.media_type: {"schema": {"type": "string"}}}
    error = {
        "description": "OpenAI's error object",
        "content": {"application/json": {"schema": schema_of[ErrorResponse]}},
    }
    operation: Schema = {
        "operationId": endpoint.handler.__name__,
        "summary": endpoint.summary,
        "responses": {"200": answer, "default": error},
    }
    names = re.findall(r"\{(\w+)", endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[endpoint.body]}},
        }
    return operation
