"""Grammars as users give them, made into llguidance's form (https://github.com/guidance-ai/llguidance) and checked."""

import functools
import json
from collections.abc import Iterator
from typing import Any

from segue.errors import ParameterError

GrammarValue = str | tuple[str, ...] | bool
"""Of a field of `StructuredOutputsParams`; a schema as JSON."""

_JSON_OPTIONS: Any = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}",
    "coerce_one_of": True,
}
"""White space: room for any layout, but none for a small model that cannot stop indenting. `oneOf` is taken as `anyOf`:
an answer matches at least one of the schemas, which is all there is to say of those that exclude each other."""

_MAX_PROBES = 200
"""How many parts of a wrong schema are tried to find the one that is wrong."""


@functools.lru_cache(maxsize=64)
def grammar_text(name: str, value: GrammarValue) -> str:
    """llguidance's form of what an answer must match: a `value` of the field `name` of `StructuredOutputsParams`.

    Quick: whether the grammar is right is found out by `check_grammar`. Raises ParameterError when it is none.
    """
    try:
        return _text(name, value)
    except ValueError as error:
        raise _wrong(name, value, str(error)) from None


@functools.lru_cache(maxsize=64)
def check_grammar(name: str, value: GrammarValue) -> None:
    """Compiles the grammar, which may take some hundred milliseconds. Raises ParameterError when it is wrong."""
    error = _error(grammar_text(name, value))
    if error and name == "json":
        assert isinstance(value, str)
        path, error = _wrong_part(json.loads(value), error)
        if path:
            error = f"at {'.'.join(path)}: {error}"
    if error:
        raise _wrong(name, value, error)


def _wrong(name: str, value: GrammarValue, why: str) -> ParameterError:
    return ParameterError(f"structured_outputs.{name}", value, " ".join(why.split()))


def _error(text: str) -> str:
    """What is wrong with a grammar; empty when nothing is."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(text)


def _text(name: str, value: GrammarValue) -> str:
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ValueError("needs llguidance: pip install 'segue[structured]'") from None
    match name, value:
        case "json", str():
            return LLMatcher.grammar_from_json_schema(value, overrides=_JSON_OPTIONS)
        case "json_object", True:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
        case "regex", str():
            return LLMatcher.grammar_from_regex(value)
        case "choice", tuple():
            if not value or not all(isinstance(choice, str) and choice for choice in value):
                raise ValueError("must be a list of non-empty strings")
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
        case "grammar", str():
            return LLMatcher.grammar_from_lark(value)
        case _:
            raise ValueError("has the wrong type")


def _wrong_part(schema: object, error: str) -> tuple[list[str], str]:
    """The smallest part of a schema that is wrong by itself, as the keys that lead to it, and what is wrong there."""
    path: list[str] = []
    num_probes = 0
    definitions = (
        {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if isinstance(schema, dict)
        else {}
    )
    part = schema
    while True:
        for keys, child in _parts(part):
            num_probes += 1
            if num_probes > _MAX_PROBES:
                return path, error
            child_error = _error(_text("json", json.dumps({**definitions, **child})))
            if child_error:
                path += keys
                part, error = child, child_error
                break
        else:
            return path, error


def _parts(schema: object) -> Iterator[tuple[list[str], dict[str, object]]]:
    """The schemas right inside a schema, and the keys that lead to each."""
    if not isinstance(schema, dict):
        return
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        if isinstance(schema.get(key), dict):
            for name, each in schema[key].items():
                if isinstance(each, dict):
                    yield [key, str(name)], each
    for key in ("items", "additionalProperties", "allOf", "anyOf", "oneOf", "prefixItems"):
        match schema.get(key):
            case dict() as each:
                yield [key], each
            case list() as several:
                for i, each in enumerate(several):
                    if isinstance(each, dict):
                        yield [key, str(i)], each
