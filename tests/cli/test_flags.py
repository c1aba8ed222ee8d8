"""Flags are the fields of option structs: all of them, typed as they are, and explained."""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from segue.args import EngineArgs
from segue.cli import commands
from segue.cli.flags import Flag, FlagsOf, Options, add_command, field_docs
from segue.errors import UsageError
from segue.sample.params import SamplingParams
from segue.server.shared.options import ServerOptions

NO_FLAG = {
    EngineArgs: {"model", "max_engine_restarts"},  # an argument; a server never gives up
    ServerOptions: set[str](),
    SamplingParams: {"structured_outputs"},
}
TYPED: dict[tuple[type[msgspec.Struct], str], tuple[list[str], object]] = {
    (EngineArgs, "threads"): (["--threads", "1"], 1),
    (EngineArgs, "max_model_len"): (["--max-model-len", "7"], 7),
    (EngineArgs, "max_num_seqs"): (["--max-num-seqs", "7"], 7),
    (EngineArgs, "max_num_batched_tokens"): (["--max-num-batched-tokens", "7"], 7),
    (EngineArgs, "block_size"): (["--block-size", "8"], 8),
    (EngineArgs, "num_kv_blocks"): (["--num-kv-blocks", "7"], 7),
    (EngineArgs, "enable_prefix_caching"): (["--no-enable-prefix-caching"], False),
    (EngineArgs, "async_scheduling"): (["--async-scheduling"], True),
    (EngineArgs, "speculative_config"): (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
        {"method": "ngram", "num_speculative_tokens": 2},
    ),
    (EngineArgs, "scheduling_policy"): (["--scheduling-policy", "priority"], "priority"),
    (EngineArgs, "seed"): (["--seed", "-3"], -3),
    (EngineArgs, "kv_cache_dtype"): (["--kv-cache-dtype", "f32"], "f32"),
    (EngineArgs, "runtime"): (["--runtime", "reference"], "reference"),
    (EngineArgs, "engine_process"): (["--in-process"], False),
    (ServerOptions, "host"): (["--host", "0.0.0.0"], "0.0.0.0"),
    (ServerOptions, "port"): (["--port", "7"], 7),
    (ServerOptions, "uds"): (["--uds", "a"], "a"),
    (ServerOptions, "api_keys"): (["--api-key", "a", "--api-key", "b"], ("a", "b")),
    (ServerOptions, "served_model_names"): (["--served-model-name", "a"], ("a",)),
    (ServerOptions, "cors_origins"): (["--cors-origin", "*"], ("*",)),
    (ServerOptions, "allowed_hosts"): (["--allowed-host", "*.a"], ("*.a",)),
    (ServerOptions, "max_request_bytes"): (["--max-request-bytes", "7"], 7),
    (ServerOptions, "max_logprobs"): (["--max-logprobs", "7"], 7),
    (ServerOptions, "max_queue"): (["--max-queue", "7"], 7),
    (ServerOptions, "ssl_keyfile"): (["--ssl-keyfile", "a", "--ssl-certfile", "b"], "a"),
    (ServerOptions, "ssl_certfile"): (["--ssl-keyfile", "a", "--ssl-certfile", "b"], "b"),
    (ServerOptions, "shutdown_timeout_s"): (["--shutdown-timeout", "7.5"], 7.5),
    (ServerOptions, "state_dir"): (["--state-dir", "a"], "a"),
    (ServerOptions, "resume_timeout_s"): (["--resume-timeout", "7.5"], 7.5),
    (ServerOptions, "max_sessions"): (["--max-sessions", "7"], 7),
    (ServerOptions, "session_timeout_s"): (["--session-timeout", "7.5"], 7.5),
    (ServerOptions, "max_saved_sessions"): (["--max-saved-sessions", "7"], 7),
    (ServerOptions, "saved_session_days"): (["--saved-session-days", "7.5"], 7.5),
    (ServerOptions, "tool_call_parser"): (["--tool-call-parser", "hermes"], "hermes"),
    (ServerOptions, "log_level"): (["--log-level", "debug"], "debug"),
    (ServerOptions, "access_log"): (["--no-access-log"], False),
    (SamplingParams, "n"): (["-n", "2"], 2),
    (SamplingParams, "max_tokens"): (["--max-tokens", "7"], 7),
    (SamplingParams, "min_tokens"): (["--min-tokens", "7"], 7),
    (SamplingParams, "temperature"): (["--temperature", "1.0"], 1.0),
    (SamplingParams, "top_p"): (["--top-p", "0.5"], 0.5),
    (SamplingParams, "top_k"): (["--top-k", "7"], 7),
    (SamplingParams, "min_p"): (["--min-p", "0.5"], 0.5),
    (SamplingParams, "presence_penalty"): (["--presence-penalty", "0.5"], 0.5),
    (SamplingParams, "frequency_penalty"): (["--frequency-penalty", "0.5"], 0.5),
    (SamplingParams, "repetition_penalty"): (["--repetition-penalty", "0.5"], 0.5),
    (SamplingParams, "logit_bias"): (["--logit-bias", "1=2", "--logit-bias", "3=-4.5"], {1: 2.0, 3: -4.5}),
    (SamplingParams, "seed"): (["--seed", "7"], 7),
    (SamplingParams, "stop"): (["--stop", "a", "--stop", "b"], ("a", "b")),
    (SamplingParams, "stop_token_ids"): (["--stop-token-id", "7"], (7,)),
    (SamplingParams, "ignore_eos"): (["--ignore-eos"], True),
    (SamplingParams, "logprobs"): (["--logprobs", "7"], 7),
    (SamplingParams, "prompt_logprobs"): (["--prompt-logprobs", "7"], 7),
    (SamplingParams, "include_stop_str_in_output"): (["--include-stop"], True),
    (SamplingParams, "skip_special_tokens"): (["--keep-special"], False),
}
"""What sets each field, and to what."""


