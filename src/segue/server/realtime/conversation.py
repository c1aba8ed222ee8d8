"""A conversation's items and its open input.

    items          system ─ user ─ assistant ─ user          in the order in which the model reads them
    input_text     "and what about the w"                    still arriving; becomes a user item when committed

A `ConversationState` is a value. Each operation returns the state after it, or raises and there is none. What a live
session is to know of it is another value, `Told`; live_conversation.py makes a session know that.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec
from msgspec.structs import replace

from segue.server.realtime.server_events import ShownItem, ShownText
from segue.server.shared.http_errors import HttpError
from segue.server.shared.serving import new_id
from segue.tokens.chat import Message

Role = Literal["user", "assistant", "system"]


class ConversationItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message."""

    id: str
    role: Role
    text: str
    is_complete: bool = True

    @classmethod
    def new(cls, role: Role, text: str, item_id: str | None = None) -> "ConversationItem":
        return cls(id=item_id or new_id("item_"), role=role, text=text)

    @property
    def message(self) -> Message:
        return {"role": self.role, "content": self.text}

    def shown(self, *, is_begun: bool = False) -> ShownItem:
        """`is_begun`: its text is still to come."""
        if is_begun:
            return ShownItem(id=self.id, status="in_progress", role=self.role, content=[])
        kind: Literal["output_text", "input_text"]
        kind = "output_text" if self.role == "assistant" else "input_text"
        status: Literal["completed", "incomplete"] = "completed" if self.is_complete else "incomplete"
        return ShownItem(id=self.id, status=status, role=self.role, content=[ShownText(kind, self.text)])


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a live session knows, or is to know: all that is before its turn, and the turn."""

    instructions: str | None
    items: tuple[ConversationItem, ...]
    role: Role = "user"
    """Who speaks in the turn,"""
    text: str = ""
    """... what was said so far,"""
    is_complete: bool = False
    """... and whether that is all."""

    @property
    def before(self) -> "Known":
        """The same before the turn has begun."""
        return Known(instructions=self.instructions, items=self.items, role=self.role)

    def is_beside(self, other: "Known") -> bool:
        """Whether they differ in the turn at most: the only part that a live session can have changed."""
        return self.instructions == other.instructions and self.items == other.items


class ConversationState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a conversation that must be kept to go on with it later."""

    now: datetime
    """The time that a chat template may tell: that of the beginning."""
    instructions: str | None = None
    items: tuple[ConversationItem, ...] = ()
    input_text: str = ""
    kept_ids: tuple[int, ...] = ()
    """The token ids up to the end of the last answer that the engine gave in this conversation,"""
    num_kept_items: int = 0
    """... and how many items they are."""

    @property
    def has_question(self) -> bool:
        """Whether the last item waits for an answer."""
        return bool(self.items) and self.items[-1].role != "assistant"

    @property
    def to_know(self) -> Known:
        """What a live session is to know: its turn is the open input or, without any, the last item."""
        if self.has_question and not self.input_text:
            *before, last = self.items
            return Known(
                instructions=self.instructions,
                items=tuple(before),
                role=last.role,
                text=last.text,
                is_complete=True,
            )
        return Known(instructions=self.instructions, items=self.items, text=self.input_text)

    @property
    def num_kept_messages(self) -> int:
        """How many of `messages` the kept ids are."""
        return self.num_kept_items and self.num_kept_items + (self.instructions is not None)

    def find(self, item_id: str) -> int:
        """An item's index. Raises HttpError."""
        for index, item in enumerate(self.items):
            if item.id == item_id:
                return index
        raise HttpError(f"there is no item {item_id!r}", param="item_id", code="item_not_found")

    def previous_id(self, index: int) -> str | None:
        return self.items[index - 1].id if index else None

    def inserted(self, index: int, item: ConversationItem) -> "ConversationState":
        """With an item before the one at `index`. Raises HttpError."""
        if any(item.id == other.id for other in self.items):
            raise HttpError(f"there is an item {item.id!r} already", param="item.id")
        return self._cut(index, items=(*self.items[:index], item, *self.items[index:]))

    def deleted(self, index: int) -> "ConversationState":
        return self._cut(index, items=(*self.items[:index], *self.items[index + 1 :]))

    def instructed(self, instructions: str) -> "ConversationState":
        return self._cut(0, instructions=instructions or None)

    def committed(self) -> "ConversationState":
        """The input is complete: it is the last item. Raises HttpError."""
        if not self.input_text:
            raise HttpError("there is no input to commit; append some", code="input_text_commit_empty")
        item = ConversationItem.new("user", self.input_text)
        return replace(self, items=(*self.items, item), input_text="")

    def answered(self, item: ConversationItem, kept_ids: Sequence[int] | None) -> "ConversationState":
        """With this answer as the last item; `kept_ids` are all up to its end, if that is known."""
        state = replace(self, items=(*self.items, item))
        if kept_ids is None:
            return state
        return replace(state, kept_ids=tuple(kept_ids), num_kept_items=len(state.items))

    def _cut(self, index: int, **changes: object) -> "ConversationState":
        """Items from here on are not what they were."""
        if index < self.num_kept_items:
            changes |= {"kept_ids": (), "num_kept_items": 0}
        return replace(self, **changes)


def messages_of(instructions: str | None, items: Sequence[ConversationItem]) -> list[Message]:
    """What the model reads."""
    head: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    return head + [item.message for item in items]
