"""`segue chat`: a conversation in the terminal, with an engine of its own or a running server. See `segue.cli.talk`."""

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from segue.cli.output import tell
from segue.cli.talk.backend import ChatBackend
from segue.cli.talk.conversation import Conversation
from segue.cli.talk.terminal import line_history, read_entry, undisturbed_output
from segue.display import one_line
from segue.errors import RequestFailed, UsageError
from segue.sample.params import SamplingParams

if TYPE_CHECKING:
    from segue.args import EngineArgs


def chat_locally(args: "EngineArgs", params: SamplingParams, *, system: str | None) -> None:
    """With an engine of our own."""
    from segue.cli.talk.local import LocalBackend
    from segue.llm.llm import LLM

    with LLM(args) as llm:
        _talk(LocalBackend(llm, args.model, system), params, system)


def chat_remotely(
    url: str, params: SamplingParams, *, model: str | None, api_key: str | None, system: str | None
) -> None:
    """With a server. Raises UsageError without the packages for it, FailedError when it cannot be reached or goes
    away."""
    from segue.cli.talk.remote import connect_backend

    with connect_backend(url, api_key=api_key, model=model, system=system) as backend:
        _talk(backend, params, system)


def _talk(backend: ChatBackend, params: SamplingParams, system: str | None) -> None:
    """Reads turns from stdin until it ends, and answers each on stdout. The backend knows `system` already."""
    is_interactive = sys.stdin.isatty()
    conversation = Conversation(backend, params, system)
    with line_history() if is_interactive else nullcontext():
        if is_interactive:
            tell(f"{backend.model}: /help shows the commands.")
        while _take_next(conversation, is_interactive=is_interactive):
            pass


def _take_next(conversation: Conversation, *, is_interactive: bool) -> bool:
    """One entry of the user's. Returns whether the conversation goes on."""
    try:
        entry = read_entry(is_interactive=is_interactive)
        if entry is not None:
            with undisturbed_output() if is_interactive else nullcontext():
                return conversation.take(entry)
        if is_interactive:
            print(file=sys.stderr)
        return False
    except KeyboardInterrupt:
        print(file=sys.stderr)
    except (UsageError, RequestFailed) as error:
        print(f"segue: error: {one_line(str(error))}", file=sys.stderr)
    return True
