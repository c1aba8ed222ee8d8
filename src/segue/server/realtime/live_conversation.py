"""A conversation as one live session of the engine.

Each operation makes the state after it; then the live session is told what it lacks of that (`_reconcile`); then it
counts. What a session cannot be told (an item in the middle, one that is deleted, new instructions) makes another one,
which shares all that is computed of the part in front.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from segue.errors import SegueError, SessionError
from segue.llm.async_llm import AsyncLLM
from segue.sample.params import SamplingParams
from segue.server.realtime.conversation import ConversationItem, ConversationState, Known, messages_of
from segue.server.shared.http_errors import HttpError
from segue.session.live import Answer, Session
from segue.tokens.chat import Message


class GivenAnswer(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """An answer on its way."""

    answer: Answer
    input_ids: list[int]
    """All that it answers."""
    session: Session
    is_apart: bool = False
    """Whether the session is one for this answer only."""
    becomes_item: bool = True


class _Live(msgspec.Struct, frozen=True, eq=False):
    session: Session
    known: Known
    """What it was told."""


class LiveConversation:
    """Not to be shared between event loops. An error leaves it as it was."""

    def __init__(self, llm: AsyncLLM, state: ConversationState) -> None:
        self.state = state
        self._llm = llm
        self._live: _Live | None = None
        """None: the engine has nothing of it."""
        self._given: GivenAnswer | None = None

    @property
    def session(self) -> Session | None:
        """What the engine has of it."""
        return None if self._live is None else self._live.session

    @property
    def is_answering(self) -> bool:
        return self._given is not None

    # --- items and input --------------------------------------------------------------------------------------

    def insert(self, index: int, item: ConversationItem) -> None:
        """An item before the one at `index`."""
        self._require_no_answer("conversation.item.create")
        self._become(self.state.inserted(index, item))

    def delete(self, index: int) -> None:
        self._require_no_answer("conversation.item.delete")
        self._become_less(self.state.deleted(index))

    def set_instructions(self, instructions: str) -> None:
        if instructions == (self.state.instructions or ""):
            return
        self._require_no_answer("session.update")
        state = self.state.instructed(instructions)
        if instructions:
            self._become(state)
        else:
            self._become_less(state)

    def revise(self, text: str) -> None:
        """Other input in place of what there is. While an answer comes, it waits for the end of it."""
        self._become(replace(self.state, input_text=text))

    def clear(self) -> None:
        """No input."""
        self._become_less(replace(self.state, input_text=""))

    def commit(self) -> ConversationItem:
        """The input is complete: it becomes an item."""
        self._require_no_answer("input_text.commit")
        self._become(self.state.committed())
        return self.state.items[-1]

    # --- answers ----------------------------------------------------------------------------------------------

    def respond(self, params: SamplingParams) -> GivenAnswer:
        """Answer the last item; there must be no open input."""
        self._require_no_answer("response.create")
        assert not self.state.input_text
        if not self.state.has_question:
            raise SessionError("response.create: there is nothing to answer; add an item or input_text")
        session = self._reconcile(self.state)
        answer = session.respond(params)
        self._given = GivenAnswer(answer=answer, input_ids=session.token_ids, session=session)
        return self._given

    def respond_apart(
        self, messages: Sequence[Message], params: SamplingParams, *, becomes_item: bool
    ) -> GivenAnswer:
        """Answer these messages in a session of their own."""
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
        self._given = GivenAnswer(
            answer=answer,
            input_ids=session.token_ids,
            session=session,
            is_apart=True,
            becomes_item=becomes_item,
        )
        return self._given

    def interrupt(self) -> None:
        """End the answer where it is."""
        if self._given is not None:
            self._given.session.interrupt()

    def answered(self, item: ConversationItem) -> None:
        """The answer is over, and this is what was read of it.

        Raises what is wrong with input that came meanwhile, which stays until it is revised or cleared.
        """
        given, self._given = self._given, None
        assert given is not None
        if given.is_apart:
            given.session.close()
        if given.becomes_item:
            live = None if given.is_apart else self._usable()
            self.state = self.state.answered(item, None if live is None else live.session.kept_ids)
            if live is None:
                self._drop_live()
            else:
                known = replace(live.known.before, items=self.state.items)
                self._live = _Live(live.session, known)
        if self.state.input_text:
            self._reconcile(self.state)
        else:
            self._become_less(self.state)  # input may have been cleared meanwhile

    def close(self) -> None:
        """Nothing of it is to stay in the engine."""
        self._drop_live()
        if self._given is not None:
            self._given.session.close()

    # --- the live session -------------------------------------------------------------------------------------

    def _become(self, state: ConversationState) -> None:
        if self._given is None:
            self._reconcile(state)
        self.state = state

    def _become_less(self, state: ConversationState) -> None:
        """The same for what only takes away, which is always possible. It is told at once where the session can be
        told, else with what comes next."""
        self.state = state
        if self._given is not None or self._live is None:
            return
        try:
            if self._live.known.is_beside(state.to_know):
                self._reconcile(state)
            else:
                self._drop_live()
        except SegueError:
            self._drop_live()

    def _reconcile(self, state: ConversationState) -> Session:
        """The live session, told what it lacks of this state. What it knows is right after an error too: the next
        call goes on from there."""
        wanted, live = state.to_know, self._usable()
        if live is None or not live.known.is_beside(wanted):
            self._drop_live()
            live = self._live = self._open(state, wanted.before)
        for tell, known in _steps(live.known, wanted):
            tell(live.session)
            self._live = _Live(live.session, known)
        return live.session

    def _open(self, state: ConversationState, known: Known) -> _Live:
        messages = messages_of(known.instructions, known.items)
        session = self._llm.sessions.resume(
            messages, state.kept_ids, state.num_kept_messages, role=known.role, now=state.now
        )
        return _Live(session, known)

    def _usable(self) -> _Live | None:
        if self._live is not None and self._live.session.closed.is_set():
            self._live = None
        return self._live

    def _drop_live(self) -> None:
        if self._live is not None:
            self._live.session.close()
        self._live = None

    def _require_no_answer(self, operation: str) -> None:
        if self._given is not None:
            raise HttpError(
                f"{operation}: an answer is being given; wait for response.done, or send response.cancel",
                code="conversation_already_has_active_response",
            )


def _steps(known: Known, wanted: Known) -> Iterator[tuple[Callable[[Session], None], Known]]:
    """What a session is told that knows one and is to know the other, beside it; and what it knows after each."""
    if known.is_complete and known != wanted:
        known = replace(known, is_complete=False)
        yield Session.reopen, known
    if known.role != wanted.role:
        if known.text:
            known = replace(known, text="")
            yield lambda session: session.revise(""), known
        known = replace(known, role=wanted.role)
        yield lambda session: session.set_role(wanted.role), known
    if known.text != wanted.text:
        known = replace(known, text=wanted.text)
        yield lambda session: session.revise(wanted.text), known
    if known.is_complete != wanted.is_complete:
        yield Session.commit, wanted
