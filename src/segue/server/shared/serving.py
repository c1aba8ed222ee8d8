"""What the endpoints share: the model, its names, the options, the metrics."""

import logging
import time
import uuid
from functools import cached_property
from http import HTTPStatus

from starlette.requests import HTTPConnection

from segue import __version__
from segue.llm.async_llm import AsyncLLM
from segue.server.shared.http_errors import HttpError
from segue.server.shared.metrics import Metrics
from segue.server.shared.options import ServerOptions, ToolFormat
from segue.server.shared.tools.formats import tool_format_of

log = logging.getLogger("segue.server")

MAX_WARNINGS = 1000
RETRY_AFTER_S = 1
SYSTEM_FINGERPRINT = f"segue-{__version__}"
"""OpenAI's name of what an answer depends on beside the request: with a seed, nothing else here."""


class Serving:
    """One model, as it is served."""

    def __init__(self, llm: AsyncLLM, model: str, options: ServerOptions) -> None:
        """`model` is its name if the options have none."""
        self.llm = llm
        self.options = options
        self.model_names = options.served_model_names or (model,)
        self.created = self.now()
        self.metrics = Metrics(self.model_name)
        self._warnings: set[str] = set()

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @staticmethod
    def now() -> int:
        """As answers tell it: seconds since 1970."""
        return int(time.time())

    @property
    def max_model_len(self) -> int:
        return self.llm.config.max_model_len

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None: its template has no tools."""
        template = self.llm.get_tokenizer().chat_template
        return self.options.tool_call_parser or tool_format_of(template or "")

    @cached_property
    def longest_token_bytes(self) -> int:
        tokenizer = self.llm.get_tokenizer()
        return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    def warn_once(self, warning: str) -> None:
        """Into the log, however often it is the case."""
        if warning not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(warning)
            log.warning(warning)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises HttpError for a model that is not served here."""
        if name is None:
            return self.model_name
        if name not in self.model_names:
            shown = name if len(name) <= 100 else f"{name[:100]}…"
            raise HttpError(
                f"The model `{shown}` does not exist; this server has `{self.model_name}`",
                status=HTTPStatus.NOT_FOUND,
                param="model",
                code="model_not_found",
            )
        return name

    def check_room(self) -> None:
        """Raises HttpError when as many requests wait as may."""
        if self.llm.num_open_requests >= self.llm.config.max_num_seqs + self.options.max_queue:
            raise HttpError(
                f"{self.options.max_queue} requests wait already, which --max-queue allows: try again in a moment",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                code="queue_full",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )


def serving_of(connection: HTTPConnection) -> Serving:
    """Of the application that a request or WebSocket belongs to."""
    serving = connection.app.state.serving
    assert isinstance(serving, Serving)
    return serving


def new_id(prefix: str) -> str:
    """An id that nobody can guess, in OpenAI's form."""
    return f"{prefix}{uuid.uuid4().hex}"
