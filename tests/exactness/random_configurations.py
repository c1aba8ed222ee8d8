"""Everything at once, from one seed: an engine of random options, and requests and live sessions of random parameters
that run beside each other. Each answer must be that of the plain engine, which answers one request at a time, on one
thread, in whole prompts, without a prefix cache or drafts: ids, log-probabilities, text and end, bit for bit.

    python -m tests.exactness.random_configurations --configs 0-499

A difference is one line, with the configuration that shows it.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from segue import LLM, SamplingParams
from segue.args import EngineOptions
from segue.contract.reports import FinishReason
from segue.errors import CapacityError, SegueError
from segue.llm.llm import Stream
from segue.sample.params import StructuredOutputsParams
from segue.session.blocking import BlockingAnswer, BlockingSession
from segue.verify.delivery import SeenAnswer, answer_of
from segue.verify.matrix import compare
from tests.weights.make_gguf import tiny_llama

MAX_MODEL_LEN = 160
_VOCAB_SIZE = 320

_WORDS = (
    *("the hen in the inn ", "and on and on and on ", "an ", "she said: ", "one two, one two, one two, "),
    *("Ä é ", "猫と犬 ", "🐟🐦 ", "{", "\n\n", "t", "<|im_end|>", "yes, no, yes, no, "),
)
_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"choice": ["alpha", "beta"]},
    {"choice": ["a", "ab", "abc", " the"]},
    {"choice": ["é", "猫"]},
    {"regex": "a"},
    {"regex": "(ab|cd){2,6}"},
    {"regex": "[a-z ]*"},
    {"regex": "[0-9]{1,3}(\\\\.[0-9]+)?"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": {"enum": [1, "x", None, [True]]}},
    {"json_object": True},
    {"grammar": 'start: "on" (" and on")*'},
)
_PLAIN: EngineOptions = {
    "threads": 1,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 4 * MAX_MODEL_LEN,
    "enable_prefix_caching": False,
}


class Asked(msgspec.Struct, frozen=True):
    """One answer that was given, and what it answered."""

    params: SamplingParams
    """Of this answer alone."""
    answer: SeenAnswer
    is_cut: bool
    """Whoever asked did not wait for the end of it."""


class Models(msgspec.Struct, frozen=True):
    """What configurations have in common."""

    plain: LLM
    path: Path
    draft_path: Path
    """A drafter that is often wrong."""


@contextlib.contextmanager
def models() -> Iterator[Models]:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_llama(Path(folder, "tiny.gguf"))
        draft_path = tiny_llama(Path(folder, "draft.gguf"), layers=1, seed=1)
        with LLM(path, **_PLAIN) as plain:
            yield Models(plain, path, draft_path)


def run_configuration(number: int, models: Models) -> list[str]:
    """What differs in one configuration; a line for each answer."""
    rng = Random(number)
    options = _random_options(rng, models)
    with LLM(models.path, **options) as llm:
        asked = _Play(rng, llm).run()
    differences = (_difference(models.plain, each) for each in asked)
    return [f"--configs {number}: {each}" for each in differences if each is not None]


# --- what is drawn --------------------------------------------------------------------------------------------


def _random_options(rng: Random, models: Models) -> EngineOptions:
    block_size = rng.choice((1, 2, 4, 8, 16, 32))
    longest = -(-MAX_MODEL_LEN // block_size)
    max_num_batched_tokens = rng.choice((1, 2, 3, 5, 7, 16, 31, 64, 512))
    return {
        "threads": rng.randint(1, 2),
        "max_model_len": MAX_MODEL_LEN,
        "block_size": block_size,
        "num_kv_blocks": longest + rng.choice((0, 1, 2, longest, 8 * longest)),
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": rng.randint(1, min(max_num_batched_tokens, 16)),
        "enable_prefix_caching": rng.random() < 0.6,
        "async_scheduling": rng.random() < 0.5,
        "speculative_config": _random_drafts(rng, models),
        "engine_process": rng.random() < 0.1,
    }


def _random_drafts(rng: Random, models: Models) -> dict[str, object] | None:
    drafts: dict[str, object] = {
        "num_speculative_tokens": rng.randint(1, 6),
        "adaptive": rng.random() < 0.5,
    }
    match rng.choice(("none", "ngram", "ngram", "draft_model")):
        case "ngram":
            shortest = rng.randint(1, 3)
            longest = rng.randint(shortest, 5)
            return drafts | {
                "method": "ngram",
                "prompt_lookup_min": shortest,
                "prompt_lookup_max": longest,
            }
        case "draft_model":
            path = rng.choice((models.path, models.draft_path))
            return drafts | {"method": "draft_model", "model": str(path)}
        case _:
            return None


def _random_params(rng: Random) -> SamplingParams:
    """For one answer of a session or some of a request."""

    def sometimes(chance: float, draw: Callable[[], Any], otherwise: Any = None) -> Any:
        return draw() if rng.random() < chance else otherwise

    max_tokens = rng.choice((1, 2, 5, 12, 24, 40))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=sometimes(0.3, lambda: rng.randint(0, max_tokens), 0),
        temperature=rng.choice((0.0, 0.0, 0.3, 1.0, 2.0)),
        top_k=sometimes(0.2, lambda: rng.randint(1, 30), 0),
        top_p=sometimes(0.2, lambda: rng.uniform(0.1, 1.0), 1.0),
        min_p=sometimes(0.2, lambda: rng.uniform(0.0, 0.3), 0.0),
        presence_penalty=sometimes(0.2, lambda: rng.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(0.2, lambda: rng.uniform(-2, 2), 0.0),
        repetition_penalty=sometimes(0.2, lambda: rng.uniform(0.5, 2.0), 1.0),
        logit_bias=sometimes(
            0.25, lambda: {rng.randrange(_VOCAB_SIZE): rng.choice((-100, -2, 3, 100)) for _ in range(4)}
        ),
        seed=rng.choice((0, 1, -5, 2**63)),
        stop=sometimes(0.25, lambda: rng.sample(("a", "t", "\n", " the", "é", "�", "zz"), 2)),
        stop_token_ids=sometimes(0.2, lambda: [rng.randrange(_VOCAB_SIZE) for _ in range(8)]),
        ignore_eos=rng.random() < 0.4,
        logprobs=rng.choice((None, 0, 2, 5)),
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=rng.random() < 0.7,
        structured_outputs=sometimes(0.4, lambda: StructuredOutputsParams(**rng.choice(_GRAMMARS))),
    )


def _random_text(rng: Random, most: int) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.randint(1, most)))


# --- what runs beside each other ------------------------------------------------------------------------------


class _Play:
    """One engine's work. Whoever has a turn does a little; the engine steps when somebody waits."""

    def __init__(self, rng: Random, llm: LLM) -> None:
        self._rng = rng
        self._llm = llm
        self.asked: list[Asked] = []
        self._speakers: list[_Request | _Conversation] = []

    def run(self) -> list[Asked]:
        to_come = self._rng.randint(2, 7)
        while to_come or self._speakers:
            if to_come and (not self._speakers or self._rng.random() < 0.3):
                to_come -= 1
                self._speakers.append(self._new_speaker())
            speaker = self._rng.choice(self._speakers)
            if not speaker.go_on():
                self._speakers.remove(speaker)
        return self.asked

    def _new_speaker(self) -> "_Request | _Conversation":
        if self._rng.random() < 0.6:
            return _Request(self._rng, self._llm, self.asked)
        return _Conversation(self._rng, self._llm.session(), self.asked, forks=self._speakers)


