"""The command in this process: what it prints, and what it says to bad input."""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from segue import __version__
from segue.cli import main as main_module
from segue.cli.commands import QuantizedType
from segue.cli.main import run_command
from segue.cli.output import print_json, write_answer
from segue.cli.table import format_table
from segue.display import one_line
from segue.llm.llm import LLM
from segue.weights.quantize import QUANTISERS
from tests.weights.make_gguf import tiny_llama
from tests.weights.raw_gguf import STRING, entry, gguf, string

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def segue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs one command line with these bytes as stdin. Returns exit code, stdout, stderr."""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8", "surrogateescape"))
        code = run_command(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def tiny(tiny_path: Path) -> tuple[str, ...]:
    """Arguments for the random model."""
    return (str(tiny_path), "--runtime", "reference")


def assert_one_line(err: str) -> None:
    assert err.startswith("segue: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(segue: Command, arguments: list[str]) -> None:
    code, out, err = segue(*arguments)
    assert (code, err) == (0, "")
    assert all(command in out for command in ("run", "chat", "inspect", "bench", "pull", "quantize"))


@pytest.mark.parametrize("command", ["run", "chat", "inspect", "bench", "pull", "quantize"])
def test_help_of_a_command(segue: Command, command: str) -> None:
    code, out, err = segue(command, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: segue {command}" in out


def test_version(segue: Command) -> None:
    assert segue("--version") == (0, f"segue {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fly"], "No such command 'fly'"),
        (["run"], "Missing argument"),
        (["run", "smollm2", "hi", "--wings"], "No such option"),
        (["run", "smollm2", "hi", "--max-tokens", "many"], "--max-tokens"),
        (["run", "smollm2", "hi", "--runtime", "gpu"], "--runtime"),
        (["run", "smollm2", "hi", "--max-tokens", "0"], "max_tokens=0"),
        (["run", "smollm2", "hi", "--min-tokens", "-1"], "min_tokens=-1"),
        (["run", "smollm2", "hi", "-n", "0"], "n=0"),
        (["run", "smollm2", "hi", "--temperature", "-1"], "temperature=-1"),
        (["run", "smollm2", "hi", "--temperature", "nan"], "temperature=nan"),
        (["run", "smollm2", "hi", "--top-p", "0"], "top_p=0"),
        (["run", "smollm2", "hi", "--top-k", "-2"], "top_k=-2"),
        (["run", "smollm2", "hi", "--logprobs", "-1"], "logprobs=-1"),
        (["run", "smollm2", "hi", "--logit-bias", "x=1"], "logit_bias"),
        (["run", "smollm2", "hi", "--logit-bias", "5"], "logit_bias"),
        (["run", "smollm2", "hi", "--stop", ""], "stop"),
        (["run", "smollm2", "hi", "--threads", "0"], "threads=0"),
        (["run", "smollm2", "hi", "--speculative-config", "{"], "speculative_config"),
        (["run", "smollm2", "hi", "--speculative-config", '{"method": "magic"}'], "speculative_config"),
        (["run", "no-such-model", "hi"], "no-such-model"),
        (["run", "/", "hi"], "/"),
        (["run", "smollm2", ""], "the prompt is empty"),
        (["run", "smollm2", "-"], "the prompt is empty"),
        (["run", "smollm2", "\udcff"], "not valid UTF-8"),
        (["inspect", "no-such-file.gguf"], "no-such-file.gguf"),
        (["quantize", "no-such-file.gguf", "out.gguf", "q4_0"], "no-such-file.gguf: no such file"),
        (["quantize", "in.gguf", "out.gguf", "q9"], "'q9' is not one of"),
        (["bench", "no-such-model"], "no-such-model"),
        (["chat", "no-such-model"], "no-such-model"),
        (["pull", "no-such-alias"], "no-such-alias"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(segue: Command, arguments: list[str], part: str) -> None:
    code, out, err = segue(*arguments)
    assert (code, out) == (2, "")
    assert_one_line(err)
    assert part in err


def test_stdin_that_is_not_utf8(segue: Command) -> None:
    code, out, err = segue("run", "smollm2", "-", stdin=b"ab\xffc")
    assert (code, out) == (2, "")
    assert_one_line(err)
    assert "byte 0xff at offset 2" in err


def test_unexpected_error_is_one_line(
    segue: Command, monkeypatch: pytest.MonkeyPatch, tiny_path: Path
) -> None:
    def broken(name: str, *, as_json: bool) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("segue.cli.inspect.inspect", broken)
    code, _, err = segue("inspect", str(tiny_path))
    assert code == 1
    assert_one_line(err)
    assert "internal error: RuntimeError: two lines" in err
    monkeypatch.setenv("SEGUE_DEBUG", "1")
    assert "Traceback" in segue("inspect", str(tiny_path))[2]


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 1, "out of memory"),
        (OSError(28, "No space left on device"), 1, "No space left"),
    ],
)
def test_exit_codes(
    segue: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, part: str
) -> None:
    def failing(alias: str) -> None:
        raise error

    monkeypatch.setattr("segue.cli.pull.pull", failing)
    got, _, err = segue("pull", "smollm2")
    assert got == code
    assert part in err
    assert "Traceback" not in err


def test_run_prints_the_answer_and_statistics(segue: Command, tiny: tuple[str, ...], tiny_llm: LLM) -> None:
    code, out, err = segue("run", *tiny, "the hen", "--max-tokens", "5", "--ignore-eos")
    assert code == 0
    assert err.count("\n") == 1
    assert "5 generated" in err
    assert "tok/s" in err
    assert "first token after" in err
    conversation = [{"role": "user", "content": "the hen"}]
    from segue import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    (expected,) = tiny_llm.chat(conversation, params, use_tqdm=False)
    assert out == expected.outputs[0].text + "\n"


def test_run_quiet_reads_stdin(segue: Command, tiny: tuple[str, ...]) -> None:
    flags = ("--max-tokens", "5", "--ignore-eos", "--quiet", "--raw")
    from_argument = segue("run", *tiny, "the hen", *flags)
    assert from_argument[0] == 0
    assert segue("run", *tiny, "-", *flags, stdin=b"the hen") == from_argument
    assert segue("run", *tiny, *flags, stdin=b"the hen") == from_argument
    assert from_argument[2] == ""


def test_run_several_answers(segue: Command, tiny: tuple[str, ...]) -> None:
    code, out, _ = segue("run", *tiny, "the", "-n", "2", "--max-tokens", "3", "--temperature", "1")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("---")] == ["--- 0", "--- 1"]


def test_run_json(segue: Command, tiny: tuple[str, ...]) -> None:
    flags = ("--json", "--raw", "--max-tokens", "4", "--ignore-eos", "--logprobs", "2")
    code, out, _ = segue("run", *tiny, "the hen", *flags, "--prompt-logprobs", "0", "--system", "unused")
    assert code == 0
    record = json.loads(out)
    (answer,) = record["outputs"]
    assert record["prompt"] == "the hen"
    assert len(record["prompt_logprobs"]) == len(record["prompt_token_ids"])
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 4
    assert str(answer["token_ids"][0]) in answer["logprobs"][0]
    assert answer["finish_reason"] == "length"
    assert set(record["times"]) == {"load_s", "time_to_first_token_s", "decode_s", "tokens_per_second"}


def test_run_changes_nothing_by_speculation(segue: Command, tiny: tuple[str, ...]) -> None:
    flags = ("--raw", "--quiet", "--max-tokens", "16", "--ignore-eos")
    drafting = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    assert segue("run", *tiny, "on and on and", *flags, *drafting) == segue(
        "run", *tiny, "on and on and", *flags
    )


def test_chat_remembers_and_forgets(segue: Command, tiny: tuple[str, ...], tiny_llm: LLM) -> None:
    from segue import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, seed=0)
    messages: list[dict[str, object]] = []
    expected: list[str] = []
    for text in ("the hen", "on", "the hen"):
        if len(expected) == 2:
            messages = []
        messages.append({"role": "user", "content": text})
        (output,) = tiny_llm.chat(messages, params, use_tqdm=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        expected.append(output.outputs[0].text)
    stdin = b"the hen\n/help\non\n\n/reset\nthe hen\n/quit\nnever\n"
    code, out, err = segue("chat", *tiny, "--max-tokens", "4", stdin=stdin)
    assert code == 0
    assert out == "".join(f"{text}\n" for text in expected)
    assert "/reset" in err


def test_chat_goes_on_after_bad_lines(segue: Command, tiny: tuple[str, ...]) -> None:
    long = b"the hen " * 300
    code, out, err = segue("chat", *tiny, "--max-tokens", "4", stdin=b"/fly\n" + long + b"\n\xff\nthe\n")
    assert code == 0
    assert out.count("\n") >= 1
    errors = err.splitlines()
    assert len(errors) == 3
    assert "/fly" in errors[0]
    assert "max_model_len" in errors[1]
    assert "UTF-8" in errors[2]


def test_inspect_shows_metadata_and_tensors(segue: Command, tiny_path: Path) -> None:
    code, out, err = segue("inspect", str(tiny_path))
    assert (code, err) == (0, "")
    assert "general.architecture" in out
    assert "tokenizer.ggml.tokens" in out
    assert any(line.split()[:3] == ["blk.0.attn_q.weight", "Q4_1", "64x64"] for line in out.splitlines())


def test_inspect_json(segue: Command, tiny_path: Path) -> None:
    record = json.loads(segue("inspect", str(tiny_path), "--json")[1])
    assert record["architecture"] == "llama"
    assert record["size_bytes"] == tiny_path.stat().st_size
    assert len(record["metadata"]["tokenizer.ggml.tokens"]) == 320
    assert {"name": "blk.0.attn_q.weight", "type": "Q4_1", "shape": [64, 64], "bytes": 2560} in record[
        "tensors"
    ]


def test_quantize(segue: Command, tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "in.gguf", tensor_type="F16")
    target = tmp_path / "out.gguf"
    code, out, err = segue("quantize", str(source), str(target), "Q4_0")
    share = target.stat().st_size / source.stat().st_size
    assert (code, err) == (0, "")
    assert out == f"{target}: {target.stat().st_size:,} bytes, {share:.0%} of {source}\n"
    code, out, err = segue("quantize", str(source), str(target), "q8_0")
    assert (code, out) == (2, "")
    assert_one_line(err)
    assert segue("quantize", str(source), str(target), "q8_0", "--force")[0] == 0
    assert segue("run", str(target), "hi", "--raw", "--max-tokens", "2", "--runtime", "reference")[0] == 0


def test_quantize_offers_what_there_is() -> None:
    assert [name.upper() for name in get_args(QuantizedType)] == [kind.name for kind in QUANTISERS]


def test_inspect_does_not_steer_the_terminal(segue: Command, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "evil.gguf", metadata={"general.description": "\x1b[2J\nboo" + "x" * 200})
    _, out, _ = segue("inspect", str(path))
    assert "\x1b" not in out
    assert r"\x1b[2J\nboo" in out
    assert "characters)" in out
    path.write_bytes(gguf([entry("general.architecture", STRING, string("evil\x1b[2J\0\u202e"))]))
    for command, *rest in (("inspect",), ("inspect", "--json"), ("run", "hi", "--raw")):
        _, out, err = segue(command, str(path), *rest)
        assert "evil" in out + err
        assert all(line.isprintable() for line in (out + err).splitlines())


def test_what_a_model_writes_does_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = "a\tb\n\x1b]0;x\x07\x9b2J\r\0\x7f\u200dשלום 👩\u200d🚀"
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        write_answer(text)
    assert terminal.getvalue() == "a\tb\n\\x1b]0;x\\x07\\x9b2J\\r\\x00\\x7f\u200dשלום 👩\u200d🚀"
    write_answer(text)
    print_json({"text": text})
    written, as_json = capsys.readouterr().out.split("{", 1)
    assert written == text
    assert "\x7f" not in as_json
    assert json.loads("{" + as_json) == {"text": text}


def test_bench_measures(segue: Command, tiny_path: Path) -> None:
    arguments = ("bench", str(tiny_path), "--runtime", "reference", "--repeat", "2")
    sizes = ("--prompt-len", "32", "--decode-len", "3", "--sequences", "2")
    code, out, err = segue(*arguments, *sizes, "--json")
    assert (code, err) == (0, "")
    measurements = json.loads(out)["measurements"]
    assert [(each["name"], each["num_tokens"]) for each in measurements] == [
        ("prefill 32", 32),
        ("decode 1 sequence", 2),
        ("decode 2 sequences", 4),
    ]
    for each in measurements:
        assert len(each["seconds"]) == 2
        assert 0 < each["min_s"] <= each["median_s"]
    assert segue(*arguments, *sizes)[1].count("\n") == 4


def test_bench_that_does_not_fit(segue: Command, tiny_path: Path) -> None:
    code, _, err = segue("bench", str(tiny_path), "--runtime", "reference", "--prompt-len", "256")
    assert code == 2
    assert_one_line(err)


def test_pull_prints_the_path(segue: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("segue.weights.hub.pull", lambda alias, progress: tmp_path / f"{alias}.gguf")
    assert segue("pull", "smollm2") == (0, f"{tmp_path / 'smollm2.gguf'}\n", "")


def test_pull_shows_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pull(alias: str, *, progress: Callable[[int, int], None]) -> Path:
        progress(50_000_000, 100_000_000)
        progress(100_000_000, 100_000_000)
        return tmp_path / alias

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("segue.weights.hub.pull", pull)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run_command(["pull", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'smollm2'}\n"
    assert "100.0/100.0 MB" in terminal.getvalue()


def test_one_line() -> None:
    assert one_line("a\n b\t\x1b[2J") == r"a b \x1b[2J"


def test_table_aligns_columns() -> None:
    assert (
        format_table(("a", "n"), [("bb", "1"), ("c", "10")], right=frozenset({1})) == "a    n\nbb   1\nc   10"
    )


def test_main_is_the_entry_point(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["segue", "--version"])
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == 0
