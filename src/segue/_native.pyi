"""The native runtime's C++ module. Use `segue.runtime.native`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from segue.contract.step import Sampling, SeqStep
from segue.models.program import Program
from segue.weights.model_file import Tensor

_Logprobs = tuple[float, int, tuple[int, ...], tuple[float, ...]]
"""The fields of `TokenLogprobs`."""

def available_cpus() -> int:
    """CPUs this process may use: its affinity mask and its control group's quota."""

class Model:
    """A program compiled for the CPU, its packed weights and its KV memory. Calls must not be concurrent.

    Reads operations and tensors by the names of their attributes. Raises ModelFileError for an operation that
    it does not know, or that does not fit the others or the tensors.
    """

    def __init__(
        self, program: Program, tensors: Sequence[Tensor], *, isa: str, threads: int, kv_f32: bool
    ) -> None: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...
    def release_kv(self) -> None: ...
    def forward(
        self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]]
    ) -> tuple[list[int], dict[int, _Logprobs], dict[int, list[_Logprobs]], dict[int, str]]:
        """(tokens, logprobs by row, prompt logprobs by sequence, errors by sequence)."""
    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]: ...

def sample_row(
    logits: npt.NDArray[np.float32], sampling: Sampling, position: int, history: Sequence[int]
) -> int:
    """The id drawn for `position` from logits [vocab]."""

def row_logprobs(
    logits: npt.NDArray[np.float32], token: int, num_top: int
) -> tuple[float, int, list[int], list[float]]:
    """Log-probability and rank of `token`, then the `num_top` most likely ids and their log-probabilities."""

def all_finite(logits: npt.NDArray[np.float32]) -> bool:
    """False when there is a NaN or an infinity."""

def philox4x32(counter: Sequence[int], key: Sequence[int]) -> Sequence[int]:
    """Four words of Philox4x32-10."""
