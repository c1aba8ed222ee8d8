"""The turns of a conversation, and its `/` commands. Answers go to stdout, all else to stderr."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from segue.cli.output import tell, write_answer
from segue.cli.talk.backend import ChatBackend, Reply, ReplyEnd, Turn
from segue.cli.talk.terminal import Entry
from segue.errors import RequestFailed, UsageError
from segue.interrupts import DeferredInterrupt
from segue.sample.params import SamplingParams

HELP = """\
/reset         forget the conversation
/system TEXT   what the model is told first; without TEXT: nothing
/undo          forget the last turn and its answer
/retry         answer the last turn again, with the next seed
/stats         tokens and times of the last answer, length of the conversation
/save FILE     write the conversation as JSON messages
/help          show this
/quit          end (or Ctrl-D)
//TEXT         say /TEXT
Ctrl-C         stop the answer, or drop what is typed
A line that ends in \\ goes on in the next one; lines between two lines of \"\"\" are one turn."""


class Conversation:
    """The turns so far. An error leaves it as it was, but a failed /retry: that turn is forgotten."""

    def __init__(self, backend: ChatBackend, params: SamplingParams, system: str | None) -> None:
        self._backend = backend
        self._params = params
        self._seed = params.seed or 0
        self._system = system
        self._turns: list[Turn] = []
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: tell(HELP),
            "/reset": self._reset,
            "/undo": self._undo,
            "/retry": self._retry,
            "/stats": self._tell_stats,
        }
        """Those without an argument."""

    def take(self, entry: Entry) -> bool:
        """What the user entered. Returns whether the conversation goes on."""
        text = entry.text if entry.is_block else entry.text.strip()
        if not text.strip():
            return True
        if entry.is_block or not text.startswith("/"):
            self._say(text, self._seed)
        elif text.startswith("//"):
            self._say(text[1:], self._seed)
        elif text == "/quit":
            return False
        else:
            self._command(text)
        return True

    def _command(self, text: str) -> None:
        name, *rest = text.split(maxsplit=1)
        argument = rest[0] if rest else None
        if name == "/system":
            self._set_system(argument)
        elif name == "/save":
            self._save(argument)
        elif name not in (*self._commands, "/quit"):
            raise UsageError(f"no such command: {name}: /help shows them; /{name} says it to the model")
        elif argument is not None:
            raise UsageError(f"{name} stands alone: it takes no {argument!r}")
        else:
            self._commands[name]()

    # --- turns ------------------------------------------------------------------------------------------------

    def _say(self, text: str, seed: int) -> None:
        """One turn. An answer that was stopped is remembered as far as it was shown; a turn that was not answered
        at all is not."""
        reply = self._backend.reply(text, msgspec.structs.replace(self._params, seed=seed))
        shown: list[str] = []
        try:
            reply.begin()
            _show(reply, shown)
        except KeyboardInterrupt:
            with DeferredInterrupt():
                _write(reply.stop(), shown)
        except RequestFailed:
            if reply.is_begun:
                print(flush=True)
                self._backend.undo()
            raise
        if not reply.is_begun:
            tell("\nstopped: the turn is forgotten")
            return
        with DeferredInterrupt():
            self._settle(Turn(text=text, answer="".join(shown), stats=reply.stats, seed=seed))

    def _settle(self, turn: Turn) -> None:
        """A turn whose answer is over."""
        is_stopped = turn.stats.end is ReplyEnd.STOPPED
        print(" ..." if is_stopped else "", flush=True)
        if is_stopped and not turn.answer:
            self._backend.undo()
            tell("stopped before the answer began: the turn is forgotten")
        else:
            self._turns.append(turn)

    def _last(self) -> Turn:
        if not self._turns:
            raise UsageError("there is no turn yet: say something first")
        return self._turns[-1]

    def _forget_last(self) -> None:
        with DeferredInterrupt():
            self._backend.undo()
            self._turns.pop()

    # --- commands ---------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._restart(self._system, [])

    def _set_system(self, system: str | None) -> None:
        self._restart(system, self._turns)

    def _restart(self, system: str | None, turns: list[Turn]) -> None:
        with DeferredInterrupt():
            self._backend.restart(system, turns)
            self._system, self._turns = system, turns

    def _undo(self) -> None:
        last = self._last()
        self._forget_last()
        tell(f"forgotten: {_shortened(last.text)}")

    def _retry(self) -> None:
        last = self._last()
        if self._params.temperature == 0:
            tell("the temperature is 0, so the answer is the same: --temperature 0.7 draws another one")
        self._forget_last()
        self._say(last.text, (last.seed + 1) % 2**63)

    def _tell_stats(self) -> None:
        stats = self._last().stats
        parts = [f"{stats.num_tokens:,} tokens, {stats.end}"]
        if stats.time_to_first_token_s is not None:
            parts.append(f"first token after {stats.time_to_first_token_s:.3f} s")
        if stats.tokens_per_second is not None:
            parts.append(f"{stats.tokens_per_second:,.1f} tok/s")
        limit = self._backend.max_model_len
        history = f"history {stats.num_prompt_tokens + stats.num_tokens:,}"
        parts.append(f"{history} tokens" if limit is None else f"{history} of {limit:,} tokens")
        tell(" | ".join(parts))

    def _save(self, argument: str | None) -> None:
        if argument is None:
            raise UsageError("/save needs a file: /save FILE")
        path = Path(argument).expanduser()
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for turn in self._turns:
            messages += turn.messages
        try:
            path.write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UsageError(f"{argument} cannot be written: {reason}") from None
        tell(f"{len(messages)} messages in {path}")


def _show(reply: Reply, shown: list[str]) -> None:
    """To its end. Ctrl-C falls between two pieces, so that what was read is what was shown."""
    while True:
        with DeferredInterrupt():
            try:
                piece = next(reply)
            except StopIteration:
                return
            _write(piece, shown)


def _write(piece: str, shown: list[str]) -> None:
    if piece:
        shown.append(piece)
        write_answer(piece)


def _shortened(text: str, length: int = 60) -> str:
    """The text as one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."
