"""What POST /v1/responses is asked: its fields, and the input as chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from segue.errors import ParameterError
from segue.sample.params import SamplingParams
from segue.server.api.response_objects import (
    FunctionTool,
    JsonObjectText,
    JsonSchemaText,
    NamedFunction,
    PlainText,
)
from segue.server.api.stored_items import StoredItems
from segue.server.shared.body import Unsupported
from segue.server.shared.http_errors import fields_named
from segue.server.shared.options import ServerOptions
from segue.server.shared.sampling import IGNORED_SAMPLING, UNSUPPORTED_SAMPLING, Count, SamplingFields
from segue.server.shared.serving import Serving
from segue.server.shared.structured import ResponseFormat
from segue.server.shared.tools.calls import (
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolChoice,
    ToolUse,
)

LOGPROBS = "message.output_text.logprobs"
"""In `include`: the answer's logprobs."""


class TextOptions(msgspec.Struct, kw_only=True):
    format: ResponseFormat | None = None
    verbosity: str | None = None
    """Without a meaning here."""


class ResponsesRequest(SamplingFields, kw_only=True):
    """OpenAI's fields of a response, and vLLM's for sampling."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED_SAMPLING,
        "previous_response_id": Unsupported("responses are not stored here; send the conversation as input"),
        "conversation": Unsupported("conversations are not stored here; send the conversation as input"),
        "background": Unsupported("is not supported", (False,)),
        "prompt": Unsupported("prompt templates are not supported; use instructions and input"),
        "truncation": Unsupported("is not supported; shorten the input", ("disabled",)),
    }
    ignored: ClassVar[frozenset[str]] = IGNORED_SAMPLING | {
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "max_tool_calls",
        "stream_options",
    }

    input: str | list[dict[str, object]]
    """A text, or messages, function calls and their outputs."""
    instructions: str | None = None
    """What the model is told first."""
    max_output_tokens: Count | None = None
    """Left out: as many as fit."""
    include: list[str] | None = None
    top_logprobs: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    """Unless false, the items of the answer are kept for `item_reference`."""
    text: TextOptions | None = None

    def sampling_params(self, options: ServerOptions) -> SamplingParams:
        """Raises ParameterError."""
        wants_logprobs = LOGPROBS in (self.include or ())
        with fields_named({"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}):
            return self.params(
                options=options,
                max_tokens=self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
                response_format=self.response_format,
            )

    @property
    def response_format(self) -> ResponseFormat | None:
        return None if self.text is None else self.text.format

    def tool_use(self, serving: Serving) -> ToolUse:
        """Raises ParameterError."""
        tools = [
            Tool(
                type="function",
                function=FunctionDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.parameters,
                    strict=tool.strict,
                ),
            )
            for tool in self.tools or ()
        ]
        choice: ToolChoice | None
        if isinstance(self.tool_choice, NamedFunction):
            choice = NamedToolChoice(type="function", function=FunctionName(name=self.tool_choice.name))
        else:
            choice = self.tool_choice
        return ToolUse.of(serving, tools, choice, self.parallel_tool_calls)

    @property
    def text_format(self) -> PlainText | JsonObjectText | JsonSchemaText:
        """What was asked for, as a response says it."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return PlainText()
        given = asked if asked.json_schema is None else asked.json_schema
        if asked.type == "json_schema" and given.schema is not None:
            return JsonSchemaText(
                name=given.name, schema=given.schema, description=given.description, strict=given.strict
            )
        return JsonObjectText(schema=msgspec.UNSET if given.schema is None else given.schema)

    def messages(self, stored: StoredItems) -> list[dict[str, Any]]:
        """The input as chat messages. Raises ParameterError."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for i, given in enumerate(self.input):
            match item := _resolved(i, given, stored):
                case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                    call = {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                    if messages and messages[-1]["role"] == "assistant":
                        messages[-1].setdefault("tool_calls", []).append(call)
                    else:
                        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                case {"type": "function_call_output", "call_id": call_id, "output": output}:
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(i, output)})
                case {"type": "reasoning"}:
                    pass
                case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                    messages.append({"role": role, "content": _text(i, content)})
                case _:
                    raise ParameterError(
                        "input", _kind(item), f"item {i} is no message, function call or output of one"
                    )
        return messages


def _resolved(i: int, item: dict[str, object], stored: StoredItems) -> dict[str, object]:
    """An item, or the one that it refers to."""
    match item:
        case {"type": "item_reference", "id": str(item_id)}:
            found = stored.find(item_id)
            if found is None:
                raise ParameterError(
                    "input",
                    item_id[:60],
                    f"item {i} refers to an item that is not kept here (any more): send the item itself, as "
                    "clients do that are told store=false",
                )
            return found
        case _:
            return item


def _text(i: int, content: object) -> str:
    """The text of a message's content, or of a function's output."""
    if isinstance(content, str):
        return content
    parts: Sequence[object] = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise ParameterError("input", _kind(part), f"item {i} has a part that is not text")
    return "\n".join(texts)


def _kind(item: object) -> str:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return kind[:60] if isinstance(kind, str) else type(item).__name__
