"""What POST /v1/responses answers: the response, its items, and the events by which they grow."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from segue.server.shared.logprobs import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class FunctionTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[dict[str, object]] = []
    logprobs: list[TokenLogprob] = []


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


OutputItem = MessageItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str


class PlainText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    schema: dict[str, object] | msgspec.UnsetType = msgspec.UNSET


class JsonSchemaText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    name: str | None
    schema: dict[str, object]
    description: str | None
    strict: bool | None


class TextSettings(msgspec.Struct, frozen=True):
    """As they were asked for."""

    format: PlainText | JsonObjectText | JsonSchemaText = PlainText()


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: None = None
    store: bool
    temperature: float
    text: TextSettings = TextSettings()
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[FunctionTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


# --- events ---------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = -1


class ResponseEvent(Event, kw_only=True):
    response: ResponseObject


class Created(ResponseEvent, tag="response.created"):
    pass


class InProgress(ResponseEvent, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, tag="response.completed"):
    pass


class Incomplete(ResponseEvent, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, tag="response.failed"):
    pass


class ItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class PartAdded(Event, kw_only=True, tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText


class PartDone(Event, kw_only=True, tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText


class TextDelta(Event, kw_only=True, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(Event, kw_only=True, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ArgumentsDelta(Event, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


AnyEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
)
