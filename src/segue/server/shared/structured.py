"""What an answer must match, as OpenAI's and vLLM's clients say it."""

import asyncio
from typing import Any, Literal

import msgspec

from segue.errors import ParameterError
from segue.sample.params import SamplingParams, StructuredOutputsParams
from segue.server.shared.http_errors import fields_named


class JsonSchema(msgspec.Struct, kw_only=True):
    schema: dict[str, Any] | None = None
    """None: any object."""
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Answers match in any case."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's form; in /v1/responses the fields of `json_schema` stand beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def structured(self) -> StructuredOutputsParams | None:
        """Raises ParameterError when the schema is missing."""
        if self.type == "text":
            return None
        schema = self.schema if self.json_schema is None else self.json_schema.schema
        if schema is None and self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if schema is None:
            raise ParameterError("response_format", self.type, "needs a schema in json_schema.schema")
        return StructuredOutputsParams(json=schema)


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's form: exactly one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In Lark's notation."""
    json_object: bool | None = None

    def structured(self) -> StructuredOutputsParams:
        """Raises ParameterError unless exactly one is given."""
        return StructuredOutputsParams(
            **{
                name: getattr(self, name)
                for name in self.__struct_fields__
                if getattr(self, name) is not None
            }
        )


def structured_outputs(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What the two fields come to. Raises ParameterError when both ask for something."""
    asked = None if response_format is None else response_format.structured()
    if structured is not None:
        if asked is not None:
            raise ParameterError("structured_outputs", "…", "cannot go together with response_format")
        asked = structured.structured()
    return asked


async def check_grammar(
    params: SamplingParams, response_format: ResponseFormat | None, *, field: str = "response_format"
) -> None:
    """Raises ParameterError, which names the client's field, when a grammar is wrong. `field` is the name of
    `response_format`. Compiles it, on another thread: the answers of others go on."""
    if params.structured_outputs is None:
        return
    names = {}
    if response_format is not None and response_format.type != "text":
        inside = ".json_schema.schema" if response_format.json_schema is not None else ".schema"
        names["structured_outputs.json"] = field + inside
    with fields_named(names):
        await asyncio.to_thread(params.check_grammar)
