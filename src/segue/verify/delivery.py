"""Requests sent one by one, all together or as live sessions; their answers, and what happened on the way."""

import asyncio
import itertools
import random
from collections.abc import Sequence

import msgspec

from segue.answers.outputs import CompletionOutput, Logprob
from segue.answers.processor import OutputProcessor
from segue.answers.prompts import EncodedPrompt, submissions_of
from segue.contract.reports import EngineStats, FinishReason
from segue.engine.engine import Engine
from segue.engine.request import State
from segue.host.client import EngineClient
from segue.host.loop import EngineLoop
from segue.session.live import Session, SessionManager
from segue.tokens import Tokenizer
from segue.verify.cases import NOW, Case
from segue.verify.modes import Evidence, Setup
from segue.verify.workbench import Bench

Logprobs = tuple[tuple[int, float, int], ...]
"""Of one position: (id, log-probability, rank), the drawn id first."""


_WRONG_LEN = 12
"""Characters of wrong text, so that it does not become many more tokens than the right one."""


class SeenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All that a user sees of one answered request."""

    case: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    prompt_logprobs: tuple[Logprobs, ...] | None
    """One for each prompt token but the first. None: sessions have none."""
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """Or why it failed."""


class Delivered(msgspec.Struct, frozen=True):
    """What a run came to."""

    answers: list[SeenAnswer]
    evidence: Evidence


def plan_rounds(cases: Sequence[Case], setup: Setup) -> list[list[Case]]:
    """The requests as often as they are sent; a round is over before the next begins.

    In a tight pool nothing outlives a round, so there everything that is sent twice is sent twice in a row.
    """
    if not setup.repeat:
        return [list(cases)]
    if setup.pool == "tight":
        return [[case for case in cases for _ in range(2)]]
    return [list(cases), list(cases)]


def deliver(
    bench: Bench, tokenizer: Tokenizer, rounds: Sequence[Sequence[Case]], setup: Setup, seed: int
) -> Delivered:
    """Answers the requests in the way that `setup` says, and closes the engine. `seed` is for where texts are cut.

    Raises RequestFailed when a session's answer fails, EngineDead.
    """
    evidence = Evidence(setup=setup, threads=bench.threads, is_own_process=bench.watched is None)
    if setup.uses_sessions:
        answers = asyncio.run(_Sessions(bench.client, tokenizer, setup, seed, evidence).answer(rounds))
    else:
        try:
            answers = _Requests(bench.client, tokenizer, setup, evidence).answer(rounds)
        finally:
            bench.client.close()
    watched = bench.watched
    if watched is not None:
        evidence.max_requests_in_step = watched.max_requests_in_step
        evidence.num_split_prompts = watched.num_split_prompts
        evidence.num_planned_ahead = watched.num_planned_ahead
        evidence.num_draft_lengths = len(watched.draft_lengths)
    return Delivered(answers, evidence)


def _note_stats(evidence: Evidence, stats: EngineStats) -> None:
    evidence.num_preemptions = stats.num_preemptions
    evidence.num_draft_tokens = stats.num_draft_tokens
    evidence.num_accepted_tokens = stats.num_accepted_tokens


# --- requests -------------------------------------------------------------------------------------------------


class _Requests:
    """Sends requests to an engine and steps it, as `LLM` does."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, setup: Setup, evidence: Evidence) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._setup = setup
        self._evidence = evidence
        self._numbers = itertools.count()

    def answer(self, rounds: Sequence[Sequence[Case]]) -> list[SeenAnswer]:
        answers = []
        for cases in rounds:
            for group in [cases] if self._setup.together else [[case] for case in cases]:
                answers += self._answer_group(group)
        _note_stats(self._evidence, self._client.stats)
        return answers

    def _answer_group(self, cases: Sequence[Case]) -> list[SeenAnswer]:
        processor = OutputProcessor(self._tokenizer)
        ids = [str(next(self._numbers)) for _ in cases]
        for request_id, case in zip(ids, cases, strict=True):
            prompt = EncodedPrompt(text=case.text, token_ids=list(case.token_ids))
            intake = self._client.intake
            engine_ids = [intake.new_id(request_id) for _ in range(case.params.n)]
            submissions = submissions_of(intake, prompt, case.params, request_ids=engine_ids)
            processor.add(
                request_id,
                prompt=prompt.text,
                prompt_token_ids=prompt.token_ids,
                params=case.params,
                engine_ids=engine_ids,
            )
            for submission in submissions:
                self._client.add_request(submission)
        most = 0
        while processor.num_open_answers > 0:
            outputs = self._client.step()
            most = max(most, len({output.request_id for output in outputs}))
            for request_id in processor.process(outputs).aborts:
                self._client.abort_request(request_id)
        answers = []
        for request_id, case in zip(ids, cases, strict=True):
            output = processor.pop(request_id)
            num_computed = len(case.token_ids) - output.num_cached_tokens
            self._note(most, output.num_cached_tokens, num_computed > self._setup.max_num_batched_tokens)
            answers += [
                answer_of(
                    case.answer_name(number), output.prompt_token_ids, completion, output.prompt_logprobs
                )
                for number, completion in enumerate(output.outputs)
            ]
        return answers

    def _note(self, most: int, num_cached_tokens: int, is_split: bool) -> None:
        """What can be seen from outside the engine."""
        evidence = self._evidence
        evidence.num_cached_tokens = (evidence.num_cached_tokens or 0) + num_cached_tokens
        evidence.max_requests_in_step = max(most, evidence.max_requests_in_step or 0)
        evidence.num_split_prompts = (evidence.num_split_prompts or 0) + is_split


