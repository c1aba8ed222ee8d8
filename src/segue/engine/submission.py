"""`Submission`: all that a caller asks for, as one value that nothing changes on its way to the ledger.

    LLM, AsyncLLM, sessions ──▶ Intake ──▶ Submission ──▶ thread, process, journal ──▶ Engine
                                checks, names, draws seeds

It is made and checked once, where the request enters. A new argument is a field here, a line in `Intake.submission`
if it can be wrong, and the place that uses it.
"""

import itertools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from segue.engine.check import check_length
from segue.engine.config import EngineConfig
from segue.errors import ParameterError
from segue.sample.guide import NO_END
from segue.sample.params import SamplingParams

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array
"""Typecode 'i'."""

Keep = Literal["computed", "all"]
"""What of an answer stays in front of the next input: all but the last token, which has no KV yet; or all."""


class KvScope(msgspec.Struct, frozen=True):
    """What a request's KV depends on beside its ids: blocks are shared only with requests of an equal scope.

    A prompt given as a dict has these as keys, and so has the body of a request over HTTP.
    """

    cache_salt: str | None = None
    """Nothing but a way to keep apart."""
    adapter: str | None = None
    """The name of a LoRA adapter (Hu et al. 2021) of the model."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A request, right in itself; see `Intake.submission`."""

    request_id: str
    """From here to the ledger, and never used again: what is under way when it is aborted reaches nobody else."""
    token_ids: TokenIds
    params: SamplingParams | None
    """None, for a resumable request: only prefilled."""
    default_seed: int
    """Of answers whose parameters bring none."""
    priority: int = 0
    """A lower one is served first, under the priority policy."""
    scope: KvScope = KvScope()
    resumable: bool = False
    """More input may follow."""
    keep: Keep = "computed"
    num_output_tokens: int = 0
    """So many of the last ids are output that another engine has given: the answer goes on after them as there."""

    def forked(self, request_id: str, default_seed: int) -> "Submission":
        """That of a fork, but for its history."""
        return msgspec.structs.replace(
            self,
            request_id=request_id,
            token_ids=array("i"),
            params=None,
            default_seed=default_seed,
            resumable=True,
            num_output_tokens=0,
        )


class Intake:
    """Where requests enter an engine: makes their submissions. Any thread may call.

    A request is numbered when it is found right, so that the seeds of a program's requests repeat.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self.vocab_size = vocab_size
        self._ids = itertools.count()
        self._numbers = itertools.count()

    def new_id(self, name: str | None = None) -> str:
        """An id for a request, never given before; `name` is for those who read it."""
        number = next(self._ids)
        return str(number) if name is None else f"{name}/{number}"

    def next_seed(self) -> int:
        """The seed of the next request, if it brings none."""
        return default_seed(self._config.seed, next(self._numbers))

    def submission(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        scope: KvScope = KvScope(),  # noqa: B008 - frozen
        resumable: bool = False,
        keep: Keep = "computed",
    ) -> Submission:
        """A request; see the fields of `Submission`. `request_id` is one of `new_id`; None: a new one.

        Raises ParameterError, or CapacityError when it can never fit.
        """
        if params is None and not resumable:
            raise ParameterError("params", params, "only a resumable request can do without")
        if keep not in get_args(Keep):
            raise ParameterError("keep", keep, 'must be "computed" or "all"')
        if scope.adapter is not None:
            raise ParameterError("adapter", scope.adapter, "there are no adapters")
        ids = self.chunk(token_ids, params, resumable=resumable)
        if not ids and params is not None:
            raise ParameterError("prompt_token_ids", [], "is empty; give at least one token")
        return Submission(
            request_id=self.new_id() if request_id is None else request_id,
            token_ids=ids,
            params=params,
            default_seed=self.next_seed(),
            priority=priority,
            scope=scope,
            resumable=resumable,
            keep=keep,
        )

    def chunk(
        self, token_ids: Sequence[int], params: SamplingParams | None, *, resumable: bool = True
    ) -> TokenIds:
        """The ids of input for a request. Raises ParameterError, or CapacityError when it can never fit; whether it
        fits after the history is for the engine to say."""
        try:
            ids = array("i", token_ids)
        except (TypeError, OverflowError):
            raise ParameterError("prompt_token_ids", token_ids, "must be a list of token ids") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ParameterError(
                "prompt_token_ids", wrong, f"is no token id; the model has {self.vocab_size}"
            )
        if params is not None:
            self._check_params(params, resumable=resumable)
        check_length(self._config, len(ids), params)
        return ids

    def _check_params(self, params: SamplingParams, *, resumable: bool) -> None:
        params.check_vocab(self.vocab_size)
        if params.structured_outputs is not None and not self._config.eos_token_ids:
            raise ParameterError("structured_outputs", "…", NO_END)
        params.check_grammar()
        if resumable and params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", params.prompt_logprobs, "not for a resumable request")


def default_seed(engine_seed: int, number: int) -> int:
    """The seed of an engine's request `number`, if it brings none: 64 bits, well spread (SplitMix64, Steele et al.
    2014)."""
    mask = 2**64 - 1
    z = (engine_seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
