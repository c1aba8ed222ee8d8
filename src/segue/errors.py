"""The errors that Segue raises for its users. Nothing else may reach a user.

    SegueError                   anything below; `exit_code` says how the command ends
    ├── UsageError               the request itself is wrong: exit code 2, HTTP 400
    │   ├── ParameterError       a parameter has a bad value; names the parameter and the value
    │   ├── ModelFileError       a model file is missing, damaged or of an unknown kind
    │   ├── CapacityError        it can never fit: says what is needed and what there is
    │   └── SessionError         a session cannot do this now: says why and what it can do
    │       └── SessionClosed    it was closed or timed out
    └── FailedError              the request was right and could not be carried out: exit code 1
        ├── RequestFailed        one request failed; the others go on
        ├── DownloadError        `pull` could not fetch or check a model
        └── EngineDead           the engine (or its process) is gone

Messages are one line: what is wrong, then what to do about it. What they repeat of a user's input is shortened.
"""

import logging

from segue.display import escape

MAX_SHOWN_CHARS = 80
"""Of a value that a message repeats."""
MAX_WHY_CHARS = 500

log = logging.getLogger("segue")


class SegueError(Exception):
    """Base of every error that is meant for a user. What in its message is not printable is escaped."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(escape(" ".join(message.splitlines())))


class UsageError(SegueError):
    """The request itself is wrong."""

    exit_code = 2


class ParameterError(UsageError, ValueError):
    """A parameter has a bad value. `parameter` is its name, for the server's error object."""

    def __init__(self, parameter: str, value: object, why: str) -> None:
        super().__init__(f"{parameter}={shown(value)}: {_shortened(why, MAX_WHY_CHARS)}")
        self.parameter = parameter
        self.value = value
        self.why = why

    def __reduce__(self) -> tuple[type["ParameterError"], tuple[str, object, str]]:
        return type(self), (self.parameter, self.value, self.why)


class ModelFileError(UsageError):
    """A model file is missing, damaged or of a kind that is not known."""


class CapacityError(UsageError):
    """It can never fit; the message has the numbers."""


class SessionError(UsageError):
    """A live session cannot do this in the state it is in; the state does not change."""


class SessionClosed(SessionError):
    """The session was closed, or timed out."""


class FailedError(SegueError):
    """The request was right and could not be carried out."""


class RequestFailed(FailedError):
    """One request failed (a runtime step raised, its logits are not finite); others go on."""


class DownloadError(FailedError):
    """A model could not be fetched or did not match its checksum."""


class EngineDead(FailedError):
    """The engine, or the process that ran it, is gone."""


def shown(value: object) -> str:
    """The value as a message repeats it."""
    if isinstance(value, str | bytes):
        return _shortened(repr(value[: MAX_SHOWN_CHARS + 1]), MAX_SHOWN_CHARS)
    return _shortened(repr(value), MAX_SHOWN_CHARS)


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def describe(error: Exception) -> str:
    """One line for the user whose request this ended. What was not foreseen says little to them; the log has it all."""
    if isinstance(error, SegueError):
        return " ".join(str(error).split())
    log.error("an error that was not foreseen", exc_info=error)
    return f"an internal error ({type(error).__name__}) ended this request: the log says more"
