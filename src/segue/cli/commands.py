"""The commands and their flags: a command line becomes an `Action`, which then runs outside the parser, so that
its interrupts and closed pipes are not the parser's to handle. What a command does is in the module of
its name, imported only then.
"""

from functools import partial
from typing import Annotated, Literal

import typer

from segue.args import EngineArgs
from segue.cli.flags import Action, Flag, FlagsOf, Options, add_command
from segue.cli.parse import parse_logit_bias, parse_object
from segue.cli.process import EXIT_INTERRUPTED
from segue.errors import UsageError
from segue.sample.params import SamplingParams
from segue.server.shared.options import ServerOptions

_MODEL_HELP = 'A model: "smollm2", or the path of a GGUF file.'

Model = Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=_MODEL_HELP)]

QuantizedType = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_SAMPLING_FLAGS = {
    "n": Flag(name="-n"),
    "max_tokens": Flag(default=512),
    "temperature": Flag(default=0.0),
    "logit_bias": Flag(name="--logit-bias", metavar="ID=BIAS", type=list[str], parse=parse_logit_bias),
    "seed": Flag(default=0),
    "stop": Flag(metavar="TEXT"),
    "stop_token_ids": Flag(metavar="ID"),
    "ignore_eos": Flag(name="--ignore-eos"),
    "logprobs": Flag(note="With --json."),
    "prompt_logprobs": Flag(note="With --json."),
    "include_stop_str_in_output": Flag(name="--include-stop"),
    "skip_special_tokens": Flag(name="--skip-special/--keep-special"),
}
Sampling = Annotated[Options, FlagsOf(SamplingParams, _SAMPLING_FLAGS, without=("structured_outputs",))]
ChatSampling = Annotated[
    Options,
    FlagsOf(
        SamplingParams,
        _SAMPLING_FLAGS | {"max_tokens": Flag(default=1024)},
        only=("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    ),
]

_ENGINE_FLAGS = {
    "speculative_config": Flag(metavar="JSON", type=str, parse=parse_object),
    "engine_process": Flag(name="--engine-process/--in-process", default=True),
}
_FOR_MANY = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "enable_prefix_caching",
    "async_scheduling",
    "scheduling_policy",
    "seed",
    "engine_process",
    "max_engine_restarts",
)
"""What an engine need not be told that has one caller."""
Engine = Annotated[Options, FlagsOf(EngineArgs, _ENGINE_FLAGS, without=_FOR_MANY)]
BenchEngine = Annotated[
    Options, FlagsOf(EngineArgs, without=("max_model_len", "speculative_config", *_FOR_MANY))
]
VerifyEngine = Annotated[Options, FlagsOf(EngineArgs, only=("kv_cache_dtype", "runtime"))]
ServerEngine = Annotated[Options, FlagsOf(EngineArgs, _ENGINE_FLAGS, without=("max_engine_restarts",))]
Server = Annotated[
    Options,
    FlagsOf(
        ServerOptions,
        {
            "uds": Flag(metavar="PATH"),
            "api_keys": Flag(metavar="KEY", envvar="SEGUE_API_KEY"),
            "served_model_names": Flag(metavar="NAME"),
            "cors_origins": Flag(metavar="ORIGIN"),
            "allowed_hosts": Flag(metavar="NAME"),
            "ssl_keyfile": Flag(metavar="PATH"),
            "ssl_certfile": Flag(metavar="PATH"),
            "state_dir": Flag(metavar="DIR"),
            "saved_session_days": Flag(metavar="DAYS"),
        },
    ),
]

_CHAT_EPILOG = '''\b
Commands:
  /reset          forget the conversation
  /system [TEXT]  what the model is told first; without TEXT: nothing
  /undo           forget the last turn and its answer
  /retry          answer the last turn again, with the next seed
  /stats          tokens, time to first token and tok/s of the last answer,
                  and how much of the longest conversation there is
  /save FILE      write the conversation, as JSON messages
  /help           show the commands
  /quit           end

\b
Input:
  A line is a turn. A line that ends in a backslash goes on in the next one.
  Lines between two lines of """ are one turn, as they are.
  //TEXT says /TEXT. Ctrl-C stops the answer, and at the prompt drops what is
  typed. Ctrl-D ends. From a pipe, each line (or block) is a turn too.

\b
Files:
  The lines typed are kept in chat_history in the cache folder ($SEGUE_HOME),
  the last thousand, for nobody else to read.

\b
Exit code:
  0 at the end; 1 when the server cannot be reached, refuses the key or goes
  away; 2 when a flag or the model is wrong.

\b
Examples:
  segue chat smollm2
  segue chat smollm2 --system "Answer in one sentence." --temperature 0.7
  segue chat --url http://127.0.0.1:8000 --api-key "$KEY"
  printf '%s\\n' "Name a colour." "Another one." | segue chat smollm2'''

app = typer.Typer(
    name="segue",
    help="Runs language models for live sessions. The schedule never changes an answer.",
    epilog='\b\nStart with:\n  segue pull smollm2\n  segue run smollm2 "Why is the sky blue?"',
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def parse(arguments: list[str]) -> Action:
    """What the command line asks for. Raises UsageError when it is wrong."""
    try:
        action: object = app(arguments, prog_name="segue", standalone_mode=False)
    except typer.TyperException as error:
        raise UsageError(f"{error.format_message().rstrip('.')}: see segue --help") from error
    if action == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    # Help is printed by the parser, and leaves nothing to do.
    return action if callable(action) else _nothing


def _nothing() -> None:
    pass


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> Action | None:
    if version:
        from segue import __version__

        return partial(print, f"segue {__version__}")
    return None if context.invoked_subcommand else partial(print, context.get_help())


@add_command(
    app,
    epilog="\b\nExamples:\n"
    '  segue run smollm2 "Why is the sky blue?"\n'
    '  segue run smollm2 --raw "Once upon a time" -n 2 --temperature 0.8\n'
    "  segue run smollm2 --json --logprobs 3 - < question.txt",
)
def run(
    *,
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT|-]", show_default=False, help="The question; - reads it from stdin."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt, without the chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", show_default=False, help="What the model is told first.")
    ] = None,
    sampling: Sampling,
    engine: Engine,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No statistics on stderr.")] = False,
) -> Action:
    """Answer one question, as it comes."""
    from segue.cli import run as command

    params = SamplingParams(**sampling)
    args = EngineArgs(model=model, max_num_seqs=params.n, **engine)
    return partial(command.run, args, prompt, params, raw=raw, system=system, as_json=as_json, quiet=quiet)


