"""What an engine is built with: frozen, checked once, the same in every process."""

from collections.abc import Mapping
from typing import Literal, assert_never, get_args

import msgspec

from segue.contract.step import MAX_STEPS_IN_FLIGHT
from segue.errors import CapacityError, ParameterError

SchedulingPolicy = Literal["fcfs", "priority"]
SpeculativeMethod = Literal["ngram", "draft_model"]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are proposed; vLLM's keys of `speculative_config`."""

    method: SpeculativeMethod
    num_speculative_tokens: int
    """k: the most drafts in one step."""
    prompt_lookup_min: int = 2
    """n-gram: the shortest run of ids to look for."""
    prompt_lookup_max: int = 5
    model: str | None = None
    """draft_model: the drafter, with the same vocabulary as the model it drafts for."""
    adaptive: bool = True
    """Let k follow the measured acceptance, down to none; False: always k."""

    def __post_init__(self) -> None:
        _check_method(self.method)
        check_positive("speculative_config.num_speculative_tokens", self.num_speculative_tokens)
        match self.method:
            case "ngram":
                check_positive("speculative_config.prompt_lookup_min", self.prompt_lookup_min)
                if self.prompt_lookup_max < self.prompt_lookup_min:
                    raise ParameterError(
                        "speculative_config.prompt_lookup_max",
                        self.prompt_lookup_max,
                        f"is less than prompt_lookup_min={self.prompt_lookup_min}",
                    )
            case "draft_model":
                if not self.model:
                    raise ParameterError("speculative_config.model", self.model, "draft_model needs a model")
            case _:
                assert_never(self.method)

    @classmethod
    def of(cls, config: "SpeculativeConfig | Mapping[str, object] | None") -> "SpeculativeConfig | None":
        """The config of a dict with these keys. Raises ParameterError for an unknown key or a wrong type."""
        if config is None or isinstance(config, SpeculativeConfig):
            return config
        if not isinstance(config, Mapping):
            raise ParameterError("speculative_config", config, "must be a dict with a method")
        _check_method(config.get("method"))
        try:
            return msgspec.convert(config, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ParameterError):
                raise error.__cause__ from None
            raise ParameterError("speculative_config", config, str(error)) from None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and switches of one engine; vLLM's names. Sizes in tokens or blocks."""

    max_model_len: int
    """The longest a request may become, prompt and output."""
    model_context: int | None = None
    """The longest that the model was made for. None: `max_model_len`."""
    num_kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    """The most requests in one step."""
    max_num_batched_tokens: int = 512
    """The most tokens computed in one step, drafts included."""
    enable_prefix_caching: bool = True
    async_depth: int = 1
    """How many steps may be in flight; 1 is synchronous."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    speculative: SpeculativeConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    """For requests that bring no seed."""

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "num_kv_blocks",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "async_depth",
        ):
            check_positive(name, getattr(self, name))
        if self.async_depth > MAX_STEPS_IN_FLIGHT:
            raise ParameterError("async_depth", self.async_depth, f"must be at most {MAX_STEPS_IN_FLIGHT}")
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            known = ", ".join(get_args(SchedulingPolicy))
            raise ParameterError("scheduling_policy", self.scheduling_policy, f"unknown; known are {known}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ParameterError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"is less than max_num_seqs={self.max_num_seqs}; each running request needs one token a step",
            )
        need = self.blocks_for(self.max_model_len)
        if need > self.num_kv_blocks:
            raise CapacityError(
                f"max_model_len={self.max_model_len} needs {need} KV blocks of {self.block_size} tokens, "
                f"num_kv_blocks={self.num_kv_blocks}: raise num_kv_blocks or lower max_model_len"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def num_speculative_tokens(self) -> int:
        return self.speculative.num_speculative_tokens if self.speculative else 0

    @property
    def has_draft_model(self) -> bool:
        return self.speculative is not None and self.speculative.method == "draft_model"


def _check_method(method: object) -> None:
    if method not in get_args(SpeculativeMethod):
        known = ", ".join(get_args(SpeculativeMethod))
        raise ParameterError("speculative_config.method", method, f"unknown; known are {known}")


def check_positive(name: str, value: object) -> None:
    """Raises ParameterError unless the value is an integer from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ParameterError(name, value, "must be a positive integer below 2^31")
