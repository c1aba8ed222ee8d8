"""Segue: a language-model engine for live sessions.

    from segue import LLM, SamplingParams

    llm = LLM("smollm2")
    outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16))
    print(outputs[0].outputs[0].text)

Names are imported on first use, so that `import segue` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.answers.outputs import CompletionOutput, Logprob, RequestOutput, TextPrompt, TokensPrompt
    from segue.answers.stream import StreamingInput
    from segue.args import EngineArgs
    from segue.engine.config import SpeculativeConfig
    from segue.errors import (
        CapacityError,
        DownloadError,
        EngineDead,
        FailedError,
        ModelFileError,
        ParameterError,
        RequestFailed,
        SegueError,
        SessionClosed,
        SessionError,
        UsageError,
    )
    from segue.llm.async_llm import AsyncLLM
    from segue.llm.llm import LLM
    from segue.sample.params import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "segue.llm.llm",
    "AsyncLLM": "segue.llm.async_llm",
    "StreamingInput": "segue.answers.stream",
    "EngineArgs": "segue.args",
    "SamplingParams": "segue.sample.params",
    "SpeculativeConfig": "segue.engine.config",
    "CompletionOutput": "segue.answers.outputs",
    "Logprob": "segue.answers.outputs",
    "RequestOutput": "segue.answers.outputs",
    "TextPrompt": "segue.answers.outputs",
    "TokensPrompt": "segue.answers.outputs",
    "SegueError": "segue.errors",
    "UsageError": "segue.errors",
    "ParameterError": "segue.errors",
    "ModelFileError": "segue.errors",
    "CapacityError": "segue.errors",
    "FailedError": "segue.errors",
    "RequestFailed": "segue.errors",
    "DownloadError": "segue.errors",
    "EngineDead": "segue.errors",
    "SessionClosed": "segue.errors",
    "SessionError": "segue.errors",
}
"""The module that each public name lives in."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "DownloadError",
    "EngineArgs",
    "EngineDead",
    "FailedError",
    "Logprob",
    "ModelFileError",
    "ParameterError",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "SegueError",
    "SessionClosed",
    "SessionError",
    "SpeculativeConfig",
    "StreamingInput",
    "TextPrompt",
    "TokensPrompt",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'segue' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