# --- live sessions --------------------------------------------------------------------------------------------


class _Sessions:
    """Tells live sessions their text, in pieces, revised, with forks, and has them answer."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, setup: Setup, seed: int, evidence: Evidence
    ) -> None:
        self._loop = EngineLoop(client)
        self._manager = SessionManager(self._loop, tokenizer)
        self._setup = setup
        self._seed = seed
        self._evidence = evidence
        self._sessions: list[Session] = []
        """Open ones."""

    async def answer(self, rounds: Sequence[Sequence[Case]]) -> list[SeenAnswer]:
        try:
            answers = []
            for cases in rounds:
                answers += await self._answer_once(cases)
                await self._note()
                self._close_sessions()
            return answers
        finally:
            self._manager.close()
            self._loop.close()

    async def _answer_once(self, cases: Sequence[Case]) -> list[SeenAnswer]:
        if self._setup.parked:
            return await self._answer_parked(cases)
        if self._setup.together:
            together = await asyncio.gather(*map(self._converse, cases))
            return [answer for each in together for answer in each]
        return [answer for case in cases for answer in await self._converse(case)]

    async def _note(self) -> None:
        """What shows in an engine whose sessions are still open."""
        evidence = self._evidence
        stats, num_cached = await asyncio.wrap_future(self._loop.call(_look))
        _note_stats(evidence, stats)
        if evidence.is_own_process:
            evidence.num_split_prompts = evidence.num_cached_tokens = None
        else:
            evidence.num_cached_tokens = (evidence.num_cached_tokens or 0) + num_cached

    def _close_sessions(self) -> None:
        for session in self._sessions:
            session.close()
        self._sessions.clear()

    async def _converse(self, case: Case) -> list[SeenAnswer]:
        return [answer for session in await self._tell(case) for answer in await self._respond(case, session)]

    async def _answer_parked(self, cases: Sequence[Case]) -> list[SeenAnswer]:
        """All texts first; by then, some sessions had to give up their KV for others."""
        told = [(case, session) for case in cases for session in await self._tell(case)]
        await self._quiet()
        await self._note_evicted([session for _, session in told])
        if self._setup.together:
            responses = await asyncio.gather(*(self._respond(case, session) for case, session in told))
        else:
            responses = [await self._respond(case, session) for case, session in told]
        return [answer for each in responses for answer in each]

    # --- input ------------------------------------------------------------------------------------------------

    async def _tell(self, case: Case) -> list[Session]:
        """Sessions that have been told the request's text; two with a fork."""
        # Cut in the same way whatever else is told meanwhile.
        chance = random.Random(f"{self._seed}/{case.name}")
        session = self._manager.open(case.messages, now=lambda: NOW)
        rest = case.text.encode()
        if self._setup.revised:
            rest = await self._tell_wrong(session, case.text, chance)
        sessions = [session]
        pieces = self._pieces(rest, chance)
        for i, piece in enumerate(pieces):
            if self._setup.forked and i == len(pieces) // 2:
                sessions.append(session.fork())
                self._evidence.num_forks += 1
            for each in sessions:
                each.append(piece)
            await self._pause(chance)
        self._evidence.num_pieces += len(pieces) - 1
        self._sessions += sessions
        return sessions

    async def _tell_wrong(self, session: Session, text: str, chance: random.Random) -> bytes:
        """Text that starts right and ends wrong, then its revision. Returns what is left to say."""
        right, wrong, kept = sorted(chance.randrange(len(text) + 1) for _ in range(3))
        session.append(text[:right] + text[right:wrong][:_WRONG_LEN][::-1] + "?")
        await self._pause(chance)
        session.revise(text[:kept] if chance.random() < 0.5 else text[:right])
        self._evidence.num_revisions += 1
        await self._pause(chance)
        return text[len(session.text) :].encode()

    def _pieces(self, text: bytes, chance: random.Random) -> list[bytes]:
        """The text cut anywhere, also within characters; in two for a fork, else not at all."""
        count = chance.randint(2, 6) if self._setup.streamed else 1 + self._setup.forked
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(count - 1))
        return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]

    async def _pause(self, chance: random.Random) -> None:
        """Let the engine compute all that there is, or go on while it computes."""
        if self._setup.together and not self._setup.parked:
            for _ in range(chance.randrange(3)):
                await asyncio.wrap_future(self._loop.call(_look))
        elif chance.random() < 0.7:
            await self._quiet()

    async def _quiet(self) -> None:
        """Wait until the engine has computed all that it was told."""
        while True:
            if not await asyncio.wrap_future(self._loop.call(EngineClient.has_unfinished_requests)):
                return

    async def _note_evicted(self, sessions: Sequence[Session]) -> None:
        evidence = self._evidence
        if not evidence.is_own_process:
            evidence.num_evicted_sessions = (evidence.num_evicted_sessions or 0) + await asyncio.wrap_future(
                self._loop.call(_count_evicted)
            )
        elif self._setup.forked or self._setup.enable_prefix_caching:
            evidence.num_evicted_sessions = None  # they share blocks, so the pool's numbers say nothing
        else:
            stats, _ = await asyncio.wrap_future(self._loop.call(_look))
            blocks_for = self._loop.client.config.blocks_for
            wanted = sum(blocks_for(len(session.token_ids) - 1) for session in sessions)
            evidence.num_evicted_sessions = int(wanted > stats.num_kv_blocks - stats.num_free_blocks)

    # --- answers ----------------------------------------------------------------------------------------------

    async def _respond(self, case: Case, session: Session) -> list[SeenAnswer]:
        """A session gives one answer: further ones are those of its forks, drawn with the seeds that `n` means."""
        answerers = [session] + [session.fork() for _ in range(1, case.params.n)]
        self._sessions += answerers[1:]
        return [await self._respond_as(case, number, each) for number, each in enumerate(answerers)]

    async def _respond_as(self, case: Case, number: int, session: Session) -> SeenAnswer:
        params = msgspec.structs.replace(case.params, n=1, prompt_logprobs=None)
        if number:
            params = msgspec.structs.replace(params, seed=(params.seed or 0) + number)
        answer = session.respond(params)
        prompt_token_ids = session.token_ids
        async for _ in answer:
            pass
        return answer_of(case.answer_name(number), prompt_token_ids, answer.delivered(None), None)


