"""Sessions over the oracle, which says text: every ids-to-text border that there is, and faults at any call."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from segue.answers.outputs import CompletionOutput
from segue.answers.processor import OutputProcessor
from segue.contract.reports import EngineOutput
from segue.contract.step import Sampling
from segue.engine.config import EngineConfig, SpeculativeConfig
from segue.engine.engine import Engine
from segue.errors import EngineDead
from segue.runtime.runtime import LocalRuntime
from segue.sample.params import SamplingParams
from segue.speculate.ngram import NgramDrafter
from tests.engine.calls import add_request
from tests.sim.oracle import OracleExecutor, OracleModel, mix
from tests.tokens.small import TOKENS, small_tokenizer

TOKENIZER = small_tokenizer()
EOS = 2
MAX_MODEL_LEN = 96
SAID = [
    *(
        TOKENIZER.encode(text)[0]
        for text in ("a", "b", "ab", "abc", "hi", " ", " a", "st", "op", "stop", "!")
    ),
    *TOKENIZER.encode("é"),
    *TOKENIZER.encode("👩"),
    *TOKENIZER.encode("é")[:1],
    EOS,
]
"""What the model says: some of it parts of characters, some of it special."""
PIECES = ["a", "ab", "hi ", " a", "stop", "é", "👩", "12", "<|im_end|>", "\n"]
STOPS = ["bc", "op", "p!", "é", "a a", "ab", "top", "\ufffd", "hi!"]


@dataclass(frozen=True)
class TalkingModel(OracleModel):
    """Says what is in SAID."""

    vocab_size: int = len(TOKENS)

    def draw(
        self,
        prefix: int,
        last: int,
        sampling: Sampling,
        position: int,
        history: Sequence[int],
        mask: bytes | None,
    ) -> int:
        return SAID[mix(prefix, 5) % len(SAID)]


class FragileEngine(Engine):
    """Raises EngineDead at one call, before or after it was carried out, and lives on."""

    dies_in: int | None = None
    """So many calls on."""
    dies_after: bool = False

    def _dies(self) -> bool:
        if self.dies_in is None:
            return False
        self.dies_in -= 1
        if self.dies_in < 0:
            self.dies_in = None
            return True
        return False

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        dies = self._dies()
        if dies and not self.dies_after:
            raise EngineDead("injected")
        result = getattr(super(), name)(*args, **options)
        if dies:
            raise EngineDead("injected")
        return result

    def add_request(self, *args: Any, **options: Any) -> None:
        self._call("add_request", *args, **options)

    def add_chunk(self, *args: Any, **options: Any) -> None:
        self._call("add_chunk", *args, **options)

    def truncate(self, *args: Any, **options: Any) -> None:
        self._call("truncate", *args, **options)

    def fork(self, *args: Any, **options: Any) -> None:
        self._call("fork", *args, **options)

    def step(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = self._call("step")
        return outputs


class World:
    """An engine over the oracle."""

    def __init__(self, rng: Random, model: OracleModel | None = None) -> None:
        self.model = model or TalkingModel()
        speculative = None
        if rng.random() < 0.5:
            speculative = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=3,
                prompt_lookup_min=1,
                prompt_lookup_max=3,
                adaptive=False,
            )
        self.config = EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            block_size=rng.choice((4, 16)),
            num_kv_blocks=rng.choice((40, 96)),
            max_num_seqs=4,
            max_num_batched_tokens=rng.choice((8, 64)),
            async_depth=rng.choice((1, 2, 3)),
            enable_prefix_caching=rng.random() < 0.5,
            speculative=speculative,
            eos_token_ids=frozenset({EOS}),
        )
        self.executor, self.engine = self._engine(self.config)

    def _engine(self, config: EngineConfig) -> tuple[OracleExecutor, FragileEngine]:
        executor = OracleExecutor(self.model, config.max_model_len)
        executor.allocate_kv(config.num_kv_blocks, config.block_size)
        drafter = None if config.speculative is None else NgramDrafter(1, 3)
        runtime = LocalRuntime(executor, drafter=drafter)
        return executor, FragileEngine(runtime, config)

    def held(self, request_id: str) -> list[int]:
        """What the engine holds of a request."""
        return list(self.engine.requests[request_id].timeline.tokens)

    def fresh_answer(self, token_ids: Sequence[int], params: SamplingParams) -> CompletionOutput:
        """What an engine says that hears this for the first time."""
        _, engine = self._engine(
            EngineConfig(max_model_len=MAX_MODEL_LEN, num_kv_blocks=96, eos_token_ids=frozenset({EOS}))
        )
        processor = OutputProcessor(TOKENIZER)
        processor.add("fresh", prompt=None, prompt_token_ids=token_ids, params=params)
        add_request(engine, "fresh", token_ids, params)
        while not processor.is_finished("fresh"):
            processor.process(engine.step())
        return processor.output("fresh").outputs[0]


def random_params(rng: Random) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=rng.choice((1, 3, 12, None)),
        stop=rng.sample(STOPS, rng.randrange(4)),
        include_stop_str_in_output=rng.random() < 0.3,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=[SAID[0]] if rng.random() < 0.2 else [],
        logprobs=rng.choice((None, 0)),
        skip_special_tokens=rng.random() < 0.8,
    )


def random_text(rng: Random) -> str:
    """A few words; now and then, more than there is room for."""
    count = rng.choice((0, 1, 2, 3, 5, 8)) if rng.random() < 0.9 else 60
    return "".join(rng.choice(PIECES) for _ in range(count))
