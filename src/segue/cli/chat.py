"""`segue chat`: a conversation in the terminal. The KV of its turns stays in the prefix cache, so each
turn computes only what is new."""

import sys

from segue.args import EngineArgs
from segue.cli.main import one_line
from segue.errors import SegueError, UsageError
from segue.llm import LLM
from segue.sample.params import SamplingParams

_HELP = """\
/reset   forget the conversation
/help    show this
/quit    end (or Ctrl-D)
Ctrl-C   stop the answer"""


def chat(args: EngineArgs, params: SamplingParams, *, system: str | None) -> None:
    """Reads turns from stdin until it ends, and answers each on stdout."""
    interactive = sys.stdin.isatty()
    if interactive:
        # Gives `input` line editing and history.
        import readline  # noqa: F401
    with LLM(args) as llm:
        conversation = Conversation(llm, params, system)
        if interactive:
            print(f"{args.model}: /help shows the commands.", file=sys.stderr)
        while True:
            try:
                line = _read_line("> " if interactive else "")
                if line is None and interactive:
                    print(file=sys.stderr)
                if line is None or not conversation.take(line):
                    return
            except KeyboardInterrupt:
                print(file=sys.stderr)
            except SegueError as error:
                print(f"segue: error: {one_line(str(error))}", file=sys.stderr)


class Conversation:
    """The turns so far."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def take(self, line: str) -> bool:
        """One line of the user's. Returns whether the conversation goes on."""
        match line.strip():
            case "":
                pass
            case "/quit":
                return False
            case "/help":
                print(_HELP, file=sys.stderr)
            case "/reset":
                self._messages = list(self._opening)
            case command if command.startswith("/") and " " not in command:
                raise UsageError(f"no such command: {command}: /help shows them")
            case text:
                self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        """One turn. An answer that was stopped is remembered as far as it was shown; a turn that could not
        be answered is not."""
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt_token_ids = self._llm.encode_chat(messages)
        with self._llm.stream({"prompt_token_ids": prompt_token_ids}, self._params) as stream:
            try:
                for delta in stream:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                sys.stdout.write(" ...")
        print(flush=True)
        answer = stream.output.outputs[0]
        if answer.error is not None:
            raise UsageError(f"the turn failed: {answer.error}")
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]


def _read_line(prompt: str) -> str | None:
    """The next line, None at the end. A line that is not UTF-8 is a UsageError."""
    try:
        line = input(prompt)
    except EOFError:
        return None
    if any("\udc80" <= char <= "\udcff" for char in line):
        raise UsageError("the line is not valid UTF-8")
    return line
