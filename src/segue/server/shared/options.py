"""What a server is started with, apart from its engine."""

import re
from typing import Literal, get_args

import msgspec

from segue.errors import ParameterError
from segue.sample.params import MAX_LOGPROBS

ToolFormat = Literal["hermes", "llama3_json", "mistral"]
"""How a model writes its tool calls; vLLM's names."""
LogLevel = Literal["error", "warning", "info", "debug"]

DEFAULT_PORT = 8000
MAX_PORT = 65535
DEFAULT_MAX_REQUEST_BYTES = 4 << 20
DEFAULT_MAX_LOGPROBS = 20
DEFAULT_MAX_QUEUE = 1024


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A bad value raises ParameterError."""

    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0: all."""
    port: int = DEFAULT_PORT
    """0 takes any free one."""
    uds: str | None = None
    """A Unix socket, in place of `host` and `port`."""
    api_keys: tuple[str, ...] = ()
    """What clients must know, one of these; without any, the server is open."""
    served_model_names: tuple[str, ...] = ()
    """What clients may call the model; the first is in answers. None: as it was given."""
    cors_origins: tuple[str, ...] = ()
    """Where pages come from that may use the server; *: anywhere."""
    allowed_hosts: tuple[str, ...] = ()
    """What the server is reached by, beside the machine's own names; *.NAME: all below it, *: anything."""
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    """The largest request."""
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    """The most logprobs that may be asked for at each position, of answers and of prompts."""
    max_queue: int = DEFAULT_MAX_QUEUE
    """Requests that may wait beside `max_num_seqs`; more are told to come again: 429."""
    ssl_keyfile: str | None = None
    """The key for TLS, as PEM."""
    ssl_certfile: str | None = None
    """The certificate for TLS, as PEM."""
    shutdown_timeout_s: float = 10.0
    """How long open requests may go on after SIGTERM."""
    state_dir: str | None = None
    """Keep realtime sessions here, so that they outlive the server."""
    resume_timeout_s: float = 60.0
    """How long a realtime session waits for its client to come back."""
    max_sessions: int = 1000
    """The most realtime sessions at once, connected or waiting for their client."""
    session_timeout_s: float = 3600.0
    """How long a connected realtime session may be silent before it is closed."""
    max_saved_sessions: int = 10_000
    """The most sessions in `state_dir`; the oldest are deleted."""
    saved_session_days: float = 30.0
    """How long a session stays in `state_dir` that nobody comes back to."""
    tool_call_parser: ToolFormat | None = None
    """How the model writes tool calls. None: by the chat template."""
    log_level: LogLevel = "info"
    """What is told on stderr."""
    access_log: bool = True
    """Tell of each request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ParameterError("port", self.port, f"must be in [0, {MAX_PORT}]")
        for name in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*\.?", name, re.ASCII):
                raise ParameterError("allowed_host", name, "must be a name, without scheme and port")
        if self.max_request_bytes < 1:
            raise ParameterError("max_request_bytes", self.max_request_bytes, "must be positive")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ParameterError("max_logprobs", self.max_logprobs, f"must be in [0, {MAX_LOGPROBS}]")
        if self.max_queue < 0:
            raise ParameterError("max_queue", self.max_queue, "must be 0 or more")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise ParameterError("shutdown_timeout", self.shutdown_timeout_s, "must be 0 or more seconds")
        if not 0 <= self.resume_timeout_s < float("inf"):
            raise ParameterError("resume_timeout", self.resume_timeout_s, "must be 0 or more seconds")
        for name in ("max_sessions", "max_saved_sessions"):
            if getattr(self, name) < 1:
                raise ParameterError(name, getattr(self, name), "must be at least 1")
        if not 0 < self.session_timeout_s < float("inf"):
            raise ParameterError("session_timeout", self.session_timeout_s, "must be more than 0 seconds")
        if not 0 < self.saved_session_days < float("inf"):
            raise ParameterError("saved_session_days", self.saved_session_days, "must be more than 0 days")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ParameterError(
                "ssl_certfile", self.ssl_certfile, "TLS needs both --ssl-keyfile and --ssl-certfile"
            )
        if any(not key.isascii() or not key.isprintable() or not key.strip() for key in self.api_keys):
            raise ParameterError("api_key", "…", "must be printable ASCII and not empty")
        if self.tool_call_parser is not None and self.tool_call_parser not in get_args(ToolFormat):
            known = ", ".join(get_args(ToolFormat))
            raise ParameterError("tool_call_parser", self.tool_call_parser, f"unknown; known are {known}")
