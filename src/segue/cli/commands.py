"""The commands and their flags: a command line becomes an `Action`, which then runs outside the parser, so that
its interrupts and closed pipes are not the parser's to handle. What a command does is in the module of
its name, imported only then.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import typer

from segue.args import KVCacheDtype, RuntimeName
from segue.cli.process import EXIT_INTERRUPTED
from segue.engine.config import SchedulingPolicy
from segue.errors import UsageError
from segue.server.shared.options import LogLevel, ToolFormat

Action = Callable[[], None]

_MODEL_HELP = 'A model: "smollm2", or the path of a GGUF file.'

Model = Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=_MODEL_HELP)]

MaxTokens = Annotated[int, typer.Option(help="The longest answer, in tokens.")]
MinTokens = Annotated[int, typer.Option(help="The answer does not end before this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that make up this probability.")]
TopK = Annotated[int, typer.Option(help="Draw from this many of the likeliest tokens; 0: from all.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")]
PresencePenalty = Annotated[float, typer.Option(help="Against tokens that the answer already has.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Against tokens, by how often the answer has them.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Against tokens of prompt and answer; 1: none.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", show_default=False, help="Add to a token's logit. May be repeated."),
]
Seed = Annotated[int, typer.Option(help="Of the draws: the same seed, the same answer.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", show_default=False, help="End the answer before this text. May be repeated."
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(metavar="ID", show_default=False, help="End the answer at this token. May be repeated."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end of sequence.")]
Logprobs = Annotated[
    int | None, typer.Option(show_default=False, help="With --json: this many alternatives for each token.")
]
PromptLogprobs = Annotated[
    int | None, typer.Option(show_default=False, help="With --json: this many for each prompt token.")
]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="Keep the stop text in the answer.")]
KeepSpecial = Annotated[bool, typer.Option("--keep-special", help="Show special tokens.")]

Threads = Annotated[
    int | None,
    typer.Option(
        show_default="all CPUs",
        help="How many threads compute, at most one for each CPU. Never changes the answer.",
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(show_default="the model's", help="The longest prompt and answer, in tokens.")
]
KVDtype = Annotated[KVCacheDtype, typer.Option("--kv-cache-dtype", help="How keys and values are kept.")]
Runtime = Annotated[RuntimeName, typer.Option(help="reference: NumPy, slow; to check the native one.")]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        show_default=False,
        help='For example {"method": "ngram", "num_speculative_tokens": 4}. Never changes the answer.',
    ),
]
QuantizedType = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

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


@app.command(
    epilog="\b\nExamples:\n"
    '  segue run smollm2 "Why is the sky blue?"\n'
    '  segue run smollm2 --raw "Once upon a time" -n 2 --temperature 0.8\n'
    "  segue run smollm2 --json --logprobs 3 - < question.txt"
)
def run(
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
    n: Annotated[int, typer.Option("-n", help="How many answers.")] = 1,
    max_tokens: MaxTokens = 512,
    min_tokens: MinTokens = 0,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    logit_bias: LogitBias = None,
    seed: Seed = 0,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    include_stop: IncludeStop = False,
    keep_special: KeepSpecial = False,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KVDtype = "auto",
    runtime: Runtime = "native",
    speculative_config: SpeculativeConfig = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No statistics on stderr.")] = False,
) -> Action:
    """Answer one question, as it comes."""
    from segue.args import EngineArgs
    from segue.cli import run as command
    from segue.cli.parse import parse_logit_bias, parse_object
    from segue.sample.params import SamplingParams

    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=parse_logit_bias(logit_bias),
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_id,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        include_stop_str_in_output=include_stop,
        skip_special_tokens=not keep_special,
    )
    args = EngineArgs(
        model=model,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=n,
        kv_cache_dtype=kv_cache_dtype,
        runtime=runtime,
        speculative_config=parse_object("speculative_config", speculative_config),
    )
    return partial(command.run, args, prompt, params, raw=raw, system=system, as_json=as_json, quiet=quiet)


@app.command(epilog=_CHAT_EPILOG)
def chat(
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
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KVDtype = "auto",
    runtime: Runtime = "native",
    speculative_config: SpeculativeConfig = None,
) -> Action:
    """Talk with a model in the terminal.

    The model runs here, or with --url on a server that is running (segue serve). The conversation is one live session:
    each turn computes only what is new, and an answer that is stopped is remembered as far as it was shown.
    """
    from segue.args import EngineArgs
    from segue.cli import chat as command
    from segue.cli.parse import parse_object
    from segue.sample.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    if url is not None:
        _refuse_with_url(
            threads=threads,
            max_model_len=max_model_len,
            kv_cache_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
            runtime=None if runtime == "native" else runtime,
            speculative_config=speculative_config,
        )
        return partial(
            command.chat_remotely, url, params, model=model, api_key=api_key or None, system=system
        )
    if model is None:
        raise UsageError("there is no model: name one, or a server with --url")
    args = EngineArgs(
        model=model,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=1,
        kv_cache_dtype=kv_cache_dtype,
        runtime=runtime,
        speculative_config=parse_object("speculative_config", speculative_config),
    )
    return partial(command.chat_locally, args, params, system=system)


def _refuse_with_url(**engine_flags: object) -> None:
    """Raises UsageError when one is given."""
    for name, value in engine_flags.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is for an engine of our own: leave it out, or leave out --url")


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", show_default=False, help=_MODEL_HELP)],
    as_json: AsJson = False,
) -> Action:
    """Show what a model file holds: metadata and tensors."""
    from segue.cli import inspect as command

    return partial(command.inspect, file, as_json=as_json)


@app.command(
    epilog="""\b
