"""The worker of `peers.py` for llama.cpp: its C interface, without the Python of llama-cpp-python around it.

All sequences of a step are one batch, each with its own sequence id, as llama.cpp's own server does. The greedy choice
is one `argmax` over the logits, which is faster than llama.cpp's sampler.
"""

import ctypes
import json
import sys
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np

BATCH_SIZE = 512


class Engine:
    """A model and a context. Greedy decoding of some prompts together."""

    def __init__(self, model_path: str, threads: int, longest: int, sequences: int) -> None:
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            model_path.encode(), llama_cpp.llama_model_default_params()
        )
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = threads
        self._batch = llama_cpp.llama_batch_init(BATCH_SIZE, 0, 1)
        self._alone = self._context(longest, 1)
        self._together = self._context(longest, sequences)

    def _context(self, longest: int, sequences: int) -> llama_cpp.llama_context_p:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max(longest, 64) * sequences
        params.n_batch = params.n_ubatch = BATCH_SIZE
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, params)
        assert context, "llama.cpp made no context"
        return context

    def prefill_s(self, prompt: Sequence[int]) -> float:
        context = self._clear(self._alone)
        start_s = time.perf_counter()
        self._compute(context, [list(prompt)], [0])
        return time.perf_counter() - start_s

    def decode_s(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        context = self._clear(self._alone if len(prompts) == 1 else self._together)
        positions = [0] * len(prompts)
        inputs = [list(prompt) for prompt in prompts]
        start_s = 0.0
        for step in range(max_tokens):
            if step == 1:
                start_s = time.perf_counter()
            tokens = self._compute(context, inputs, positions)
            positions = [at + len(ids) for at, ids in zip(positions, inputs, strict=True)]
            inputs = [[token] for token in tokens]
        return time.perf_counter() - start_s

    def _clear(self, context: llama_cpp.llama_context_p) -> llama_cpp.llama_context_p:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        return context

    def _compute(
        self, context: llama_cpp.llama_context_p, inputs: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> list[int]:
        """One batch: each sequence's new ids from its position on. Returns each one's likeliest next id."""
        batch, row, wanted = self._batch, 0, []
        for sequence, (ids, start) in enumerate(zip(inputs, positions, strict=True)):
            for offset, token in enumerate(ids):
                batch.token[row] = token
                batch.pos[row] = start + offset
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = offset == len(ids) - 1
                row += 1
            wanted.append(row - 1)
        batch.n_tokens = row
        status = llama_cpp.llama_decode(context, batch)
        assert status == 0, f"llama_decode returned {status}"
        return [self._likeliest(context, at) for at in wanted]

    def _likeliest(self, context: llama_cpp.llama_context_p, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def main() -> None:
    engine = Engine(sys.argv[1], *map(int, sys.argv[2:5]))
    for line in sys.stdin:
        request = json.loads(line)
        prompts = request["prompts"]
        if request["op"] == "prefill":
            measured_s = engine.prefill_s(prompts[0])
        else:
            measured_s = engine.decode_s(prompts, request["max_tokens"])
        print(json.dumps({"seconds": measured_s}), flush=True)


if __name__ == "__main__":
    main()
