"""`segue run`: one question, its answer as it comes."""

import sys
import time

import msgspec

from segue.answers.outputs import Prompt, RequestOutput
from segue.args import EngineArgs
from segue.cli.output import print_json, write_answer
from segue.cli.parse import read_prompt
from segue.cli.process import START_S
from segue.contract.reports import FinishReason
from segue.errors import RequestFailed
from segue.llm.llm import LLM
from segue.sample.params import SamplingParams


def run(
    args: EngineArgs,
    prompt_argument: str | None,
    params: SamplingParams,
    *,
    raw: bool,
    system: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Answers the prompt on stdout, with a line of statistics on stderr."""
    text = read_prompt(prompt_argument)
    with LLM(args) as llm:
        loaded_s = time.perf_counter()
        output = _answer(llm, _prompt(llm, text, raw=raw, system=system), params, show=not as_json)
    for answer in output.outputs:
        if answer.finish_reason is FinishReason.ERROR:
            raise RequestFailed(f"the request failed: {answer.error}")
    if as_json:
        _write_json(args, text, output, loaded_s)
    if not quiet:
        print(statistics(output), file=sys.stderr)


def statistics(output: RequestOutput) -> str:
    """One line: tokens, tokens per second while decoding, time to first token."""
    num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
    parts = [f"{len(output.prompt_token_ids)} prompt tokens, {num_tokens} generated"]
    rate = tokens_per_second(output)
    if rate is not None:
        parts.append(f"{rate:,.1f} tok/s")
    if output.times.first_token_s is not None:
        since_start = output.times.first_token_s - START_S
        parts.append(
            f"first token after {output.times.time_to_first_token_s:.3f} s ({since_start:.3f} s with loading)"
        )
    return " | ".join(parts)


def tokens_per_second(output: RequestOutput) -> float | None:
    """Of the tokens after the first of each answer; None when there are none."""
    num_tokens = sum(max(0, len(answer.token_ids) - 1) for answer in output.outputs)
    decode_s = output.times.decode_s
    return num_tokens / decode_s if num_tokens and decode_s else None


def _prompt(llm: LLM, text: str, *, raw: bool, system: str | None) -> Prompt:
    if raw:
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"prompt_token_ids": llm.encode_chat(messages)}


def _answer(llm: LLM, prompt: Prompt, params: SamplingParams, *, show: bool) -> RequestOutput:
    """Carries out the request; shows one answer as it comes, several when they are complete."""
    with llm.stream(prompt, params) as stream:
        for delta in stream:
            if show and params.n == 1:
                write_answer(delta.text)
        output = stream.output
    if show and params.n == 1:
        print(flush=True)
    elif show:
        for answer in output.outputs:
            write_answer(f"--- {answer.index}\n{answer.text}\n")
    return output


def _write_json(args: EngineArgs, text: str, output: RequestOutput, loaded_s: float) -> None:
    times = output.times
    record = msgspec.to_builtins(output, str_keys=True) | {
        "model": args.model,
        "prompt": text,
        "times": {
            "load_s": loaded_s - START_S,
            "time_to_first_token_s": times.time_to_first_token_s,
            "decode_s": times.decode_s,
            "tokens_per_second": tokens_per_second(output),
        },
    }
    print_json(record)
