"""The events that clients send. Fields that are not known are ignored, as OpenAI's server does."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from segue.server.shared.body import read_fields
from segue.server.shared.http_errors import HttpError
from segue.server.shared.sampling import Int

Id = Annotated[str, Meta(max_length=256)]
"""Of an event, an item or an answer."""
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""With OpenAI's limits."""
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ItemFields(msgspec.Struct, kw_only=True):
    """An item as a client gives it."""

    type: str = "message"
    id: Id | None = None
    role: Literal["user", "assistant", "system"] = "user"
    content: list[ContentPart] = []


class SamplingSettings(msgspec.Struct, kw_only=True):
    """As clients set them and are shown those that were set, under the names that `SamplingParams` has."""

    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    top_k: Int | UnsetType | None = UNSET
    min_p: float | UnsetType | None = UNSET
    seed: Seed | UnsetType | None = UNSET
    stop: list[str] | UnsetType | None = UNSET
    presence_penalty: float | UnsetType | None = UNSET
    frequency_penalty: float | UnsetType | None = UNSET
    repetition_penalty: float | UnsetType | None = UNSET

    def sampling(self) -> dict[str, Any]:
        """Those that are set."""
        values = ((name, getattr(self, name)) for name in SamplingSettings.__struct_fields__)
        return {name: value for name, value in values if value is not None and value is not UNSET}


class SessionFields(SamplingSettings, kw_only=True):
    """What `session.update` can set. A field that is left out, or null, stays what it is."""

    type: str | None = None
    instructions: str | None = None
    max_output_tokens: Int | Literal["inf"] | None = None
    output_modalities: list[str] | None = None
    tools: list[Any] | None = None
    modalities: Any = None
    """The beta interface's name, which is refused like the next one."""
    max_response_output_tokens: Any = None


class ResponseFields(SessionFields, kw_only=True):
    """What `response.create` can set, for this answer only."""

    conversation: Literal["auto", "none"] | None = None
    input: list[ItemFields] | None = None
    metadata: Metadata | None = None


class ClientEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    event_id: Id | None = None


class SessionUpdate(ClientEvent, kw_only=True, tag="session.update"):
    session: SessionFields


class ItemCreate(ClientEvent, kw_only=True, tag="conversation.item.create"):
    item: ItemFields
    previous_item_id: Id | None = None
    """After which item; "root": before all; None: at the end."""


class ItemDelete(ClientEvent, kw_only=True, tag="conversation.item.delete"):
    item_id: Id


class ItemRetrieve(ClientEvent, kw_only=True, tag="conversation.item.retrieve"):
    item_id: Id


class ResponseCreate(ClientEvent, kw_only=True, tag="response.create"):
    response: ResponseFields | None = None


class ResponseCancel(ClientEvent, kw_only=True, tag="response.cancel"):
    response_id: Id | None = None


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
    event_id: Id | None = None


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


def texts_of(event: AnyClientEvent) -> list[str]:
    """All that the model may have to read of an event."""
    match event:
        case SessionUpdate(session=session):
            return [session.instructions or ""]
        case ItemCreate(item=item):
            return [part.text or "" for part in item.content]
        case ResponseCreate(response=ResponseFields(instructions=instructions, input=items)):
            return [instructions or "", *(part.text or "" for item in items or () for part in item.content)]
        case InputTextAppend(text=text) | InputTextRevise(text=text):
            return [text]
        case _:
            return []
