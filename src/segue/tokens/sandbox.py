"""A Jinja environment for templates of unknown origin: what a template makes and does is counted and bounded.

Jinja's sandbox keeps a template away from Python's internals, and lets it take all memory (`'%999999999d' % 1`, a list
doubled forty times) and all time. Here everything whose cost depends on its operands goes through a `Budget`:

    source ──parse──▶ tree ──_Metered──▶ tree ──compile──▶ code that calls back for operators, loops, literals, output
                                                           filters, tests and calls do so by themselves

What a step costs is a matter of what it reads and makes, never of the clock, so that the same values always give the
same text, or the same error.
"""

import json
import re
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Macro, Undefined, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace, pass_context, pass_eval_context
from jinja2.visitor import NodeTransformer
from markupsafe import EscapeFormatter, Markup

MAX_VALUE_BYTES = 32 << 20
"""Of one value, all that it holds counted as often as it is in there."""
MAX_MADE_BYTES = 256 << 20
"""Of all values that a rendering makes, as if none were given back."""
MAX_WORK = 1 << 30
"""Bytes that a rendering reads; anything else is converted to those by how long it takes. A few seconds."""
MAX_LOOPS = 100_000
"""How many numbers all the ranges of one rendering may have together."""
MAX_WIDTH = 10_000
"""What a text may be padded to."""
MAX_INTEGER_BITS = 256

_STEP = 1024
"""Of work: one call."""
_NODE = 64
"""Of work: one operation without a call."""
_WALK = 512
"""Of work: an item whose size was not known."""
_SLOW = 16
"""Of work, for a byte: what is not done by one tight loop in C."""
_ITEM_BYTES = 64
"""An object, or a place in a list with what small object is there."""
_CONTAINER_BYTES = 256
_SLOT_BYTES = 32
"""A place in a list."""
_ENTRY_BYTES = 128
"""Of a dict."""
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class TooMuchWork(Exception):
    """What the template would do has no bounds. The message goes on after "the chat template"."""


class Budget:
    """What one rendering has made and done."""

    def __init__(self) -> None:
        self._made = 0
        self._work = 0
        self._loops = 0
        self._sizes: dict[int, tuple[object, int]] = {}
        """By `id`, of containers, which nothing here changes; they are kept, as an id can be given again."""

    def size(self, value: object) -> int:
        """Bytes of a value with all that it holds. Raises TooMuchWork when it is too large."""
        match value:
            case str():
                size = _text_bytes(value)
            case int():
                _check_bits(value.bit_length())
                size = _ITEM_BYTES
            case list() | tuple() | dict():
                known = self._sizes.get(id(value))
                if known is not None:
                    return known[1]
                size = self._size_of_items(value)
                self.know(value, size)
            case KeysView() | ValuesView():
                size = self._size_of_items(value)
            case ItemsView():
                size = self._size_of_items(value.mapping)  # type: ignore[attr-defined]  # of every dict's
            case range():
                size = _ITEM_BYTES * (1 + len(value))
            case _:
                size = _ITEM_BYTES
        self.expect(size)
        return size

    def _size_of_items(self, value: Collection[object]) -> int:
        size = _ITEM_BYTES
        for item in chain.from_iterable(value.items()) if isinstance(value, Mapping) else value:
            # What can change later, or gives what it does not hold, would make the size a lie.
            if not isinstance(item, str | int | float | list | tuple | dict | range | Undefined | None):
                raise TooMuchWork(f"puts a {type(item).__name__} into a list")
            size += self.size(item)
        self.work(_WALK * len(value))
        return size

    def know(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any], size: int) -> None:
        """A new container, and what is in it, come to so many bytes."""
        self.take(_CONTAINER_BYTES + len(value) * (_ENTRY_BYTES if isinstance(value, dict) else _SLOT_BYTES))
        self._sizes[id(value)] = value, size

    def expect(self, size: int) -> None:
        """Before a value of so many bytes is made."""
        if size > MAX_VALUE_BYTES:
            raise TooMuchWork(f"makes a value of more than {MAX_VALUE_BYTES >> 20} MiB")

    def read(self, *values: object, weight: int = 1) -> None:
        """Before all that these hold is looked at."""
        self.work(_STEP + weight * sum(map(self.size, values)))

    def work(self, amount: int) -> None:
        self._work += amount
        if self._work > MAX_WORK:
            raise TooMuchWork("does too much work for one text")

    def make(self, value: Any) -> Any:
        """A value that was just made. Returns it, or what counts its items if it is an iterator."""
        match value:
            case str():
                size = _text_bytes(value)
                self.expect(size)
                self.take(size)
            case list() | tuple() | dict() | int():
                self.size(value)
            case Iterator():
                return self._counted(value)
            case None:
                pass
            case _:
                self.take(_CONTAINER_BYTES)
        return value

    def take(self, size: int) -> None:
        self._made += size
        if self._made > MAX_MADE_BYTES:
            raise TooMuchWork(f"makes more than {MAX_MADE_BYTES >> 20} MiB for one text")

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.work(_STEP)
            self.take(_ITEM_BYTES)
            yield item

    def loop(self, count: int) -> None:
        """So many numbers of a range."""
        self._loops += count
        if self._loops > MAX_LOOPS:
            raise TooMuchWork(f"loops more than {MAX_LOOPS} times")