class _Request:
    """A prompt with one to three answers, read to the end or left before it."""

    def __init__(self, rng: Random, llm: LLM, asked: list[Asked]) -> None:
        self._rng = rng
        self._asked = asked
        self._params = msgspec.structs.replace(
            _random_params(rng),
            n=rng.choice((1, 1, 2, 3)),
            prompt_logprobs=rng.choice((None, None, None, 0, 2)),
        )
        self._stream: Stream = llm.stream(_random_text(rng, 6), self._params)
        self._num_deltas = rng.choice((None, None, None, rng.randint(0, 20)))
        """To be read; None: all."""

    def go_on(self) -> bool:
        for _ in range(self._rng.randint(1, 5)):
            if self._num_deltas == 0 or next(self._stream, None) is None:
                self._end()
                return False
            if self._num_deltas is not None:
                self._num_deltas -= 1
        return True

    def _end(self) -> None:
        self._stream.close()
        output = self._stream.output
        for number, completion in enumerate(output.outputs):
            params = msgspec.structs.replace(self._params, n=1, seed=(self._params.seed or 0) + number)
            is_cut = completion.finish_reason is FinishReason.ABORT
            prompt_logprobs = None if is_cut else output.prompt_logprobs
            answer = answer_of(f"request {params}", output.prompt_token_ids, completion, prompt_logprobs)
            self._asked.append(Asked(params, answer, is_cut))