What becomes what:
  matrices                   TYPE
  the output matrix          q8_0; so the embedding, in models where they are one
  norms, biases, routers     as they are

\b
Example:
  segue quantize model-f16.gguf model-q4_0.gguf q4_0"""
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


@app.command(epilog="Example:  segue bench smollm2 --threads 2 --json")
def bench(
    model: Model,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is prefilled.")] = 512,
    decode_len: Annotated[int, typer.Option(min=2, help="Tokens that each sequence decodes.")] = 64,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that are decoded together.")] = 32,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each measurement.")] = 5,
    threads: Threads = None,
    kv_cache_dtype: KVDtype = "auto",
    runtime: Runtime = "native",
    as_json: AsJson = False,
) -> Action:
    """Measure prefill, and decoding alone and together."""
    from segue.args import EngineArgs
    from segue.cli import bench as command

    args = EngineArgs(
        model=model,
        threads=threads,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(512, prompt_len, sequences),
        kv_cache_dtype=kv_cache_dtype,
        runtime=runtime,
        enable_prefix_caching=False,
    )
    workload = command.Workload(prompt_len=prompt_len, decode_len=decode_len, sequences=sequences)
    return partial(command.bench, args, workload, repeat=repeat, as_json=as_json)


@app.command(epilog="Example:  segue verify smollm2 --quick")
def verify(
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
    kv_cache_dtype: KVDtype = "auto",
    runtime: Runtime = "native",
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
        model,
        effort,
        names,
        draft=draft,
        seed=seed,
        runtime=runtime,
        kv_cache_dtype=kv_cache_dtype,
        as_json=as_json,
    )


@app.command(epilog="Example:  segue pull smollm2")
def pull(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", show_default=False, help='For example "smollm2".')],
) -> Action:
    """Download a model into the cache, and print where it is."""
    from segue.cli import pull as command

    return partial(command.pull, alias)


@app.command(
    epilog='\b\nExamples:\n  segue serve smollm2\n  segue serve smollm2 --port 9000 --api-key "$KEY"'
)
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free one.")] = 8000,
    uds: Annotated[
        str | None,
        typer.Option(metavar="PATH", show_default=False, help="A Unix socket, in place of host and port."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SEGUE_API_KEY", show_default=False, help="What clients must know. May be repeated."
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", show_default="MODEL", help="Its name for clients. May be repeated."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            show_default=False,
            help="Pages that may use the server; *: all. May be repeated.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="A name that the server is reached by, beside the machine's own; *.NAME: all below, "
            "*: any. May be repeated.",
        ),
    ] = None,
    max_request_bytes: Annotated[int, typer.Option(help="The largest request.")] = 4 << 20,
    max_logprobs: Annotated[int, typer.Option(help="The most logprobs of a token.")] = 20,
    max_queue: Annotated[
        int,
        typer.Option(help="Requests that may wait beside --max-num-seqs; more are told to come again: 429."),
    ] = 1024,
    ssl_keyfile: Annotated[
        str | None, typer.Option(metavar="PATH", show_default=False, help="For TLS, as PEM.")
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(metavar="PATH", show_default=False, help="For TLS, as PEM.")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long open requests may go on after SIGTERM.")
    ] = 10.0,
    state_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Keep realtime sessions here, so that they outlive the server.",
        ),
    ] = None,
    resume_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long a realtime session waits for its client to come back."
        ),
    ] = 60.0,
    max_sessions: Annotated[int, typer.Option(help="The most realtime sessions at once.")] = 1000,
    session_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long a realtime session may be silent before it is closed."
        ),
    ] = 3600.0,
    max_saved_sessions: Annotated[
        int, typer.Option(help="The most sessions in --state-dir; the oldest are deleted.")
    ] = 10_000,
    saved_session_days: Annotated[
        float,
        typer.Option(
            metavar="DAYS", help="How long a session stays in --state-dir that nobody comes back to."
        ),
    ] = 30.0,
    tool_call_parser: Annotated[
        ToolFormat | None,
        typer.Option(show_default="by the chat template", help="How the model writes tool calls."),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="What is told on stderr.")] = "info",
    access_log: Annotated[bool, typer.Option(help="Tell of each request.")] = True,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(show_default="256, or the tokens in a step", help="The most requests in a step."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(show_default="512, or the requests in a step", help="The most tokens in a step."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16,
    num_kv_blocks: Annotated[
        int | None, typer.Option(show_default="what memory allows", help="KV blocks for all requests.")
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Compute what prompts share once.")] = True,
    async_scheduling: Annotated[bool, typer.Option(help="Plan a step while the one before runs.")] = False,
    scheduling_policy: Annotated[SchedulingPolicy, typer.Option(help="Who goes first.")] = "fcfs",
    seed: Annotated[int, typer.Option(help="For requests that bring none.")] = 0,
    kv_cache_dtype: KVDtype = "auto",
    runtime: Runtime = "native",
    speculative_config: SpeculativeConfig = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run the engine in the server's own process.")
    ] = False,
) -> Action:
    """Serve a model over HTTP, with OpenAI's API."""
    from segue.args import EngineArgs
    from segue.cli import serve as command
    from segue.cli.parse import parse_object
    from segue.server.shared.options import ServerOptions

    args = EngineArgs(
        model=model,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
        scheduling_policy=scheduling_policy,
        seed=seed,
        kv_cache_dtype=kv_cache_dtype,
        runtime=runtime,
        speculative_config=parse_object("speculative_config", speculative_config),
        engine_process=not in_process,
        max_engine_restarts=None,
    )
    options = ServerOptions(
        host=host,
        port=port,
        uds=uds,
        api_keys=tuple(api_key or ()),
        served_model_names=tuple(served_model_name or ()),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        max_request_bytes=max_request_bytes,
        max_logprobs=max_logprobs,
        max_queue=max_queue,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        shutdown_timeout_s=shutdown_timeout,
        state_dir=state_dir,
        resume_timeout_s=resume_timeout,
        max_sessions=max_sessions,
        session_timeout_s=session_timeout,
        max_saved_sessions=max_saved_sessions,
        saved_session_days=saved_session_days,
        tool_call_parser=tool_call_parser,
        log_level=log_level,
        access_log=access_log,
    )
    return partial(command.serve, args, options)