budget: ContextVar[Budget] = ContextVar("budget")
"""Of the rendering (or compilation) that is under way."""


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TooMuchWork(f"computes with integers of more than {MAX_INTEGER_BITS} bits")


def _check_widths(widths: Iterable[object]) -> None:
    if any(isinstance(width, int) and abs(width) > MAX_WIDTH for width in widths):
        raise TooMuchWork(f"pads a text to more than {MAX_WIDTH} characters")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _text_bytes(text: str) -> int:
    return _ITEM_BYTES + len(text) * (1 if text.isascii() else 4)


# --- the environment ------------------------------------------------------------------------------------------

_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        "capitalize casefold center count endswith expandtabs find format index isalnum isalpha isascii isdecimal "
        "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
        "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith "
        "strip swapcase title upper zfill"
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
"""What a template may call of plain values."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates to code that keeps to the `budget`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, extensions: Sequence[str | type[Extension]]) -> None:
        # Constants are computed when the template runs, like all else.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_printed
        )
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters.update(tojson=_to_json, join=_join, sum=_sum)
        self.filters = {name: _metered(name, each) for name, each in self.filters.items()} | _HOOKS
        tests: Mapping[str, Any] = self.tests
        self.tests = {
            name: each if name in _CHEAP_TESTS else _metered(name, each) for name, each in tests.items()
        }
        # The same values must give the same text.
        del self.globals["lipsum"]
        self.globals.update(dict=_make_dict, namespace=_Namespace, range=_range)

    def template(self, source: str) -> jinja2.Template:
        """Raises what Jinja and Python raise for a source that they cannot compile."""
        tree = _Metered().visit(self.parse(source))
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spent = budget.get()
        size = spent.size(left) + spent.size(right)
        if operator == "+" and isinstance(left, list | tuple):
            # Often all messages so far and one more: they are not looked through each time.
            spent.expect(size)
            joined: list[Any] | tuple[Any, ...] = super().call_binop(context, operator, left, right)
            spent.work(_STEP + _SLOT_BYTES * len(joined))
            spent.know(joined, size)
            return joined
        spent.work(_STEP + size)
        match operator, left, right:
            case "+", str(), _:
                spent.expect(size)
            case "%", str(), _:
                spent.expect(_percent_bytes(spent, left, right))
            case "*", str() | list() | tuple(), int():
                spent.expect(spent.size(left) * right)
            case "*", int(), str() | list() | tuple():
                spent.expect(spent.size(right) * left)
            case "**", int(), int():
                _check_bits(left.bit_length() * right)
        return spent.make(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int):
            budget.get().read(argument)  # it is hashed, compared, or shown in an error
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return isinstance(obj, Undefined) or type(obj).__module__ != "builtins"

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        spent = budget.get()
        if isinstance(function, Macro):
            spent.work(_STEP + _NODE * (len(args) + len(kwargs)))
            return super().call(context, function, *args, **kwargs)
        spent.read(*args, *kwargs.values())
        spent.take(_SLOT_BYTES * len(args) + _ENTRY_BYTES * len(kwargs))
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            args = _listed(args)
            spent.read(owner, *args)
            _expect_text(spent, function.__name__, owner, args, kwargs)
        elif isinstance(owner, list | tuple):
            spent.read(owner)
        return spent.make(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, which Jinja's environment asks for when it finds the attribute."""
        if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ != "format":
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        formatter = (
            _MarkupFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)
        )

        def formatted(*args: Any, **kwargs: Any) -> str:
            budget.get().read(text)
            return type(text)(formatter.vformat(text, args, kwargs))

        return formatted


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        spent = budget.get()
        spent.read(value)
        _check_widths(_numbers(format_spec))
        return spent.make(super().format_field(value, format_spec))