def structs_of(arguments: list[str]) -> dict[type, Any]:
    """The structs that the command line makes."""
    action = commands.parse(arguments)
    assert isinstance(action, partial)
    return {type(each): each for each in action.args}


@pytest.mark.parametrize("struct", NO_FLAG)
def test_every_field_has_a_flag_or_is_named_here(struct: type[msgspec.Struct]) -> None:
    with_flag = {field for each, field in TYPED if each is struct}
    assert with_flag == set(struct.__struct_fields__) - NO_FLAG[struct]


@pytest.mark.parametrize(("struct", "field"), TYPED)
def test_a_flag_sets_its_field_and_no_other(struct: type[msgspec.Struct], field: str) -> None:
    command = ["run", "m", "hi"] if struct is SamplingParams else ["serve", "m"]
    typed, value = TYPED[struct, field]
    plain, changed = structs_of(command), structs_of([*command, *typed])
    assert getattr(plain[struct], field) != value
    assert getattr(changed[struct], field) == value
    together = {"ssl_keyfile", "ssl_certfile"} if field.startswith("ssl") else {field}
    for each, made in changed.items():
        for name in getattr(each, "__struct_fields__", ()):
            is_set = (each is struct and name in together) or (field, name) == ("n", "max_num_seqs")
            assert is_set or getattr(made, name) == getattr(plain[each], name)


@pytest.mark.parametrize("struct", NO_FLAG)
def test_every_field_says_what_it_is(struct: type[msgspec.Struct]) -> None:
    assert set(field_docs(struct)) == set(struct.__struct_fields__)


def test_what_commands_take_where_nothing_is_typed() -> None:
    served = structs_of(["serve", "m"])
    assert served[EngineArgs] == EngineArgs(model="m", engine_process=True, max_engine_restarts=None)
    assert served[ServerOptions] == ServerOptions()
    ran = structs_of(["run", "m", "hi"])
    assert ran[EngineArgs] == EngineArgs(model="m", max_num_seqs=1)
    assert ran[SamplingParams] == SamplingParams(temperature=0.0, max_tokens=512, seed=0)
    chatted = structs_of(["chat", "m"])
    assert chatted[EngineArgs] == EngineArgs(model="m", max_num_seqs=1)
    assert chatted[SamplingParams] == SamplingParams(temperature=0.0, max_tokens=1024, seed=0)


