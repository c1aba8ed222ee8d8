"""The `segue` command. This module stays light: a command's own imports happen when it runs.

An error is one line on stderr, and so is a warning. SEGUE_DEBUG=1 shows where an error came from as well.
"""

import io
import os
import sys
import warnings
from typing import TextIO

from segue.cli.process import EXIT_CLOSED_PIPE, EXIT_FAILED, EXIT_INTERRUPTED
from segue.display import one_line


def main() -> None:
    """The entry point."""
    _prepare_streams()
    warnings.showwarning = _show_warning
    sys.exit(run_command(sys.argv[1:]))


def _prepare_streams() -> None:
    """Text is UTF-8 on every stream, whatever the locale says; a stray byte on stdin is found where the text is
    used. A stream that the caller closed leads nowhere."""
    for name, errors in (("stdin", "surrogateescape"), ("stdout", "replace"), ("stderr", "replace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Takes the place of `warnings.showwarning`: one line, without where in the code it came from."""
    print(f"segue: warning: {one_line(str(message))}", file=sys.stderr)


def run_command(arguments: list[str]) -> int:
    """Carries out one command line. Returns its exit code; raises nothing."""
    try:
        if arguments == ["--version"]:
            from segue import __version__

            print(f"segue {__version__}")
        else:
            from segue.cli.commands import parse

            parse(arguments)()
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has no reader: without this the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """One line for the user. Returns the exit code."""
    from segue.errors import SegueError

    if isinstance(error, SegueError):
        message, code = str(error), error.exit_code
    elif isinstance(error, MemoryError):
        message, code = "out of memory: lower --max-model-len or close other programs", EXIT_FAILED
    elif isinstance(error, OSError):
        message, code = str(error), EXIT_FAILED
    else:
        message, code = (
            f"internal error: {type(error).__name__}: {error} (SEGUE_DEBUG=1 shows where)",
            EXIT_FAILED,
        )
    if os.environ.get("SEGUE_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    print(f"segue: error: {one_line(message)}", file=sys.stderr)
    return code
