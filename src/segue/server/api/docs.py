"""GET /docs: the OpenAPI document as a page, with nothing from elsewhere."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
summary { cursor: pointer; padding: .4rem 0 }
code { font-family: ui-monospace, monospace }
b { display: inline-block; min-width: 3.5rem }
table { border-collapse: collapse; margin: .5rem 0 1rem; width: 100% }
td, th { border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); padding: .2rem .8rem .2rem 0;
  text-align: left; vertical-align: top }
"""


def docs_page(openapi: bytes) -> str:
    """HTML without scripts."""
    document = json.loads(openapi)
    info = document["info"]
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>',
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        '<p>For machines: <a href="/openapi.json">openapi.json</a>.</p><h2>Requests</h2>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation(method, path, operation)
    parts.append("<h2>Objects</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += _object(name, schema)
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    summary = escape(operation["summary"])
    yield f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> {summary}</summary>"
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        yield f"<p>Body: {_type(schema)}</p>"
    for media_type, content in operation["responses"]["200"].get("content", {}).items():
        yield f"<p>Answer, <code>{escape(media_type)}</code>: {_type(content['schema'])}</p>"
    yield "</details>"


def _object(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
    yield f"<p>{escape(schema.get('description', ''))}</p><table><tr><th>Field<th>Type<th>"
    required = schema.get("required", ())
    for field, value in schema.get("properties", {}).items():
        note = value.get("description", "") + (" (required)" if field in required else "")
        yield f"<tr><td><code>{escape(field)}</code><td>{_type(value)}<td>{escape(note)}"
    yield "</table></details>"


def _type(schema: Mapping[str, Any]) -> str:
    """HTML for what a value may be."""
    match schema:
        case {"$ref": str(ref)}:
            name = escape(ref.rpartition("/")[2])
            return f'<a href="#{name}">{name}</a>'
        case {"anyOf": [*options]}:
            return " or ".join(_type(option) for option in options)
        case {"enum": [*values]}:
            return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
        case {"type": "array", "items": dict(items)}:
            return f"list of {_type(items)}"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"object of {_type(values)}"
        case {"type": str(name)}:
            return escape(name)
        case _:
            return "anything"