class _MarkupFormatter(_Formatter, SandboxedEscapeFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        spent = budget.get()
        spent.read(value)
        _check_widths(_numbers(format_spec))
        return spent.make(EscapeFormatter.format_field(self, value, format_spec))


class _Namespace(Namespace):
    """Jinja's `namespace`, without the names that lead to Python's internals, and without a look at its values."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may have a field named `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        budget.get().take(_ENTRY_BYTES * len(attributes))
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace must not have the name {name!r}")


def _make_dict(*arguments: Any, **values: Any) -> dict[Any, Any]:
    return dict(*arguments, **values)


def _range(*arguments: int) -> range:
    """As long as all the ranges together stay short: a loop in a loop makes a range each time."""
    numbers = range(*arguments)
    # Divided before `len`, which fails for the very long.
    budget.get().loop((numbers[-1] - numbers[0]) // numbers.step + 1 if numbers else 0)
    return numbers


# --- filters, tests and methods -------------------------------------------------------------------------------

_NO_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
"""They take time out of proportion, or give what nobody can repeat; no chat template needs them."""
_CHEAP_FILTERS = _words(
    "attr batch count d default first items last length list map reject rejectattr reverse select selectattr slice "
    "join sum tojson"
)
"""They look at little of what they are given, or count by themselves."""
_SLOW_FILTERS = _words("capitalize e escape forceescape indent title urlencode wordcount")
_CHEAP_TESTS = _words(
    "boolean callable defined divisibleby escaped even false filter float integer iterable mapping none number odd "
    "sameas sequence string test true undefined"
)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that keeps to the budget."""

    @wraps(function)  # with Jinja's mark of what comes first, which `args` then begins with
    def metered(*args: Any, **kwargs: Any) -> Any:
        spent = budget.get()
        if name in _CHEAP_FILTERS:
            spent.work(_STEP)
        else:
            args = _listed(args)
            spent.read(*args, *kwargs.values(), weight=_SLOW if name in _SLOW_FILTERS else 1)
        operands = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if operands:
            value, *rest = operands
            if isinstance(value, str):
                _expect_text(spent, name, value, tuple(rest), kwargs)
            if name in _WIDTHS:
                _check_widths((*rest, *kwargs.values()))
        return spent.make(function(*args, **kwargs))

    return metered


_WIDTHS = _words("batch center expandtabs indent ljust rjust round slice truncate zfill")
"""Filters and methods with a number that says how much they make."""


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """With lists for iterators, so that it can be told what is in them."""
    return tuple(budget.get().make(list(each)) if isinstance(each, Iterator) else each for each in args)


def _expect_text(
    spent: Budget, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Before a method or filter of a text makes more than it was given."""
    given = (*args, *kwargs.values())
    size = _text_bytes(text)
    match name:
        case "split" | "rsplit":
            separator = given[0] if given else None
            parts = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
            spent.expect(size + _ITEM_BYTES * parts)
        case "splitlines":
            spent.expect(size + _ITEM_BYTES * sum(map(text.count, _LINE_ENDS)))
        case "list" | "sort" | "unique" | "batch" | "slice" | "reverse" | "wordcount":
            spent.expect(_ITEM_BYTES * len(text))
        case "replace" if len(given) > 1:
            old, new = map(str, given[:2])
            spent.expect(size + 4 * text.count(old) * len(new))
        case "join" if given and isinstance(given[0], Iterable):
            (joined, *_) = given
            num = len(joined) if isinstance(joined, Collection) else 0
            spent.expect(spent.size(joined) + size * num)
        case "format":
            spent.expect(_percent_bytes(spent, text, given))
        case _ if name in _WIDTHS:
            widths = [each for each in given if isinstance(each, int)]
            _check_widths(widths)
            places = 1 + text.count("\t") + sum(map(text.count, _LINE_ENDS))
            texts = sum(_text_bytes(each) for each in given if isinstance(each, str))
            spent.expect(size + places * (4 * sum(map(abs, widths)) + texts))


def _numbers(text_format: str) -> list[int]:
    """All that can be a width in it; of a longer number, its first digits."""
    return [int(digits[:10]) for digits in re.findall(r"\d+", text_format)]


def _percent_bytes(spent: Budget, text: str, values: Any) -> int:
    """At most so many does `text % values` come to."""
    if "*" in text:
        raise TooMuchWork("pads a text to a width that it computes")
    widths = _numbers(text)
    _check_widths(widths)
    return _text_bytes(text) + 4 * sum(widths) + text.count("%") * spent.size(values)


@pass_eval_context
def _join(eval_ctx: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    spent = budget.get()
    if attribute is not None:
        value = map(filters.make_attrgetter(eval_ctx.environment, attribute), value)
    items = list(spent.make(iter(value)))
    spent.read(items, d)
    spent.expect(spent.size(items) + spent.size(d) * len(items))
    joined: str = filters.sync_do_join(eval_ctx, items, d)
    return joined


@pass_context
def _sum(context: Any, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    environment = context.environment
    if attribute is not None:
        iterable = map(filters.make_attrgetter(environment, attribute), iterable)
    for item in iterable:
        start = environment.call_binop(context, "+", start, item)
    return start


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` has it: characters stay as they are."""
    spent = budget.get()
    spent.read(value, indent, separators)
    separator_chars = sum(map(len, separators or ()))
    _check_widths((indent, separator_chars))
    spent.expect(spent.size(value) // _ITEM_BYTES * 4 * separator_chars)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces = []
    size = 0
    for piece in encoder.iterencode(value):
        size += _text_bytes(piece)
        spent.expect(size)
        pieces.append(piece)
    return "".join(pieces)


# --- code that calls back -------------------------------------------------------------------------------------


@pass_context
def _printed(context: Any, value: Any) -> Any:
    """What a template writes."""
    spent = budget.get()
    if isinstance(value, str):
        spent.take(_text_bytes(value))
        return value
    spent.read(value)
    spent.take(spent.size(value))
    return value


@pass_eval_context
def _concatenated(eval_ctx: nodes.EvalContext, *values: Any) -> str:
    spent = budget.get()
    spent.read(*values)
    spent.expect(sum(map(spent.size, values)))
    joined: str = spent.make(markup_join(values) if eval_ctx.autoescape else str_join(values))
    return joined


def _looked_at(value: Any) -> Any:
    budget.get().read(value)
    return value


def _made(value: Any) -> Any:
    spent = budget.get()
    spent.work(_STEP)
    if isinstance(value, dict):
        spent.read(*value)  # the keys were hashed
    return spent.make(value)


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    budget.get().work(_STEP)
    return budget.get().make(value[start:stop:step])


def _looped(value: Any) -> Any:
    """What a loop goes through; its test may drop any of it before the body counts."""
    spent = budget.get()
    if isinstance(value, Collection):
        spent.work(_STEP * len(value))
        return value
    return spent.make(iter(value)) if isinstance(value, Iterable) else value


def _ran(operations: int) -> None:
    """The body of a loop, macro or block with so many operations."""
    budget.get().work(_STEP + _NODE * operations)


_HOOKS: dict[str, Callable[..., Any]] = {
    # Names that no template can write.
    "(concatenated)": _concatenated,
    "(looked at)": _looked_at,
    "(made)": _made,
    "(sliced)": _sliced,
    "(looped)": _looped,
    "(ran)": _ran,
}


class _Metered(NodeTransformer):
    """Puts calls of the hooks where Jinja's code would do something at once."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _hook("(concatenated)", node.nodes[0], *node.nodes[1:])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        if searches or not any(isinstance(side, nodes.Const) for side in sides):
            node.expr = _hook("(looked at)", node.expr)
            for operand in node.ops:
                operand.expr = _hook("(looked at)", operand.expr)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _hook("(made)", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _hook("(made)", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _hook("(made)", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _hook("(sliced)", node.node, *(nodes.Const(None) if each is None else each for each in bounds))

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # As an expression, so that it is counted like other output.
        data = nodes.Const(node.data, lineno=node.lineno)
        return nodes.MarkSafeIfAutoescape(data, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        _count_body(node)
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _hook("(looped)", node.iter)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        _count_body(node)
        return self.generic_visit(node)

    visit_CallBlock = visit_Macro
    visit_Block = visit_Macro


def _hook(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _count_body(node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> None:
    operations = sum(1 for each in node.body for _ in each.find_all(nodes.Node))
    hook = _hook("(ran)", nodes.Const(operations, lineno=node.lineno))
    node.body.insert(0, nodes.ExprStmt(hook, lineno=node.lineno))
