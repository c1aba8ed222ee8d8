"""What an engine holds of a session, and the fewest commands that make it what the session says.

A `Link` knows what its engine request was told and has said, and compares that with what it is to hold. Where telling
fails, the link is dropped, and the session makes another: nothing is told twice or left out.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from segue.contract.reports import EngineOutput, FinishReason
from segue.errors import EngineDead, ParameterError, RequestFailed
from segue.sample.params import SamplingParams
from segue.session.answer import AnswerSoFar

Handler = Callable[[EngineOutput | EngineDead], None]


class Line(Protocol):
    """An open engine request, with `keep="all"`: a `Channel`, or an engine of this thread."""

    @property
    def request_id(self) -> str: ...

    @property
    def is_open(self) -> bool:
        """False when the request has ended; the output that says so may still be on its way."""
        ...

    def truncate(self, num_tokens: int) -> None: ...

    def add_chunk(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> None: ...

    def abort(self) -> None:
        """Drop the request; nothing comes from it any more. Never raises."""
        ...


L = TypeVar("L", bound=Line)


class Link(Generic[L]):
    """One engine request that holds a session, or the begin of it. A session takes another one when this is lost."""

    def __init__(
        self,
        connect: Callable[[Handler], L],
        token_ids: Sequence[int],
        answer: AnswerSoFar | None = None,
    ) -> None:
        """`connect` starts the request with these ids, for this answer to them, and has its outputs handed to a
        handler; what it raises is raised here."""
        self.error: EngineDead | RequestFailed | None = None
        """Why it was lost."""
        self._ids = list(token_ids)
        """What the engine holds, as far as it has said."""
        self._turns: deque[AnswerSoFar | None] = deque() if answer is None else deque([answer])
        """Turns whose last output is still to come, oldest first; None: it was cut, and its outputs mean nothing."""
        self.line = connect(self.receive)

    @property
    def is_usable(self) -> bool:
        return self.error is None and self.line.is_open

    def tell(self, token_ids: Sequence[int], answer: AnswerSoFar | None = None) -> None:
        """Make the engine hold these ids, and nothing else, and answer them if there is an answer to be filled.

        A turn that runs is cut. Raises EngineDead, and ParameterError if the request has ended.
        """
        common = common_prefix_len(self._ids, token_ids)
        if self._is_running or common < len(self._ids):
            self._truncate(common)
        if common < len(token_ids) or answer is not None:
            rest = token_ids[common:]
            self.line.add_chunk(rest, None if answer is None else answer.params)
            self._ids += rest
            if answer is not None:
                self._turns.append(answer)

    def fork(self, connect: Callable[[Handler, int], L], token_ids: Sequence[int]) -> "Link[L] | None":
        """Another request with what this one holds of these ids; `connect` starts it with that many. None: nothing."""
        common = common_prefix_len(self._ids, token_ids)
        if not common:
            return None
        return Link(lambda handler: connect(handler, common), token_ids[:common])

    def receive(self, output: EngineOutput | EngineDead) -> None:
        """The engine's news."""
        if isinstance(output, EngineDead):
            self._lose(output)
        elif output.finish_reason is FinishReason.ERROR:
            self._lose(RequestFailed(output.error or "the request failed"))
        elif self._turns:
            answer = self._turns[0]
            if answer is not None:
                self._ids += output.token_ids
            if output.finish_reason is not None:
                self._turns.popleft()
            if answer is not None and answer.receive(output) and self._is_running:
                # If the request has ended by itself, nobody minds.
                with contextlib.suppress(EngineDead, ParameterError):
                    self._truncate(len(self._ids))

    def drop(self) -> None:
        """The engine may forget it, and nothing of it is of interest any more."""
        self.line.abort()
        self._turns.clear()

    @property
    def _is_running(self) -> bool:
        """Whether the engine may still be answering, and that is wanted."""
        return bool(self._turns) and self._turns[-1] is not None

    def _truncate(self, num_tokens: int) -> None:
        self.line.truncate(num_tokens)
        del self._ids[num_tokens:]
        if self._turns:
            self._turns[-1] = None

    def _lose(self, error: EngineDead | RequestFailed) -> None:
        self.error = error
        self.line.abort()  # it may live on, without a chunk that was refused
        for answer in self._turns:
            if answer is not None:
                answer.fail(error)
        self._turns.clear()


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items are equal."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