def _look(client: EngineClient) -> tuple[EngineStats, int]:
    """Where the engine stands, and how many cached tokens its open requests were given (0 in another process)."""
    requests = client.requests.values() if isinstance(client, Engine) else ()
    return client.stats, sum(request.metrics.num_cached_tokens for request in requests)


def _count_evicted(client: EngineClient) -> int:
    assert isinstance(client, Engine)
    return sum(
        request.state is State.IDLE and request.timeline.kv_len < len(request.timeline.tokens) - 1
        for request in client.requests.values()
    )


# --- both -----------------------------------------------------------------------------------------------------


def answer_of(
    case: str,
    prompt_token_ids: Sequence[int],
    completion: CompletionOutput,
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None,
) -> SeenAnswer:
    """The answer to the request of this name, in the form that is compared."""
    return SeenAnswer(
        case=case,
        prompt_token_ids=tuple(prompt_token_ids),
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(_logprobs(entry) for entry in completion.logprobs or ()),
        prompt_logprobs=None
        if prompt_logprobs is None
        else tuple(_logprobs(entry) for entry in prompt_logprobs if entry is not None),
        text=completion.text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason if completion.error is None else completion.error,
    )


def _logprobs(entry: dict[int, Logprob]) -> Logprobs:
    return tuple((token, each.logprob, each.rank) for token, each in entry.items())
