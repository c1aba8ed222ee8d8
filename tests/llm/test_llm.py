"""`LLM` over the reference runtime and a random model: shapes, order, errors, interruption."""

import io
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import segue
from segue import (
    LLM,
    CapacityError,
    EngineArgs,
    ModelFileError,
    ParameterError,
    RequestFailed,
    SamplingParams,
    TokensPrompt,
)
from segue.answers.outputs import Prompt
from segue.args import EngineOptions
from segue.contract.reports import EngineOutput
from segue.contract.step import ForwardResult, SeqStep
from segue.engine.engine import Engine
from segue.host.build import build
from segue.runtime.native import available_cpus
from segue.runtime.reference import ReferenceExecutor
from tests.weights.make_gguf import tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Of the random model: layers, k and v, KV heads, head size, f32."""
PROMPTS = ["the hen", "an inn in the", "of", "she said on and on"]


def texts(llm: LLM, prompts: list[str], params: SamplingParams | list[SamplingParams]) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


def test_outputs_are_in_the_order_of_the_prompts_and_batching_changes_nothing(tiny_llm: LLM) -> None:
    alone = [texts(tiny_llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert texts(tiny_llm, PROMPTS, GREEDY) == alone
    assert texts(tiny_llm, PROMPTS[::-1], GREEDY) == alone[::-1]


def test_output_has_vllms_shape(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = tiny_llm.generate("the hen", params, use_tqdm=False)
    assert output.finished
    assert output.prompt == "the hen"
    assert output.prompt_token_ids == tiny_llm.get_tokenizer().encode("the hen")
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    (answer,) = output.outputs
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 4
    assert answer.logprobs is not None
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entries[token].rank == 1
        assert 2 <= len(entries) <= 3
    assert answer.cumulative_logprob == sum(
        entries[token].logprob for token, entries in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert output.metrics.num_computed_tokens >= 4
    assert output.times.time_to_first_token_s is not None


def test_prompts_of_every_kind_mean_the_same(tiny_llm: LLM) -> None:
    token_ids = tiny_llm.get_tokenizer().encode("the hen")
    prompts: list[Prompt] = [
        "the hen",
        {"prompt": "the hen"},
        {"prompt_token_ids": token_ids},
        TokensPrompt(prompt_token_ids=tuple(token_ids), prompt="for the record"),
        {"prompt": "the hen", "cache_salt": "other"},
    ]
    outputs = tiny_llm.generate(prompts, GREEDY, use_tqdm=False)
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(token_ids)}
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["the hen", "the hen", None, "for the record", "the hen"]


def test_special_tokens_in_a_prompt_are_tokens(tiny_llm: LLM) -> None:
    (output,) = tiny_llm.generate("<|im_start|>a", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids[0] in tiny_llm.get_tokenizer().special_ids


def test_parameters_for_each_prompt(tiny_llm: LLM) -> None:
    params = [msgspec.structs.replace(GREEDY, max_tokens=count) for count in (1, 2, 3)]
    outputs = tiny_llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]


def test_seeds_repeat_and_answers_differ(tiny_llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    (first,) = tiny_llm.generate("the", params, use_tqdm=False)
    (again,) = tiny_llm.generate("the", params, use_tqdm=False)
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in again.outputs]
    assert len({tuple(a.token_ids) for a in first.outputs}) == 3
    (alone,) = tiny_llm.generate("the", msgspec.structs.replace(params, n=1, seed=9), use_tqdm=False)
    assert alone.outputs[0].token_ids == first.outputs[2].token_ids


def test_stop_string_ends_the_answer(tiny_llm: LLM) -> None:
    (whole,) = texts(tiny_llm, ["the hen"], msgspec.structs.replace(GREEDY, max_tokens=24))
    stop = whole[5:7]
    params = msgspec.structs.replace(GREEDY, max_tokens=24, stop=stop)
    (output,) = tiny_llm.generate("the hen", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_prefix_cache_hits_show_and_can_be_reset(tiny_path: Path) -> None:
    with LLM(tiny_path, runtime="reference", max_num_seqs=2, block_size=4) as llm:
        prompt = TokensPrompt(prompt_token_ids=list(range(3, 24)))
        cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
        llm.reset_prefix_cache()
        cached.append(llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens)
        assert cached == [0, 20, 0]


def test_chat_takes_one_conversation_or_several(tiny_llm: LLM) -> None:
    hello = [{"role": "user", "content": "the hen"}]
    other = [{"role": "system", "content": "on"}, {"role": "user", "content": "an inn"}]
    (one,) = tiny_llm.chat(hello, GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == tiny_llm.encode_chat(hello)
    several = tiny_llm.chat([hello, other], GREEDY, use_tqdm=False)
    assert several[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert several[1].prompt_token_ids == tiny_llm.encode_chat(other)


def test_stream_joins_to_the_answer(tiny_llm: LLM) -> None:
    (whole,) = tiny_llm.generate("the hen", GREEDY, use_tqdm=False)
    with tiny_llm.stream("the hen", GREEDY) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert stream.output.outputs[0].finish_reason == "length"


def test_stream_that_is_left_early_aborts(tiny_llm: LLM) -> None:
    with tiny_llm.stream("the hen", msgspec.structs.replace(GREEDY, max_tokens=100)) as stream:
        next(stream)
    assert stream.output.outputs[0].finish_reason == "abort"
    assert texts(tiny_llm, ["the hen"], GREEDY)


@pytest.mark.parametrize(
    ("name", "most", "too_many"),
    [
        ("n", 1024, 1025),
        ("logprobs", 1024, 1025),
        ("stop", ["a"] * 64, ["a"] * 65),
        ("stop", ["a" * 2048] * 2, ["a" * 2048, "a" * 2049]),
        ("stop_token_ids", [1] * 1024, [1] * 1025),
        ("logit_bias", dict.fromkeys(range(1024), 1.0), dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_limits_of_parameters(name: str, most: Any, too_many: Any) -> None:
    assert getattr(SamplingParams(**{name: most}), name) == most
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: too_many})
    assert caught.value.parameter == name
    assert len(str(caught.value)) < 200


def test_default_parameters_and_no_prompts(tiny_llm: LLM) -> None:
    assert tiny_llm.generate([], use_tqdm=False) == []
    assert len(tiny_llm.generate("the", use_tqdm=False)[0].outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("prompt", "parameter"),
    [
        (3, "prompts"),
        ({}, "prompts"),
        ({"prompt": 3}, "prompt"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [320]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**40]}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt": "a", "cache_salt": 1}, "cache_salt"),
        ({"prompt": "a", "adapter": "mine"}, "adapter"),
    ],
)
def test_bad_prompt_names_the_parameter_and_runs_nothing(tiny_llm: LLM, prompt: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        tiny_llm.generate(["the", prompt], GREEDY, use_tqdm=False)
    assert caught.value.parameter == parameter
    assert texts(tiny_llm, ["the"], GREEDY)


def test_number_of_parameters_must_match(tiny_llm: LLM) -> None:
    with pytest.raises(ParameterError, match="there are 2 prompts"):
        tiny_llm.generate(PROMPTS[:2], [GREEDY], use_tqdm=False)
    with pytest.raises(ParameterError, match="there are 2 prompts"):
        tiny_llm.generate(PROMPTS[:2], GREEDY, priority=[1, 2, 3], use_tqdm=False)


@pytest.mark.parametrize("messages", ["hi", [[{"role": "user", "content": "a"}], "hi"], 3])
def test_bad_messages(tiny_llm: LLM, messages: Any) -> None:
    with pytest.raises(ParameterError, match="messages"):
        tiny_llm.chat(messages, GREEDY, use_tqdm=False)


def test_prompt_that_can_never_fit(tiny_llm: LLM) -> None:
    with pytest.raises(CapacityError, match="context length is 256 tokens"):
        tiny_llm.generate(TokensPrompt(prompt_token_ids=[5] * 300), GREEDY, use_tqdm=False)
    assert texts(tiny_llm, ["the"], GREEDY)


def test_failed_request_is_named_after_the_others_are_done(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ReferenceExecutor.forward

    def failing(self: ReferenceExecutor, seqs: list[SeqStep], copies: Any = ()) -> ForwardResult:
        bad = [msgspec.structs.replace(seq, blocks=[-1]) if seq.tokens[0] == 7 else seq for seq in seqs]
        return forward(self, bad, copies)

    monkeypatch.setattr(ReferenceExecutor, "forward", failing)
    with LLM(tiny_path, runtime="reference") as llm:
        prompts = [TokensPrompt(prompt_token_ids=[first, 9, 9]) for first in (5, 7, 6)]
        with pytest.raises(RequestFailed, match=r"prompt 1\) failed"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert len(llm.generate(prompts[::2], GREEDY, use_tqdm=False)) == 2


@pytest.fixture
def interrupted_step(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ctrl-C in the middle of every step; says how many steps were carried out to their end."""
    step = Engine.step
    complete: list[int] = []

    def interrupted(self: Engine) -> list[EngineOutput]:
        os.kill(os.getpid(), signal.SIGINT)
        outputs = step(self)
        complete.append(1)
        return outputs

    monkeypatch.setattr(Engine, "step", interrupted)
    return complete


