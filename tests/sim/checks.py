"""What must hold after every step, apart from the driver."""

from segue.engine.engine import Engine
from segue.engine.outputs import EngineOutput
from segue.engine.request import Request, State
from tests.sim.plain import Answer


class Violation(AssertionError):
    """Something that must never happen."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def check_engine(engine: Engine, key_contents: dict[bytes, object]) -> None:
    """Every block, ledger, state and reservation is as it must be."""
    requests = list(engine.requests.values())
    engine.pool.check(request.timeline.blocks for request in requests)
    scheduler = engine.scheduler
    running = [request for request in requests if request.state is State.RUNNING]
    require(len(running) == len(scheduler.running), "running requests differ from the list of them")
    keys = [scheduler.key(request) for request in scheduler.running]
    require(keys == sorted(keys), "running requests are out of order")
    require(len(running) <= engine.config.max_num_seqs, "too many run")
    require(scheduler.num_reserved <= engine.pool.num_free, "more is reserved than is free")
    for request in requests:
        request.timeline.check()
        _check_state(engine, request)
        _check_published(engine, request, key_contents)


def _check_state(engine: Engine, request: Request) -> None:
    timeline = request.timeline
    holds = bool(timeline.blocks) and request.state is not State.RUNNING
    require(holds == (request in engine.scheduler._holders), f"{request.id} holds blocks in secret")
    require(
        bool(request.reserve) <= (request.state is State.RUNNING), f"{request.id} reserves without running"
    )
    require(request.state is not State.IDLE or request.turn is None, f"{request.id} is idle in a turn")
    require(len(timeline.tokens) <= engine.config.max_model_len, f"{request.id} is too long")
    require(
        request.turn is None or timeline.kv_len < len(timeline.tokens), f"{request.id} computed its last id"
    )


def _check_published(engine: Engine, request: Request, key_contents: dict[bytes, object]) -> None:
    timeline = request.timeline
    size = engine.config.block_size
    for index, block in enumerate(timeline.blocks):
        key = engine.pool.key_of(block)
        if key is None:
            continue
        if (index + 1) * size > timeline.publishable_len:
            # After a cut the last block stays published until it is written again.
            is_cut = index == len(timeline.blocks) - 1 and not timeline.flights
            require(is_cut, f"{request.id} shows a block that is not complete")
            continue
        require(key == timeline.key(index), f"{request.id} holds a block under the key of other ids")
        contents = timeline.tokens[: (index + 1) * size].tobytes()
        known = key_contents.setdefault(key, contents)
        require(known == contents, "one key for two histories")


def check_output(request_id: str, output: EngineOutput, expected: Answer, got: Answer | None) -> Answer:
    """One output continues the answer that must come. Returns what has come by now."""
    if got is None:
        got = Answer([], None if expected.logprobs is None else [])
        require(
            output.prompt_logprobs == expected.prompt_logprobs,
            f"{request_id}: prompt logprobs {output.prompt_logprobs}, not {expected.prompt_logprobs}",
        )
    got.token_ids.extend(output.token_ids)
    num_tokens = len(got.token_ids)
    wanted = expected.token_ids[:num_tokens]
    require(got.token_ids == wanted, f"{request_id}: tokens {got.token_ids}, not {expected.token_ids}")
    if got.logprobs is not None:
        got.logprobs.extend(output.logprobs or ())
        require(
            expected.logprobs is not None and got.logprobs == expected.logprobs[:num_tokens],
            "logprobs differ",
        )
    else:
        require(output.logprobs is None, f"{request_id}: logprobs that nobody asked for")
    if output.finish_reason is not None:
        require(num_tokens == len(expected.token_ids), f"{request_id}: stopped after {got.token_ids}")
        ending = (output.finish_reason, output.stop_reason)
        require(ending == (expected.finish_reason, expected.stop_reason), f"{request_id}: ended by {ending}")
        metrics = output.metrics
        require(
            metrics is not None and metrics.num_accepted_tokens <= metrics.num_draft_tokens, "bad metrics"
        )
    return got