@add_command(app, epilog=_CHAT_EPILOG)
def chat(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help=f"{_MODEL_HELP} With --url: a name that the server knows, or nothing.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", show_default=False, help="Talk to this server, such as http://127.0.0.1:8000."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SEGUE_API_KEY", show_default=False, help="With --url: the server's key."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", show_default=False, help="What the model is told first.")
    ] = None,
    sampling: ChatSampling,
    engine: Engine,
) -> Action:
    """Talk with a model in the terminal.

    The model runs here, or with --url on a server that is running (segue serve). The conversation is one live session:
    each turn computes only what is new, and an answer that is stopped is remembered as far as it was shown.
    """
    from segue.cli import chat as command

    params = SamplingParams(**sampling)
    if url is not None:
        for name in engine:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is for an engine of our own: leave it out, or leave out --url")
        return partial(
            command.chat_remotely, url, params, model=model, api_key=api_key or None, system=system
        )
    if model is None:
        raise UsageError("there is no model: name one, or a server with --url")
    args = EngineArgs(model=model, max_num_seqs=1, **engine)
    return partial(command.chat_locally, args, params, system=system)


@add_command(app)
def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False, help=_MODEL_HELP)],
    as_json: AsJson = False,
) -> Action:
    """Show what a model file holds: metadata and tensors."""
    from segue.cli import inspect as command

    return partial(command.inspect, file, as_json=as_json)


@add_command(
    app,
    epilog="""\b
What becomes what:
  matrices                   TYPE
  the output matrix          q8_0; so the embedding, in models where they are one
  norms, biases, routers     as they are

\b
Example:
  segue quantize model-f16.gguf model-q4_0.gguf q4_0""",
)
def quantize(
    source: Annotated[
        str, typer.Argument(metavar="IN", show_default=False, help="A GGUF file of F32, F16 or BF16.")
    ],
    target: Annotated[str, typer.Argument(metavar="OUT", show_default=False, help="The file to write.")],
    kind: Annotated[
        QuantizedType,
        typer.Argument(
            metavar="TYPE", show_default=False, case_sensitive=False, help="What its matrices become."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> Action:
    """Write a model in fewer bits."""
    from segue.cli import quantize as command

    return partial(command.quantize, source, target, kind, force=force)


@add_command(app, epilog="Example:  segue bench smollm2 --threads 2 --json")
def bench(
    *,
    model: Model,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is prefilled.")] = 512,
    decode_len: Annotated[int, typer.Option(min=2, help="Tokens that each sequence decodes.")] = 64,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that are decoded together.")] = 32,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each measurement.")] = 5,
    engine: BenchEngine,
    as_json: AsJson = False,
) -> Action:
    """Measure prefill, and decoding alone and together."""
    from segue.cli import bench as command

    args = EngineArgs(
        model=model,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(512, prompt_len, sequences),
        enable_prefix_caching=False,
        **engine,
    )
    workload = command.Workload(prompt_len=prompt_len, decode_len=decode_len, sequences=sequences)
    return partial(command.bench, args, workload, repeat=repeat, as_json=as_json)


@add_command(app, epilog="Example:  segue verify smollm2 --quick")
def verify(
    *,
    model: Model,
    quick: Annotated[
        bool, typer.Option("--quick", help="Each mode alone and all together, no pairs.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Pairs, with longer prompts and answers.")] = False,
    modes: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", show_default="all", help="Only these modes.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", show_default="the model", help="What drafts.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws, and of where texts are cut.")] = 0,
    engine: VerifyEngine,
    as_json: AsJson = False,
) -> Action:
    """Prove that no schedule changes an answer: compare every pair of modes with the plain run, bit for bit."""
    from segue.cli import verify as command

    if quick and full:
        raise UsageError("--quick and --full: choose one of them")
    effort = command.Effort.QUICK if quick else command.Effort.FULL if full else command.Effort.PAIRS
    names = [name.strip() for name in (modes or "").split(",") if name.strip()]
    return partial(
        command.verify,
        EngineArgs(model=model, **engine),
        effort,
        names,
        draft=draft,
        seed=seed,
        as_json=as_json,
    )


@add_command(app, epilog="Example:  segue pull smollm2")
def pull(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", show_default=False, help='For example "smollm2".')],
) -> Action:
    """Download a model into the cache, and print where it is."""
    from segue.cli import pull as command

    return partial(command.pull, alias)


@add_command(
    app, epilog='\b\nExamples:\n  segue serve smollm2\n  segue serve smollm2 --port 9000 --api-key "$KEY"'
)
def serve(
    *,
    model: Model,
    server: Server,
    engine: ServerEngine,
) -> Action:
    """Serve a model over HTTP, with OpenAI's API."""
    from segue.cli import serve as command

    args = EngineArgs(model=model, max_engine_restarts=None, **engine)
    return partial(command.serve, args, ServerOptions(**server))
