"""The answers of /v1/chat/completions and /v1/completions as chunks.

                                 ┌─▶ streamed: each is an event
deltas ──▶ ChunkWriter ──▶ chunks
                                 └─▶ whole: all are added to an answer that has nothing yet
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Generic, TypeVar

from msgspec import UNSET, UnsetType

from segue.answers.outputs import Delta
from segue.server.shared.generation import Generation
from segue.server.shared.logprobs import LogprobWriter
from segue.server.shared.request_id import answer_id
from segue.server.shared.sampling import CompletionFields
from segue.server.shared.serving import Serving
from segue.server.shared.usage import Usage

Choice = TypeVar("Choice")
Chunk = TypeVar("Chunk")


class ChunkWriter(ABC, Generic[Choice, Chunk]):
    """One request's answers in the form of an endpoint."""

    def __init__(
        self, serving: Serving, body: CompletionFields, model: str, generation: Generation, *, id_prefix: str
    ) -> None:
        self._generation = generation
        self._logprobs = LogprobWriter(
            serving.llm.get_tokenizer(), as_ids=bool(body.return_tokens_as_token_ids)
        )
        self._id = answer_id(id_prefix, body.request_id)
        self._model = model
        self._created = serving.now()
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """As the answers come. Leaving them early aborts what still runs."""
        async with contextlib.aclosing(self._generation.deltas()) as deltas:
            for chunk in self._first_chunks():
                yield chunk
            async for delta in deltas:
                choice = await self._choice(delta)
                if choice is not None:
                    yield self._chunk([choice], self._usage_so_far)
        if self._include_usage:
            yield self._chunk([], self._usage)

    async def add_to(self, add: Callable[[Chunk], None]) -> None:
        """Adds all chunks to a whole answer."""
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                add(chunk)

    def _first_chunks(self) -> Iterator[Chunk]:
        """Before there is anything of an answer."""
        return iter(())

    @abstractmethod
    async def _choice(self, delta: Delta) -> Choice | None:
        """What a delta adds to its answer; None: nothing that can be shown yet."""

    @abstractmethod
    def _chunk(self, choices: Sequence[Choice], usage: Usage | UnsetType | None) -> Chunk: ...

    @property
    def _usage(self) -> Usage:
        return self._generation.usage

    @property
    def _usage_so_far(self) -> Usage | UnsetType | None:
        """As a chunk tells it that is not the last."""
        if self._continuous_usage:
            return self._usage
        return None if self._include_usage else UNSET


def extended(token_ids: list[int] | UnsetType, new: list[int] | UnsetType) -> list[int] | UnsetType:
    """An answer's ids so far with those of a chunk, where they are told."""
    if token_ids is UNSET:
        return new
    token_ids += [] if new is UNSET else new
    return token_ids
