"""The command as a process of its own: signals, pipes, broken encodings. No traceback, ever."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from segue.runtime.native import available_cpus
from tests.weights.make_gguf import tiny_llama

SEGUE = (sys.executable, "-m", "segue")
PIPE_BYTES = 4096


@pytest.fixture(scope="module")
def long_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers do not fit into a pipe: what nobody reads does not end."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "long.gguf", context=16384)


def start(arguments: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*SEGUE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=PIPE_BYTES,
        env={**os.environ, **environment},
    )


def endless(path: Path) -> list[str]:
    """A run that goes on until somebody has read more than a pipe holds."""
    return [
        "run",
        str(path),
        "the",
        "--raw",
        "--ignore-eos",
        "--max-tokens",
        "8000",
        "--runtime",
        "reference",
    ]


def test_ctrl_c_ends_a_run_quietly(long_path: Path) -> None:
    with start(endless(long_path)) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, b"")


def test_closed_pipe_ends_a_run_quietly(long_path: Path) -> None:
    with start(endless(long_path)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait()
    assert (process.returncode, err) == (141, b"")


def test_ctrl_c_stops_an_answer_and_not_the_chat(long_path: Path) -> None:
    arguments = ["chat", str(long_path), "--max-tokens", "8000", "--runtime", "reference"]
    with start([*arguments, "--temperature", "1", "--seed", "5"]) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"the hen\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        select.select([process.stdout], [], [])
        out, err = process.communicate(b"/help\n")
    assert process.returncode == 0
    assert out.endswith(b" ...\n")
    assert b"/reset" in err
    assert b"Traceback" not in err


def test_answer_is_utf8_whatever_the_locale(tiny_path: Path) -> None:
    arguments = ["run", str(tiny_path), "the", "--raw", "--max-tokens", "8", "--runtime", "reference"]
    biased = [*arguments, "--quiet", "--logit-bias", "134=100", "--logit-bias", "135=100"]
    outputs = []
    for environment in ({"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "utf-8"}):
        with start(biased, **environment) as process:
            out, err = process.communicate()
        assert (process.returncode, err) == (0, b"")
        outputs.append(out)
    assert outputs[0] == outputs[1]
    assert "\ufffd" in outputs[0].decode("utf-8")


def test_prompt_that_is_not_utf8() -> None:
    process = subprocess.run([*SEGUE, "run", "smollm2", b"\xff\xfe"], capture_output=True, check=False)
    assert process.returncode == 2
    assert process.stderr.count(b"\n") == 1
    assert b"not valid UTF-8" in process.stderr


def test_full_disk_is_one_line(tiny_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [*SEGUE, "inspect", str(tiny_path)], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert process.returncode == 1
    assert process.stderr.count(b"\n") == 1
    assert b"No space left" in process.stderr


def test_closed_streams_lead_nowhere(tiny_path: Path) -> None:
    command = f"{SEGUE[0]} -m segue run {tiny_path} the --max-tokens 2 --runtime reference <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0


def test_version_loads_no_libraries() -> None:
    code = (
        "import sys; from segue.cli.main import run_command; run_command(['--version']); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split()
    assert not {b"numpy", b"msgspec", b"typer", b"rich"} & set(loaded)


def test_the_real_model_answers(smollm2_path: Path) -> None:
    arguments = ["run", str(smollm2_path), "--raw", "The capital of France is", "--json", "--max-tokens", "8"]
    process = subprocess.run([*SEGUE, *arguments], capture_output=True, check=True)
    assert "Paris" in json.loads(process.stdout)["outputs"][0]["text"]


def test_more_threads_than_cpus_is_one_line(tiny_path: Path) -> None:
    """The answer is the same; a thread for each CPU computes."""
    arguments = [*SEGUE, "run", str(tiny_path), "the", "--max-tokens", "5", "--raw", "--ignore-eos"]
    plain = subprocess.run([*arguments, "--quiet"], capture_output=True, check=True)
    many = subprocess.run([*arguments, "--quiet", "--threads", "100000"], capture_output=True, check=True)
    assert many.stdout == plain.stdout
    cpus = available_cpus()
    assert many.stderr.decode().strip() == (
        f"segue: warning: threads=100000: this process may use {cpus} CPU{'s' * (cpus > 1)}, so threads={cpus}"
    )
