"""`segue bench`: how fast a model runs here."""

import random
import statistics
from collections.abc import Callable

import msgspec

from segue.answers.outputs import RequestOutput, TokensPrompt
from segue.args import EngineArgs
from segue.cli.output import print_json
from segue.cli.table import format_table
from segue.errors import CapacityError
from segue.llm.llm import LLM
from segue.sample.params import SamplingParams

_DECODE_PROMPT_LEN = 16


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. The prompts are random token ids of a fixed seed: speed depends on lengths only."""

    prompt_len: int
    decode_len: int
    sequences: int


class Measurement(msgspec.Struct, kw_only=True):
    """Runs of one workload."""

    name: str
    num_tokens: int
    seconds: list[float]
    median_s: float
    min_s: float
    tokens_per_second: float
    """By the median."""
    best_tokens_per_second: float

    @classmethod
    def of(cls, name: str, num_tokens: int, seconds: list[float]) -> "Measurement":
        median_s, min_s = statistics.median(seconds), min(seconds)
        return cls(
            name=name,
            num_tokens=num_tokens,
            seconds=seconds,
            median_s=median_s,
            min_s=min_s,
            tokens_per_second=num_tokens / median_s,
            best_tokens_per_second=num_tokens / min_s,
        )


def bench(args: EngineArgs, workload: Workload, *, repeat: int, as_json: bool) -> None:
    """Prints a table, or JSON. The three measurements take turns, so that a disturbance hits all of them."""
    with LLM(args) as llm:
        longest = max(workload.prompt_len + 1, _DECODE_PROMPT_LEN + workload.decode_len)
        if longest > llm.config.max_model_len:
            raise CapacityError(
                f"the workload needs {longest} tokens, the model has room for {llm.config.max_model_len}: "
                "lower --prompt-len or --decode-len"
            )
        measurements = measure(llm, workload, repeat=repeat)
    if as_json:
        print_json({"model": args.model, "measurements": measurements})
        return
    rows = [
        (
            each.name,
            str(each.num_tokens),
            f"{each.median_s:.4f}",
            f"{each.min_s:.4f}",
            f"{each.tokens_per_second:,.1f}",
            f"{each.best_tokens_per_second:,.1f}",
        )
        for each in measurements
    ]
    header = ("", "tokens", "median s", "min s", "tok/s (median)", "tok/s (best)")
    print(format_table(header, rows, right=frozenset(range(1, 6))))


def measure(llm: LLM, workload: Workload, *, repeat: int) -> list[Measurement]:
    """Prefill of one prompt, decoding of one sequence and of many; each once more first, not counted."""
    runs: dict[str, tuple[int, Callable[[int], float]]] = {
        f"prefill {workload.prompt_len}": (
            workload.prompt_len,
            lambda seed: _prefill_s(llm, workload.prompt_len, seed),
        ),
        "decode 1 sequence": (
            workload.decode_len - 1,
            lambda seed: _decode_s(llm, 1, workload.decode_len, seed),
        ),
        f"decode {workload.sequences} sequences": (
            workload.sequences * (workload.decode_len - 1),
            lambda seed: _decode_s(llm, workload.sequences, workload.decode_len, seed),
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, (_, run_s) in runs.items():
            elapsed_s = run_s(turn)
            if turn > 0:
                seconds[name].append(elapsed_s)
    return [Measurement.of(name, num_tokens, seconds[name]) for name, (num_tokens, _) in runs.items()]


def _prefill_s(llm: LLM, prompt_len: int, seed: int) -> float:
    """From the request to its first token."""
    (output,) = _generate(llm, 1, prompt_len, 1, seed)
    elapsed_s = output.times.time_to_first_token_s
    assert elapsed_s is not None
    return elapsed_s


def _decode_s(llm: LLM, sequences: int, decode_len: int, seed: int) -> float:
    """From when all sequences have their first token to the end."""
    outputs = _generate(llm, sequences, _DECODE_PROMPT_LEN, decode_len, seed)
    first_s = [output.times.first_token_s for output in outputs]
    last_s = [output.times.last_token_s for output in outputs]
    return max(each for each in last_s if each is not None) - max(
        each for each in first_s if each is not None
    )


def _generate(llm: LLM, sequences: int, prompt_len: int, max_tokens: int, seed: int) -> list[RequestOutput]:
    generator = random.Random(seed)
    vocab_size = llm.get_tokenizer().vocab_size
    prompts = [
        TokensPrompt(prompt_token_ids=[generator.randrange(vocab_size) for _ in range(prompt_len)])
        for _ in range(sequences)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)
