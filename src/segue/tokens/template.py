"""Runs chat templates: Jinja from a model file, in a sandbox, with bounded work.

The environment is that of `transformers.apply_chat_template`, which the templates are written for: trimmed
blocks, loop controls, `raise_exception`, `strftime_now`, and a `tojson` that keeps characters as they are.
Knows nothing about tokens.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from segue.errors import ModelFileError

MAX_LOOPS = 100_000
"""How many numbers all the ranges of one rendering may have together."""
MAX_SIZE = 16 << 20
"""Characters of a rendering, and items of anything a template makes by multiplication."""
MAX_INTEGER_BITS = 256
_LONGEST_REASON = 200


class TemplateRefusal(Exception):
    """The template cannot render these values; the message is one line that says why."""


def render_template(source: str, values: Mapping[str, object], *, now: datetime) -> str:
    """Renders a template. `now` is what `strftime_now` tells.

    Raises ModelFileError when the template itself is wrong or its work has no bounds, TemplateRefusal when it
    raises or fails for these values.
    """
    template = _compile(source)
    context = {
        "raise_exception": _refuse,
        "strftime_now": now.strftime,
        "range": _BoundedRange(),
        **values,
    }
    try:
        return _join(template.generate(context))
    except TemplateRefusal:
        raise
    except _TooMuchWork as error:
        raise ModelFileError(f"the chat template {error}; use another template") from None
    except jinja2.exceptions.SecurityError as error:
        raise ModelFileError(
            f"the chat template does what it must not: {one_line(error)}; use another template"
        ) from None
    except Exception as error:  # a template can fail in any way that Python can
        raise TemplateRefusal(f"{type(error).__name__}: {one_line(error)}") from None


def one_line(reason: object) -> str:
    """The text of an error on one line, at most 200 characters."""
    text = " ".join(str(reason).split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        reason = one_line(error.message)
        raise ModelFileError(
            f"the chat template is wrong in line {error.lineno}: {reason}; use another template"
        ) from None
    except (RecursionError, OverflowError, ValueError) as error:
        raise ModelFileError(f"the chat template is wrong: {one_line(error)}; use another one") from None


@cache
def _environment() -> jinja2.Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    # The same values must give the same text.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _Namespace
    return environment


class _TooMuchWork(Exception):
    """What the template would do has no bounds."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for factor, count in ((left, right), (right, left)):
            sized = isinstance(factor, str | list | tuple)
            if operator == "*" and sized and isinstance(count, int) and len(factor) * count > MAX_SIZE:
                raise _TooMuchWork(f"makes a text or list of more than {MAX_SIZE} items")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise _TooMuchWork(f"computes with integers of more than {MAX_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's `namespace`, without the names that lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may have a field named `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _BoundedRange:
    """`range`, as long as all the ranges together stay short: a loop in a loop makes a range each time."""

    def __init__(self) -> None:
        self._left = MAX_LOOPS

    def __call__(self, *arguments: int) -> range:
        numbers = range(*arguments)
        # Compared before `len`, which fails for the very long.
        if numbers and (numbers[-1] - numbers[0]) // numbers.step >= self._left:
            raise _TooMuchWork(f"loops more than {MAX_LOOPS} times")
        self._left -= len(numbers)
        return numbers


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have the name {name!r}")


def _make_dict(*arguments: Any, **values: Any) -> dict[Any, Any]:
    return dict(*arguments, **values)


def _refuse(reason: object = "") -> NoReturn:
    raise TemplateRefusal(one_line(reason))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _join(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_SIZE:
            raise _TooMuchWork(f"makes more than {MAX_SIZE} characters")
        parts.append(piece)
    return "".join(parts)
