"""The events that clients send. Fields that are not known are ignored, as OpenAI's server does."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from segue.server.body import read_fields
from segue.server.errors import HttpError


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ItemFields(msgspec.Struct, kw_only=True):
    """An item as a client gives it."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system"] = "user"
    content: list[ContentPart] = []


class SessionFields(msgspec.Struct, kw_only=True):
    """What `session.update` can set. A field that is left out stays what it is."""

    instructions: str | msgspec.UnsetType | None = msgspec.UNSET
    max_output_tokens: int | Literal["inf"] | msgspec.UnsetType | None = msgspec.UNSET
    output_modalities: list[str] | msgspec.UnsetType = msgspec.UNSET
    tools: list[Any] | msgspec.UnsetType = msgspec.UNSET
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    top_p: float | msgspec.UnsetType = msgspec.UNSET
    top_k: int | msgspec.UnsetType = msgspec.UNSET
    min_p: float | msgspec.UnsetType = msgspec.UNSET
    seed: int | msgspec.UnsetType | None = msgspec.UNSET
    stop: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    presence_penalty: float | msgspec.UnsetType = msgspec.UNSET
    frequency_penalty: float | msgspec.UnsetType = msgspec.UNSET
    repetition_penalty: float | msgspec.UnsetType = msgspec.UNSET


class ResponseFields(SessionFields, kw_only=True):
    """What `response.create` can set, for this answer only."""

    conversation: Literal["auto", "none"] | None = None
    input: list[ItemFields] | None = None
    metadata: dict[str, str] | None = None


class ClientEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    event_id: str | None = None


class SessionUpdate(ClientEvent, kw_only=True, tag="session.update"):
    session: SessionFields


class ItemCreate(ClientEvent, kw_only=True, tag="conversation.item.create"):
    item: ItemFields
    previous_item_id: str | None = None
    """After which item; "root": before all; None: at the end."""


class ItemDelete(ClientEvent, kw_only=True, tag="conversation.item.delete"):
    item_id: str


class ItemRetrieve(ClientEvent, kw_only=True, tag="conversation.item.retrieve"):
    item_id: str


class ResponseCreate(ClientEvent, kw_only=True, tag="response.create"):
    response: ResponseFields | None = None


class ResponseCancel(ClientEvent, kw_only=True, tag="response.cancel"):
    response_id: str | None = None


class InputTextAppend(ClientEvent, kw_only=True, tag="input_text.append"):
    text: str


class InputTextRevise(ClientEvent, kw_only=True, tag="input_text.revise"):
    text: str


class InputTextClear(ClientEvent, kw_only=True, tag="input_text.clear"):
    pass


class InputTextCommit(ClientEvent, kw_only=True, tag="input_text.commit"):
    pass


AnyClientEvent = (
    SessionUpdate
    | ItemCreate
    | ItemDelete
    | ItemRetrieve
    | ResponseCreate
    | ResponseCancel
    | InputTextAppend
    | InputTextRevise
    | InputTextClear
    | InputTextCommit
)


class _Named(msgspec.Struct):
    event_id: str | None = None


def read_client_event(data: str) -> AnyClientEvent:
    """Raises HttpError, with the field that is wrong."""
    try:
        fields = msgspec.json.decode(data)
    except RecursionError:
        raise HttpError("the event is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise HttpError(f"the event is not valid JSON: {error}", code="invalid_json") from None
    event: AnyClientEvent = read_fields(fields, AnyClientEvent)
    return event


def event_id_of(data: str) -> str | None:
    """Of an event that cannot be read otherwise, as far as it can be told."""
    try:
        return msgspec.json.decode(data, type=_Named).event_id
    except (msgspec.DecodeError, RecursionError):
        return None


def text_of(parts: Sequence[ContentPart]) -> str:
    """Raises HttpError for what is not text."""
    for index, part in enumerate(parts):
        if part.type not in ("input_text", "output_text", "text") or part.text is None:
            raise HttpError(
                f"item.content[{index}]: this server takes text only", param=f"item.content[{index}]"
            )
    return "".join(part.text or "" for part in parts)