def test_ctrl_c_lets_the_step_end_and_leaves_the_llm_usable(
    tiny_llm: LLM, interrupted_step: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(interrupted_step) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert len(texts(tiny_llm, PROMPTS, GREEDY)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"threads": 0}, "threads"),
        ({"max_model_len": 257}, "max_model_len"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"num_kv_blocks": True}, "num_kv_blocks"),
        ({"kv_cache_dtype": "f8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "f16", "runtime": "reference"}, "kv_cache_dtype"),
        ({"runtime": "gpu"}, "runtime"),
        ({"seed": 1.5}, "seed"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"speculative_config": {"method": "magic", "num_speculative_tokens": 1}}, "speculative_config"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
)
def test_bad_option_names_the_parameter(tiny_path: Path, options: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        LLM(tiny_path, **{"runtime": "reference", **options})
    assert caught.value.parameter.startswith(parameter)


def test_too_few_blocks(tiny_path: Path) -> None:
    with pytest.raises(CapacityError, match="num_kv_blocks=3"):
        LLM(tiny_path, runtime="reference", num_kv_blocks=3)


def test_kv_memory_is_bounded_by_its_share(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model=str(tiny_path), runtime="reference", block_size=16)
    one = 256 // 16
    roomy = build(args)
    assert roomy.config.num_kv_blocks == 4 * one
    block_bytes = 16 * KV_BYTES_PER_TOKEN
    monkeypatch.setattr("segue.host.build.free_memory_bytes", lambda: 4 * (2 * one + 1) * block_bytes)
    assert build(args).config.num_kv_blocks == 2 * one + 1
    monkeypatch.setattr("segue.host.build.free_memory_bytes", lambda: one * block_bytes)
    assert build(args).config.num_kv_blocks == one
    monkeypatch.setattr("segue.host.build.free_memory_bytes", lambda: one * block_bytes - 1)
    with pytest.raises(CapacityError, match="lower max_model_len"):
        build(args)


def test_lower_priority_goes_first(tiny_path: Path) -> None:
    with LLM(tiny_path, runtime="reference", max_num_seqs=1, scheduling_policy="priority") as llm:
        outputs = llm.generate(PROMPTS[:3], GREEDY, priority=[2, 0, 1], use_tqdm=False)
    firsts = [output.times.first_token_s or 0.0 for output in outputs]
    assert sorted(range(3), key=firsts.__getitem__) == [1, 2, 0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("use_tqdm", [False, True])
def test_progress_bar_only_when_wanted(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, use_tqdm: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", terminal)
    tiny_llm.generate(PROMPTS, msgspec.structs.replace(GREEDY, n=2), use_tqdm=use_tqdm)
    assert ("8/8" in terminal.getvalue()) == use_tqdm


def test_no_progress_bar_without_a_terminal(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    tiny_llm.generate(PROMPTS, GREEDY)
    assert file.getvalue() == ""


def test_missing_model() -> None:
    with pytest.raises(ModelFileError, match="no-such-model"):
        LLM("no-such-model")


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_speculation_and_async_scheduling_change_nothing(
    tiny_llm: LLM, tiny_path: Path, method: str, async_scheduling: bool
) -> None:
    config: dict[str, object] = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    if method == "draft_model":
        config["model"] = str(tiny_path)
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True, logprobs=1)
    plain = tiny_llm.generate(PROMPTS, params, use_tqdm=False)
    with LLM(
        tiny_path, runtime="reference", speculative_config=config, async_scheduling=async_scheduling
    ) as llm:
        drafted = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.outputs for output in drafted] == [output.outputs for output in plain]
    if method == "draft_model":
        assert sum(output.metrics.num_accepted_tokens for output in drafted) > 0


def test_draft_model_with_another_vocabulary(tiny_path: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other.gguf", vocab=330)
    config: dict[str, object] = {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "model": str(other),
    }
    with pytest.raises(ParameterError, match="vocabulary"):
        LLM(tiny_path, runtime="reference", speculative_config=config)


def test_options_are_the_arguments_of_the_engine() -> None:
    assert {"model", *EngineOptions.__annotations__} == set(EngineArgs.__struct_fields__)


def test_public_names() -> None:
    assert all(hasattr(segue, name) for name in segue.__all__)
    assert set(segue.__all__) <= set(dir(segue))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = segue.no_such_name
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert segue.__version__ == tomllib.loads(pyproject.read_text())["project"]["version"]


def test_import_is_light() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import segue, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"numpy", "msgspec", "tokenizers", "typer", "rich", "jinja2"} & set(loaded)


def test_the_real_model_knows_a_capital(smollm2_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (output,) = smollm2_llm.generate("The capital of France is", params, use_tqdm=False)
    assert "Paris" in output.outputs[0].text


def test_more_threads_than_cpus(tiny_path: Path) -> None:
    """A warning, and a thread for each CPU."""
    cpus = available_cpus()
    with (
        pytest.warns(UserWarning, match=rf"threads=5000: this process may use {cpus} CPU.*threads={cpus}$"),
        LLM(tiny_path, threads=5000) as llm,
    ):
        assert texts(llm, ["the"], GREEDY)
