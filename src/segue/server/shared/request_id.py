"""The id of the HTTP request that is being answered: one in the log, in the header `x-request-id` and in the answer.

x-request-id: req_4f2a…      chatcmpl-4f2a…       made here
x-request-id: mine           chatcmpl-mine        the client's, from its header or the field `request_id`
"""

import uuid
from contextvars import ContextVar

MAX_CHARS = 128
_OWN = "req_"
_current: ContextVar[str] = ContextVar("request_id")


def begin(given: str) -> None:
    """For the request that the running task answers. What a client gives is taken if it can stand in a header."""
    _current.set(given if _is_plain(given) else f"{_OWN}{uuid.uuid4().hex}")


def current() -> str | None:
    """None outside of a request."""
    return _current.get(None)


def answer_id(prefix: str, given: str | None) -> str:
    """The id of the answer. `given` is the field `request_id`, which goes before the header."""
    if given and _is_plain(given):
        _current.set(given)
    return prefix + (given or (current() or uuid.uuid4().hex).removeprefix(_OWN))


def _is_plain(given: str) -> bool:
    return 0 < len(given) <= MAX_CHARS and given.isascii() and given.isprintable()
