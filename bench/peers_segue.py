"""The worker of `peers.py` for Segue, through `LLM`."""

import json
import sys

from segue import LLM, RequestOutput, SamplingParams, TokensPrompt


def main() -> None:
    model, threads, longest, sequences = sys.argv[1], *map(int, sys.argv[2:5])
    llm = LLM(
        model,
        threads=threads,
        max_num_seqs=sequences,
        num_kv_blocks=sequences * -(-longest // 16),
        max_model_len=longest,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )
    for line in sys.stdin:
        request = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        measured_s = _prefill_s(outputs) if request["op"] == "prefill" else _decode_s(outputs)
        print(json.dumps({"seconds": measured_s}), flush=True)


def _prefill_s(outputs: list[RequestOutput]) -> float:
    (output,) = outputs
    assert output.times.time_to_first_token_s is not None
    return output.times.time_to_first_token_s


def _decode_s(outputs: list[RequestOutput]) -> float:
    first_s = [output.times.first_token_s or 0.0 for output in outputs]
    last_s = [output.times.last_token_s or 0.0 for output in outputs]
    return max(last_s) - max(first_s)


if __name__ == "__main__":
    main()
