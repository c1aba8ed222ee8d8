"""The worker of `peers.py` for vLLM on the CPU.

It reads no GGUF; `scripts/gguf_to_hf.py` writes what it reads, in bfloat16.
"""

import json
import os
import sys
import time
from collections.abc import Sequence


class Engine:
    """vLLM's offline interface."""

    def __init__(self, folder: str, threads: int, longest: int, sequences: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        from vllm import LLM

        self._llm = LLM(
            folder,
            max_model_len=max(longest, 64),
            max_num_seqs=sequences,
            max_num_batched_tokens=512 * 2,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def prefill_s(self, prompt: Sequence[int]) -> float:
        return self._run([prompt], 1)

    def decode_s(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """What the tokens after the first take: the whole less a run with one token."""
        return self._run(prompts, max_tokens) - self._run(prompts, 1)

    def _run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        start_s = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": list(each)} for each in prompts], params, use_tqdm=False)
        return time.perf_counter() - start_s


def main() -> None:
    del sys.path[0]  # this folder: its kernels.py is not the package that transformers looks for
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not part of the conversation
    engine = Engine(sys.argv[1], *(int(arg) for arg in sys.argv[2:5]))
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "prefill":
            seconds = engine.prefill_s(request["prompts"][0])
        else:
            seconds = engine.decode_s(request["prompts"], request["max_tokens"])
        print(json.dumps({"seconds": seconds}), file=out, flush=True)


if __name__ == "__main__":
    main()