def test_a_value_that_is_the_default_of_the_struct_but_not_of_the_command() -> None:
    assert structs_of(["run", "m", "hi", "--max-tokens", "16"])[SamplingParams].max_tokens == 16
    assert structs_of(["serve", "m", "--in-process"])[EngineArgs].engine_process is False


@pytest.mark.parametrize("field", ["threads", "speculative_config"])
def test_an_engine_of_our_own_is_not_the_servers(field: str) -> None:
    typed, _ = TYPED[EngineArgs, field]
    with pytest.raises(UsageError, match=f"^{typed[0]} is for an engine of our own"):
        commands.parse(["chat", "--url", "http://127.0.0.1:1", *typed])


# --- a struct ---------------------------------------------------------------------------------------------------


class Kitchen(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """No option: it has no default."""
    pots: int | None = None
    """How many pots, for all `spices`. None: all there are.

    Not for the help."""
    heat: Literal["low", "high"] = "low"
    """How hot."""
    spices: tuple[str, ...] = ()
    """What goes in."""
    sizes: Sequence[int] | None = None
    wait_s: float = 1.5
    """How long it takes."""
    lid: bool = True
    """Whether there is a lid."""


def cook(flags: FlagsOf, *arguments: str) -> tuple[Options | None, str]:
    """What a command with these flags is told, and all that it prints."""
    app, told = typer.Typer(rich_markup_mode=None), []

    @add_command(app)
    def command(options: Annotated[Options, flags]) -> Any:
        told.append(options)

    output = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"}).output
    return (told[0] if told else None), " ".join(output.split())


def test_a_field_is_a_flag() -> None:
    assert cook(FlagsOf(Kitchen))[0] == {}
    typed = ("--pots", "3", "--heat", "high", "--spice", "salt", "--spice", "dill", "--wait", "2", "--no-lid")
    assert cook(FlagsOf(Kitchen), *typed, "--size", "4")[0] == {
        "pots": 3,
        "heat": "high",
        "spices": ("salt", "dill"),
        "sizes": (4,),
        "wait_s": 2.0,
        "lid": False,
    }
    assert "--heat" in cook(FlagsOf(Kitchen), "--heat", "medium")[1]
    assert "No such option" in cook(FlagsOf(Kitchen), "--name", "a")[1]


def test_the_help_is_the_fields_docstring() -> None:
    _, text = cook(FlagsOf(Kitchen, {"heat": Flag(note="Mind the cat.")}), "--help")
    assert "How many pots, for all --spice. [default: (all there are)]" in text
    assert "How hot. Mind the cat. [default: low]" in text
    assert "What goes in. May be repeated. --size" in text
    assert "--wait SECONDS How long it takes. [default: 1.5]" in text
    assert "Not for the help" not in text


def test_only_and_without() -> None:
    assert "No such option" in cook(FlagsOf(Kitchen, without=("lid",)), "--no-lid")[1]
    assert "No such option" in cook(FlagsOf(Kitchen, only=("pots",)), "--no-lid")[1]


def test_a_field_that_cannot_be_typed_says_so() -> None:
    class Drawer(msgspec.Struct, kw_only=True):
        knives: dict[str, int] | None = None

    with pytest.raises(TypeError, match=r"Drawer\.knives is no flag by itself"):
        FlagsOf(Drawer)
    parse = Flag(type=str, parse=lambda name, text: {name: len(text)})
    assert cook(FlagsOf(Drawer, {"knives": parse}), "--knives", "abc")[0] == {"knives": {"knives": 3}}


# --- start time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["run", "--help"]])
def test_help_loads_no_engine(arguments: list[str]) -> None:
    code = (
        f"import sys; from segue.cli.main import run_command; run_command({arguments});"
        "print(*sys.modules, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = set(process.stderr.decode().split())
    assert not {"numpy", "uvicorn", "asyncio", "segue._native", "segue.engine.engine"} & loaded
