"""Worker of kl.py, for llama.cpp's own environment: windows of token ids in, logits out.

    python bench/llama_cpp_logits.py MODEL.gguf THREADS < windows > logits

A window is a line of ids; its logits are n · vocab f32 in native byte order, each window from an empty KV.
"""

import sys

import llama_cpp
import numpy as np

WINDOW = 512


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    llama = llama_cpp.Llama(
        model,
        n_ctx=WINDOW,
        n_batch=WINDOW,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )
    for line in sys.stdin:
        ids = [int(token) for token in line.split()]
        llama.reset()
        llama.eval(ids)
        sys.stdout.buffer.write(llama.scores[: len(ids)].astype(np.float32).tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
