"""Everything at once on a real model, against one request at a time with everything off."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from segue.sample.params import SamplingParams
from segue.tokens import Tokenizer
from segue.verify.cases import Case, Scope
from segue.verify.delivery import Delivered, deliver, plan_rounds
from segue.verify.matrix import compare
from segue.verify.modes import PLAIN, Setup
from segue.verify.workbench import Workbench

NUM_REQUESTS = 64
CROWDED = Setup(
    threads=2,
    together=True,
    pool="tight",
    max_num_seqs=24,
    max_num_batched_tokens=48,
    enable_prefix_caching=True,
    speculation="ngram",
    async_depth=2,
)
_PREAMBLES = (
    "The following is a list of rivers, each with the sea that it flows into and the country of its mouth. ",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\n",
    "Übersetze ins Englische. Deutsch: Der Hund schläft. Englisch: The dog sleeps. Deutsch: ",
    "",
)
_WORDS = (
    *("river", "sea", "stone", "bread", "window", "music", "letter", "nine", "house", "light", "winter"),
    *(
        "bridge",
        "seven",
        "lamp",
        "paper",
        "train",
        "garden",
        "Brot",
        "Straße",
        "müde",
        "水",
        "山",
        "дом",
        "🐟",
    ),
    *("return", "for", "while", "if", "x1", "==", "None"),
)


def sample_requests(tokenizer: Tokenizer, chance: random.Random) -> list[Case]:
    """Prompts of 2 to about 120 tokens, half of them sampled, with all that draws on history."""
    cases = []
    for number in range(NUM_REQUESTS):
        words = chance.choices(_WORDS, k=chance.choice((1, 3, 8, 20, 45)))
        # Every third says the same twice: something for n-gram drafts to find.
        text = chance.choice(_PREAMBLES) + " ".join(words if number % 3 else [*words, *words])
        sampled = {
            "temperature": chance.choice((0.7, 1.0)),
            "top_p": chance.choice((0.9, 1.0)),
            "top_k": chance.choice((0, 50)),
            "seed": number,
        }
        params = msgspec.convert(
            {
                "max_tokens": chance.randint(4, 20),
                "logprobs": chance.choice((0, 1, 4)),
                "repetition_penalty": chance.choice((1.0, 1.0, 1.2)),
                "frequency_penalty": chance.choice((0.0, 0.0, 0.5)),
                "ignore_eos": chance.random() < 0.5,
                **(sampled if number % 2 else {"temperature": 0.0}),
            },
            SamplingParams,
        )
        cases.append(
            Case(
                name=str(number),
                scope=Scope.SHORT,
                text=text,
                messages=None,
                token_ids=tuple(tokenizer.encode(text)),
                params=params,
            )
        )
    return cases


def answer(workbench: Workbench, cases: Sequence[Case], setup: Setup) -> Delivered:
    rounds = plan_rounds(cases, setup)
    return deliver(workbench.open(setup, rounds[0]), workbench.tokenizer, rounds, setup, seed=0)


def test_64_requests_in_a_crowd_answer_as_each_by_itself(smollm2_path: Path) -> None:
    workbench = Workbench(smollm2_path)
    cases = sample_requests(workbench.tokenizer, random.Random(1))
    plain = answer(workbench, cases, PLAIN).answers
    crowded = answer(workbench, cases, CROWDED)
    for alone, together in zip(plain, crowded.answers, strict=True):
        assert compare("all at once", alone, together) is None
        assert alone.token_ids == together.token_ids
        assert alone.logprobs == together.logprobs
    evidence = crowded.evidence
    assert evidence.num_preemptions > 0
    assert evidence.num_accepted_tokens > 0
    assert evidence.num_draft_tokens > evidence.num_accepted_tokens, "some drafts must be wrong"
    assert evidence.num_cached_tokens
    assert evidence.num_split_prompts
    assert evidence.num_planned_ahead
    assert evidence.max_requests_in_step is not None
    assert evidence.max_requests_in_step > 4
    workbench.close()
