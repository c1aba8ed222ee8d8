"""The events that the server sends, and what they show of sessions, items and answers."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from segue.server.realtime.client_events import SamplingSettings
from segue.server.shared.http_errors import ErrorObject, error_of

MAX_MESSAGE_CHARS = 500
"""Of an error: some repeat what was wrong."""
TEXT_ONLY = ("text",)
"""The modalities that there are."""

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


# --- what they show -------------------------------------------------------------------------------------------


class ShownSession(SamplingSettings, kw_only=True):
    id: str
    object: Literal["realtime.session"] = "realtime.session"
    type: Literal["realtime"] = "realtime"
    model: str
    output_modalities: tuple[str, ...] = TEXT_ONLY
    instructions: str
    max_output_tokens: int | str
    tools: tuple[str, ...] = ()
    tool_choice: Literal["auto"] = "auto"


class ShownText(msgspec.Struct, frozen=True):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ShownItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["user", "assistant", "system"]
    content: list[ShownText]


class StatusDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer is not completed."""

    type: ResponseStatus
    reason: Literal["client_cancelled", "max_output_tokens"] | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET


class InputTokenDetails(msgspec.Struct, frozen=True, kw_only=True):
    text_tokens: int
    audio_tokens: int = 0
    cached_tokens: int


class OutputTokenDetails(msgspec.Struct, frozen=True, kw_only=True):
    text_tokens: int
    audio_tokens: int = 0


class ShownUsage(msgspec.Struct, frozen=True, kw_only=True):
    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokenDetails
    output_token_details: OutputTokenDetails


class ShownResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: ResponseStatus
    status_details: StatusDetails | None = None
    output: list[ShownItem] = []
    output_modalities: tuple[str, ...] = TEXT_ONLY
    max_output_tokens: int | str
    metadata: dict[str, str] | None
    usage: ShownUsage | None = None


class EventError(ErrorObject, frozen=True, kw_only=True):
    event_id: str | None
    """Of the client's event that was wrong."""


# --- events ---------------------------------------------------------------------------------------------------


class ServerEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    event_id: str = ""
    """The session's log numbers its events."""


class SessionEvent(ServerEvent, kw_only=True):
    session: ShownSession


class SessionCreated(SessionEvent, tag="session.created"):
    pass


class SessionResumed(SessionEvent, tag="session.resumed"):
    pass


class SessionUpdated(SessionEvent, tag="session.updated"):
    pass


class ConversationItemEvent(ServerEvent, kw_only=True):
    previous_item_id: str | None
    item: ShownItem


class ConversationItemAdded(ConversationItemEvent, tag="conversation.item.added"):
    pass


class ConversationItemDone(ConversationItemEvent, tag="conversation.item.done"):
    pass


class ConversationItemDeleted(ServerEvent, kw_only=True, tag="conversation.item.deleted"):
    item_id: str


class ConversationItemRetrieved(ServerEvent, kw_only=True, tag="conversation.item.retrieved"):
    item: ShownItem


class InputTextProgress(ServerEvent, kw_only=True, tag="input_text.progress"):
    num_tokens: int
    num_computed: int


class InputTextCleared(ServerEvent, tag="input_text.cleared"):
    pass


class InputTextCommitted(ServerEvent, kw_only=True, tag="input_text.committed"):
    item_id: str
    previous_item_id: str | None


class ResponseCreated(ServerEvent, kw_only=True, tag="response.created"):
    response: ShownResponse


class OutputItemEvent(ServerEvent, kw_only=True):
    response_id: str
    output_index: int = 0
    item: ShownItem


class OutputItemAdded(OutputItemEvent, tag="response.output_item.added"):
    pass


class OutputItemDone(OutputItemEvent, tag="response.output_item.done"):
    pass


class ContentEvent(ServerEvent, kw_only=True):
    response_id: str
    output_index: int = 0
    item_id: str
    content_index: int = 0


class ContentPartAdded(ContentEvent, kw_only=True, tag="response.content_part.added"):
    part: ShownText


class ContentPartDone(ContentEvent, kw_only=True, tag="response.content_part.done"):
    part: ShownText


class OutputTextDelta(ContentEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str


class OutputTextDone(ContentEvent, kw_only=True, tag="response.output_text.done"):
    text: str


class ResponseDone(ServerEvent, kw_only=True, tag="response.done"):
    response: ShownResponse


class ErrorEvent(ServerEvent, kw_only=True, tag="error"):
    error: EventError


AnyServerEvent = (
    SessionCreated
    | SessionResumed
    | SessionUpdated
    | ConversationItemAdded
    | ConversationItemDone
    | ConversationItemDeleted
    | ConversationItemRetrieved
    | InputTextProgress
    | InputTextCleared
    | InputTextCommitted
    | ResponseCreated
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | OutputItemDone
    | ResponseDone
    | ErrorEvent
)


def error_event(error: Exception, event_id: str | None = None) -> ErrorEvent:
    """What is wrong, with the client's event of this id if it was one."""
    fields = error_of(error)[1].error
    message = fields.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}…"
    return ErrorEvent(
        error=EventError(
            message=message, type=fields.type, param=fields.param, code=fields.code, event_id=event_id
        )
    )
