"""The native executor: C++ kernels for the CPU, one native call for each step."""

import os
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from segue import _native
from segue._native import available_cpus as available_cpus
from segue.contract.step import ForwardResult, SeqStep, TokenLogprobs
from segue.display import show_path
from segue.errors import ModelFileError, ParameterError
from segue.models.program import Program
from segue.weights.model_file import ModelFile

ISA_VARIABLE: Final = "SEGUE_ISA"
"""Environment variable that forces an instruction set: avx512_amx, avx512, avx2_vnni, avx2 or portable."""
MAX_THREADS: Final = 1024


class NativeExecutor:
    """An `Executor` (`contract/step.py`). Packs the weights at load, from the mapped file.

    threads: None for all CPUs this process may use; more than that is slow, and gives the same bits.
    kv_dtype: f16 halves the KV memory.
    Raises ModelFileError when the program cannot be computed with the file's tensors, ParameterError for
    a bad number of threads, KV type or instruction set, CapacityError when the system gives no threads.
    """

    def __init__(
        self,
        program: Program,
        model: ModelFile,
        *,
        threads: int | None = None,
        kv_dtype: Literal["f16", "f32"] = "f16",
    ) -> None:
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise ParameterError("threads", threads, f"must be in [1, {MAX_THREADS}]")
        if kv_dtype not in ("f16", "f32"):
            raise ParameterError("kv_dtype", kv_dtype, "unknown; known are f16, f32")
        self._program = program
        try:
            self._model = _native.Model(
                program,
                list(model.tensors.values()),
                isa=os.environ.get(ISA_VARIABLE, ""),
                threads=threads or available_cpus(),
                kv_f32=kv_dtype == "f32",
            )
        except ModelFileError as error:
            raise ModelFileError(f"{show_path(model.path)}: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._program.max_model_len

    @property
    def kv_bytes_per_token(self) -> int:
        return self._model.kv_bytes_per_token

    @property
    def threads(self) -> int:
        return self._model.threads

    @property
    def isa(self) -> str:
        """The instruction set of the kernels."""
        return self._model.isa

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks · block_size` positions. Raises CapacityError when there is none."""
        assert num_blocks >= 0
        assert block_size > 0
        self._model.allocate_kv(num_blocks, block_size)

    def forward(self, seqs: Sequence[SeqStep], copies: Sequence[tuple[int, int]] = ()) -> ForwardResult:
        """Copy blocks, then compute all inputs of all sequences and sample."""
        tokens, logprobs, prompt_logprobs, errors = self._model.forward(seqs, copies)
        return ForwardResult(
            tokens=tokens,
            logprobs={row: TokenLogprobs(*fields) for row, fields in logprobs.items()},
            prompt_logprobs={
                index: [TokenLogprobs(*fields) for fields in rows] for index, rows in prompt_logprobs.items()
            },
            errors=errors,
        )

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """[n, vocab]: the logits at each of `token_ids`, computed with a KV of their own."""
        return self._model.logits(token_ids)

    def close(self) -> None:
        """Give the KV memory back."""
        self._model.release_kv()