class _Conversation:
    """A live session: its text comes in pieces, is revised, committed and taken back; its answers are read to the end
    or interrupted; sometimes it is forked."""

    def __init__(
        self,
        rng: Random,
        session: BlockingSession,
        asked: list[Asked],
        *,
        forks: "list[_Request | _Conversation]",
    ) -> None:
        self._rng = rng
        self._session = session
        self._asked = asked
        self._forks = forks
        self._answer: BlockingAnswer | None = None
        self._params = SamplingParams()
        self._prompt_token_ids: list[int] = []
        self._turns_left = rng.randint(1, 3)

    def go_on(self) -> bool:
        if self._answer is not None:
            self._read(self._answer)
            return True
        try:
            self._speak()
        except CapacityError:
            self._turns_left = 0  # there is no room for more
        if self._turns_left == 0 and self._answer is None:
            self._session.close()
            return False
        return True

    def _speak(self) -> None:
        rng, session = self._rng, self._session
        match rng.choice(("append", "append", "revise", "commit", "fork", "respond", "respond")):
            case "append":
                text = _random_text(rng, 3).encode()
                cut = rng.randrange(len(text) + 1)
                session.append(text[:cut])
                session.append(text[cut:])
            case "revise":
                session.revise(session.text[: rng.randrange(len(session.text) + 1)] + _random_text(rng, 1))
            case "commit" if session.text:
                session.commit()
                session.reopen()
            case "fork" if len(self._forks) < 8:
                self._forks.append(_Conversation(rng, session.fork(), self._asked, forks=self._forks))
            case "respond" if session.text:
                self._params = _random_params(rng)
                self._answer = session.respond(self._params)
                self._prompt_token_ids = session.token_ids
                self._turns_left -= 1

    def _read(self, answer: BlockingAnswer) -> None:
        if self._rng.random() < 0.1:
            self._session.interrupt()
            self._end(answer, is_cut=True)
            return
        for _ in range(self._rng.randint(1, 5)):
            if next(answer, None) is None:
                self._end(answer, is_cut=False)
                return

    def _end(self, answer: BlockingAnswer, *, is_cut: bool) -> None:
        self._answer = None
        name = f"session {self._params}"
        self._asked.append(
            Asked(self._params, answer_of(name, self._prompt_token_ids, answer.read(), None), is_cut)
        )


# --- comparison -----------------------------------------------------------------------------------------------


def _difference(plain: LLM, asked: Asked) -> str | None:
    found = asked.answer
    with plain.stream(list(found.prompt_token_ids), asked.params) as stream:
        for _ in stream:
            pass
        output = stream.output
    (completion,) = output.outputs
    expected = answer_of(found.case, output.prompt_token_ids, completion, output.prompt_logprobs)
    if asked.is_cut:
        # The text can be behind the ids: it waits for the rest of a character, or of a stop string.
        num_tokens = len(found.token_ids)
        found, expected = (
            msgspec.structs.replace(
                each,
                token_ids=each.token_ids[:num_tokens],
                logprobs=each.logprobs[:num_tokens],
                prompt_logprobs=None,
                text="",
                finish_reason=None,
                stop_reason=None,
            )
            for each in (found, expected)
        )
    difference = compare("random", expected, found)
    return None if difference is None else str(difference)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", default="0-499", help="one, or a range first-last (default %(default)s)")
    args = parser.parse_args()
    first, _, last = args.configs.partition("-")
    begin, num_failed = time.perf_counter(), 0
    numbers = range(int(first), int(last or first) + 1)
    with models() as shared:
        for number in numbers:
            try:
                lines = run_configuration(number, shared)
            except SegueError as error:
                lines = [f"--configs {number}: {type(error).__name__}: {error}"]
            num_failed += bool(lines)
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    print(f"{len(numbers)} configurations in {time.perf_counter() - begin:.0f} s, {num_failed} differ")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
