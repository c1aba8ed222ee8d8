"""A conversation's items and its open input, as one live session of the engine.

    items          system ─ user ─ assistant ─ user          in the order in which the model reads them
    input_text     "and what about the w"                    still arriving; becomes a user item when committed

The live session is told what is new as it comes. What it cannot be told (an item in the middle, one that is deleted,
new instructions) makes another live session, which shares all that is computed of the part in front.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import structs

from segue.answers.outputs import CompletionOutput
from segue.errors import SegueError, SessionError
from segue.llm.async_llm import AsyncLLM
from segue.sample.params import SamplingParams
from segue.server.realtime.server_events import ShownItem, ShownText
from segue.server.shared.http_errors import HttpError
from segue.server.shared.serving import new_id
from segue.session.live import Answer, Session
from segue.tokens.chat import Message

Role = Literal["user", "assistant", "system"]


class Item(msgspec.Struct, kw_only=True):
    """A message."""

    id: str
    role: Role
    text: str
    is_complete: bool = True

    @classmethod
    def new(cls, role: Role, text: str, item_id: str | None = None) -> "Item":
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


class ConversationState(msgspec.Struct, kw_only=True):
    """All of a conversation that must be kept to go on with it later."""

    now: datetime
    """The time that a chat template may tell: that of the beginning."""
    instructions: str | None = None
    items: list[Item] = msgspec.field(default_factory=list)
    input_text: str = ""
    kept_ids: list[int] = msgspec.field(default_factory=list)
    """The token ids up to the end of the last answer that the engine gave in this conversation,"""
    num_kept_items: int = 0
    """... and how many items they are."""


class Conversation:
    """Not to be shared between event loops. An error leaves it as it was."""

    def __init__(self, llm: AsyncLLM, state: ConversationState) -> None:
        self.state = state
        self._llm = llm
        self._live: Session | None = None
        self._num_told = 0
        """Items of which the live session knows."""
        self._has_item_as_turn = False
        """Whether the last of them is its turn, not answered yet; else its turn is the open input."""
        self._role = "user"
        """Who speaks in its turn."""
        self._answer: Answer | None = None
        self._records = True
        """Whether the answer becomes an item."""

    @property
    def live(self) -> Session | None:
        """What the engine has of it."""
        return self._live

    @property
    def is_answering(self) -> bool:
        return self._answer is not None

    # --- items ------------------------------------------------------------------------------------------------

    def find(self, item_id: str) -> int:
        """An item's index. Raises HttpError."""
        for index, item in enumerate(self.state.items):
            if item.id == item_id:
                return index
        raise HttpError(f"there is no item {item_id!r}", param="item_id", code="item_not_found")

    def previous_id(self, index: int) -> str | None:
        return self.state.items[index - 1].id if index else None

    def insert(self, index: int, item: Item) -> None:
        """An item before the one at `index`."""
        self._require_no_answer("conversation.item.create")
        state = self.state
        if any(item.id == other.id for other in state.items):
            raise HttpError(f"there is an item {item.id!r} already", param="item.id")
        is_last = index == len(state.items)
        with self._changing():
            state.items = [*state.items[:index], item, *state.items[index:]]
            if is_last and item.role != "assistant" and not state.input_text:
                self._speak(item)
            else:
                self._start_anew(index)
                self._listen()

    def delete(self, index: int) -> None:
        self._require_no_answer("conversation.item.delete")
        del self.state.items[index]
        self._start_anew(index)

    def set_instructions(self, instructions: str) -> None:
        if instructions != (self.state.instructions or ""):
            self._require_no_answer("session.update")
            with self._changing():
                self.state.instructions = instructions or None
                self._start_anew(0)
                if instructions:
                    self._listen()

    # --- input that is still arriving -------------------------------------------------------------------------

    def append(self, text: str) -> None:
        """More input. While an answer comes, it waits for the end of it."""
        if self._answer is None:
            self._listen(self.state.input_text + text)
        self.state.input_text += text

    def revise(self, text: str) -> None:
        """Other input in place of what there is."""
        if self._answer is None:
            self._listen(text)
        self.state.input_text = text

    def clear(self) -> None:
        """No input. This is always possible."""
        self.state.input_text = ""
        if self._answer is None and self._live is not None and not self._has_item_as_turn:
            try:
                self._live.revise("")
            except SegueError:
                self._forget_live()

    def commit(self) -> Item:
        """The input is complete: it becomes an item."""
        self._require_no_answer("input_text.commit")
        if not self.state.input_text:
            raise HttpError("there is no input to commit; append some", code="input_text_commit_empty")
        self._listen().commit()
        item = Item.new("user", self.state.input_text)
        self.state.items.append(item)
        self.state.input_text = ""
        self._num_told, self._has_item_as_turn = len(self.state.items), True
        return item

    # --- answers ----------------------------------------------------------------------------------------------

    def respond(self, params: SamplingParams) -> Answer:
        """Answer the last item."""
        self._require_no_answer("response.create")
        items = self.state.items
        if not items or items[-1].role == "assistant":
            raise SessionError("response.create: there is nothing to answer; add an item or input_text")
        try:
            live = self._usable()
            if live is None or not self._has_item_as_turn or self._num_told < len(items):
                live = self._speak(items[-1])
            self._answer, self._records = live.respond(params), True
        except BaseException:
            self._forget_live()
            raise
        return self._answer

    def respond_apart(
        self, messages: Sequence[Message], params: SamplingParams, *, records: bool
    ) -> tuple[Session, Answer]:
        """Answer these messages in a session of their own, which the caller closes."""
        self._require_no_answer("response.create")
        if not messages:
            raise HttpError("response.input: is empty", param="response.input")
        session = self._llm.session([*messages[:-1]], role=str(messages[-1]["role"]))
        try:
            session.append(str(messages[-1]["content"]))
            answer = session.respond(params)
        except BaseException:
            session.close()
            raise
        self._answer, self._records = answer, records
        return session, answer

    def messages(self, num_items: int | None = None) -> list[Message]:
        """What the model reads: the instructions and the first items (None: all)."""
        head: list[Message] = []
        if self.state.instructions:
            head.append({"role": "system", "content": self.state.instructions})
        return head + [item.message for item in self.state.items[:num_items]]

    def interrupt(self, session: Session | None) -> None:
        """End the answer where it is; `session` is the one apart, if it is given there."""
        session = session or self._live
        if session is not None:
            session.interrupt()

    def answered(self, item: Item, answer: CompletionOutput, session: Session | None) -> None:
        """The answer is over: what was read of it is history.

        Raises what is wrong with input that came meanwhile, which stays until it is revised or cleared.
        """
        self._answer = None
        state = self.state
        item.text = answer.text
        if session is not None:
            session.close()
        if self._records:
            state.items.append(item)
            if session is None and self._usable() is not None:
                assert self._live is not None
                state.kept_ids = self._live.kept_ids
                state.num_kept_items = self._num_told = len(state.items)
                self._has_item_as_turn = False
            else:
                self._forget_live()
        if state.input_text:
            self._listen()

    def close(self) -> None:
        """Nothing of it is to stay in the engine."""
        self._forget_live()

    # --- the live session -------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """An error in here leaves the state as it was; the live session is made anew when it is needed."""
        before = structs.asdict(self.state)
        try:
            yield
        except BaseException:
            for name, value in before.items():
                setattr(self.state, name, value)
            self._forget_live()
            raise

    def _require_no_answer(self, operation: str) -> None:
        if self._answer is not None:
            raise HttpError(
                f"{operation}: an answer is being given; wait for response.done, or send response.cancel",
                code="conversation_already_has_active_response",
            )

    def _usable(self) -> Session | None:
        if self._live is not None and self._live.closed.is_set():
            self._forget_live()
        return self._live

    def _forget_live(self) -> None:
        if self._live is not None:
            self._live.close()
        self._live = None

    def _start_anew(self, index: int) -> None:
        """Items from here on are not what they were."""
        self._forget_live()
        if index < self.state.num_kept_items:
            self.state.kept_ids, self.state.num_kept_items = [], 0

    def _open(self, num_items: int, role: str) -> Session:
        """A live session that knows the first items, and in which this role speaks."""
        state = self.state
        self._forget_live()
        messages = self.messages(num_items)
        num_kept = 0
        if 0 < state.num_kept_items <= num_items:
            num_kept = len(messages) - num_items + state.num_kept_items
        self._live = self._llm.sessions.resume(
            messages, state.kept_ids if num_kept else [], num_kept, role=role, now=state.now
        )
        self._num_told, self._role, self._has_item_as_turn = num_items, role, False
        return self._live

    def _between_turns(self, num_items: int, role: str) -> Session:
        """The live session after so many items, whose turn is no item, and in which this role speaks."""
        live = self._usable()
        if live is None or self._num_told != num_items or self._has_item_as_turn:
            return self._open(num_items, role)
        if role != self._role:
            if live.text:
                return self._open(num_items, role)
            live.set_role(role)
            self._role = role
        return live

    def _listen(self, text: str | None = None) -> Session:
        """The live session after all items, with this text (None: the open input) as its turn."""
        text = self.state.input_text if text is None else text
        live = self._between_turns(len(self.state.items), "user")
        if live.text != text:
            live.revise(text)
        return live

    def _speak(self, item: Item) -> Session:
        """The live session with the last item as its turn, complete."""
        assert item is self.state.items[-1]
        live = self._between_turns(len(self.state.items) - 1, item.role)
        live.revise(item.text)
        live.commit()
        self._num_told, self._has_item_as_turn = len(self.state.items), True
        return live
