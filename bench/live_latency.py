"""What live input buys: the time from the last character of a prompt to the first token of its answer.

A prompt of about 1,500 tokens arrives as 60 words a second, prefilled as it comes, against the same prompt sent
whole when its last word is known. For one session and for eight at once. `--peers` adds llama.cpp and `--vllm`
vLLM, which get the whole prompt at the end as their servers would, with and without a cached prefix of all but the
last word.

    python bench/live_latency.py MODEL [--words-per-second 60] [--runs 3] [--peers PYTHON]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from pathlib import Path

from segue.args import EngineArgs
from segue.host.build import build
from segue.host.loop import EngineLoop
from segue.sample.params import SamplingParams
from segue.session.live import Session, SessionManager

TEXT = Path(__file__).parent / "text" / "kl.txt"
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prompt_words(manager: SessionManager, num_tokens: int) -> list[str]:
    """Words of the text, about so many tokens of them."""
    words = TEXT.read_text().split()
    while len(manager.tokenizer.encode(" ".join(words))) > num_tokens:
        words = words[: int(len(words) * 0.98)]
    return words


async def live(manager: SessionManager, words: list[str], rate: float, number: int) -> float:
    """Seconds from the last word to the first token, with the words arriving at `rate` a second."""
    session = manager.open()
    begin = time.perf_counter()
    session.append(f"{number}.")
    for i, word in enumerate(words):
        await asyncio.sleep(max(0.0, begin + i / rate - time.perf_counter()))
        session.append(" " + word)
    return await first_token(session)


async def whole(manager: SessionManager, words: list[str], number: int) -> float:
    """The same with the prompt sent whole."""
    session = manager.open()
    begin = time.perf_counter()
    session.append(f"{number}. " + " ".join(words))
    await first_token(session)
    return time.perf_counter() - begin


async def first_token(session: Session) -> float:
    begin = time.perf_counter()
    async for _ in session.respond(ONE_TOKEN):
        break
    elapsed = time.perf_counter() - begin
    session.close()
    return elapsed


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    loaded = build(
        EngineArgs.of(
            args.model,
            {"max_model_len": 2048, "async_scheduling": True, "max_num_seqs": 16, "num_kv_blocks": 2048},
        )
    )
    loop = EngineLoop(loaded.engine)
    manager = SessionManager(loop, loaded.tokenizer)
    words = prompt_words(manager, args.tokens)
    results: dict[str, list[float]] = {}
    number = 0
    try:
        for _ in range(args.runs):
            for num_sessions in args.sessions:
                numbers = range(number, number + num_sessions)
                number += num_sessions
                times = await asyncio.gather(
                    *[live(manager, words, args.words_per_second, n) for n in numbers]
                )
                results.setdefault(f"live, {num_sessions} sessions", []).extend(times)
                numbers = range(number, number + num_sessions)
                number += num_sessions
                times = await asyncio.gather(*[whole(manager, words, n) for n in numbers])
                results.setdefault(f"whole, {num_sessions} sessions", []).extend(times)
    finally:
        manager.close()
        loop.close()
    return results


PEER = """
import json, sys, time
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=2048, n_batch=512, verbose=False)
words = sys.stdin.read().split()
results = {"llama.cpp, whole": [], "llama.cpp, all but the last word cached": []}
for run in range(int(sys.argv[2])):
    ids = llm.tokenize((f"{run}. " + " ".join(words)).encode(), add_bos=False)
    begin = time.perf_counter(); llm.reset(); llm.eval(ids); llm.sample(temp=0)
    results["llama.cpp, whole"].append(time.perf_counter() - begin)
    llm.reset(); llm.eval(ids[:-2])
    begin = time.perf_counter(); llm.eval(ids[-2:]); llm.sample(temp=0)
    results["llama.cpp, all but the last word cached"].append(time.perf_counter() - begin)
print(json.dumps(results))
"""


VLLM = """
import json, os, sys, time
del sys.path[0]
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=2048, enable_prefix_caching=True, disable_log_stats=True)
words = sys.stdin.read().split()
params = SamplingParams(temperature=0, max_tokens=1)
results = {"vLLM, whole": [], "vLLM, all but the last word cached": []}
def first_token(name, ids):
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    if name: results[name].append(time.perf_counter() - begin)
for run in range(int(sys.argv[2]) + 1):
    ids = llm.get_tokenizer().encode(f"{run}. " + " ".join(words))
    first_token("vLLM, whole" if run else None, ids)
    first_token("vLLM, all but the last word cached" if run else None, ids)
print(json.dumps(results), file=out, flush=True)
"""


def measure_peer(python: str, script: str, model: str, runs: int, words: str) -> dict[str, list[float]]:
    run = subprocess.run(
        [python, "-c", script, model, str(runs)],
        input=words,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="path of a GGUF file")
    parser.add_argument("--tokens", type=int, default=1500, help="length of the prompt (%(default)s)")
    parser.add_argument("--words-per-second", type=float, default=60)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8], help="how many at once (1 8)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--vllm",
        nargs=2,
        metavar=("PYTHON", "FOLDER"),
        help="vLLM, and the model as scripts/gguf_to_hf.py writes it",
    )
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter with llama-cpp-python")
    args = parser.parse_args()
    results = asyncio.run(measure(args))
    words = " ".join(TEXT.read_text().split()[:1050])
    if args.peers:
        results |= measure_peer(args.peers, PEER, args.model, args.runs, words)
    if args.vllm:
        results |= measure_peer(args.vllm[0], VLLM, args.vllm[1], args.runs, words)
    print("| input | median ms to first token | least | most |\n|---|---|---|---|")
    for name, times in results.items():
        ms = [1000 * seconds for seconds in times]
        print(f"| {name} | {statistics.median(ms):.0f} | {min(ms):.0f} | {max(ms):.0f} |")


if __name__ == "__main__":
    main()
