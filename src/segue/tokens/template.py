"""Runs chat templates: Jinja from a model file, in a sandbox, with bounded work.

The environment is that of `transformers.apply_chat_template`, which the templates are written for: trimmed
blocks, loop controls, `raise_exception`, `strftime_now`, and a `tojson` that keeps characters as they are.
What bounds the work is `sandbox.py`. Knows nothing about tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache, lru_cache
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from segue.errors import ModelFileError
from segue.tokens.sandbox import Budget, Sandbox, TooMuchWork, budget

MAX_CHARS = 16 << 20
"""Of a rendering."""
MAX_SOURCE_CHARS = 1 << 18
_LONGEST_TIME_FORMAT = 1000
_LONGEST_REASON = 200


class TemplateRefusal(Exception):
    """The template cannot render these values; the message is one line that says why."""


def render_template(source: str, values: Mapping[str, object], *, now: datetime) -> str:
    """Renders a template. `now` is what `strftime_now` tells.

    Raises ModelFileError when the template itself is wrong or its work has no bounds, TemplateRefusal when it
    raises or fails for these values.
    """
    template = _compile(source)

    def strftime_now(time_format: str) -> str:
        return now.strftime(time_format[:_LONGEST_TIME_FORMAT])

    context = {"raise_exception": _refuse, "strftime_now": strftime_now, **values}
    try:
        with _fresh_budget():
            return _join(template.generate(context))
    except TemplateRefusal:
        raise
    except TooMuchWork as error:
        raise ModelFileError(f"the chat template {error}; use another template") from None
    except jinja2.exceptions.SecurityError as error:
        raise ModelFileError(
            f"the chat template does what it must not: {one_line(error)}; use another template"
        ) from None
    except Exception as error:  # a template can fail in any way that Python can
        raise TemplateRefusal(f"{type(error).__name__}: {one_line(error)}") from None


def one_line(reason: object) -> str:
    """The text of an error on one line, at most 200 characters."""
    # What a template says of itself can be very long.
    text = " ".join(str(reason)[: 2 * _LONGEST_REASON].split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


@contextmanager
def _fresh_budget() -> Iterator[None]:
    token = budget.set(Budget())
    try:
        yield
    finally:
        budget.reset(token)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise ModelFileError(
            f"the chat template has {len(source):,} characters, more than {MAX_SOURCE_CHARS:,}; use another template"
        )
    try:
        with _fresh_budget():
            return _environment().template(source)
    except jinja2.TemplateSyntaxError as error:
        reason = one_line(error.message)
        raise ModelFileError(
            f"the chat template is wrong in line {error.lineno}: {reason}; use another template"
        ) from None
    except SyntaxError as error:
        # Jinja takes some things that Python does not; the line would be one of the code made of the template.
        raise ModelFileError(
            f"the chat template is wrong: {one_line(error.msg)}; use another template"
        ) from None
    except Exception as error:  # nested too deeply, and whatever else neither foresees
        reason = one_line(error) or type(error).__name__
        raise ModelFileError(f"the chat template is wrong: {reason}; use another template") from None


@cache
def _environment() -> Sandbox:
    return Sandbox(extensions=[_GenerationTag, loopcontrols])


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(reason: object = "") -> NoReturn:
    raise TemplateRefusal(one_line(reason))


def _join(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARS:
            raise TooMuchWork(f"makes more than {MAX_CHARS:,} characters")
        parts.append(piece)
    return "".join(parts)
