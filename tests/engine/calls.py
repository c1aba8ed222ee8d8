"""The calls of an engine, with what its `Intake` makes of their arguments."""

from collections.abc import Sequence

from segue.engine.submission import Keep, KvScope
from segue.host.client import EngineClient
from segue.sample.params import SamplingParams


def add_request(
    engine: EngineClient,
    request_id: str,
    token_ids: Sequence[int],
    params: SamplingParams | None,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    resumable: bool = False,
    keep: Keep = "computed",
) -> None:
    engine.add_request(
        engine.intake.submission(
            token_ids,
            params,
            request_id=request_id,
            priority=priority,
            scope=KvScope(cache_salt),
            resumable=resumable,
            keep=keep,
        )
    )


def add_chunk(
    engine: EngineClient, request_id: str, token_ids: Sequence[int], params: SamplingParams | None
) -> None:
    engine.add_chunk(request_id, engine.intake.chunk(token_ids, params), params)


def fork(engine: EngineClient, request_id: str, new_request_id: str, num_tokens: int | None = None) -> None:
    engine.fork(request_id, new_request_id, num_tokens, default_seed=engine.intake.next_seed())
