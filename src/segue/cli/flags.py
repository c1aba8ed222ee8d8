"""Flags that are an option struct's fields: name, type and default are the field's, the help is what stands below it.

A command takes a struct's options as one parameter, `Annotated[Options, FlagsOf(SomeStruct)]`; `add_command` puts the
flags in its place:

    name       the field's; of several values in the singular (`api_keys` is --api-key); seconds without their `_s`
    several    a field of a sequence is a flag that may be repeated
    help       the first paragraph of the field's docstring, with the names of other fields as their flags
    default    the field's; where that is empty, what the paragraph says after "None:"

`Flag` says what is otherwise. A field that neither covers is a TypeError when the command is defined.
"""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

Action = Callable[[], None]
Options = dict[str, Any]
"""Those fields of a struct that are not what they are by default."""


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """What a flag has that its field does not tell."""

    name: str | None = None
    """As typed: "-n", or "--on/--off"."""
    metavar: str | None = None
    envvar: str | None = None
    default: object = msgspec.UNSET
    """The command's own."""
    type: Any = None
    """What is typed."""
    parse: Callable[[str, Any], object] | None = None
    """Makes the field's value of it, told the field's name for errors."""
    note: str = ""
    """What the command adds to the help."""


class FlagsOf:
    """The flags of a struct: of its fields in `only`, or of all but those `without`. Fields that have no default are
    no options."""

    def __init__(
        self,
        struct: type[msgspec.Struct],
        exceptions: Mapping[str, Flag] = MappingProxyType({}),
        *,
        only: Collection[str] = (),
        without: Collection[str] = (),
    ) -> None:
        unknown = {*exceptions, *only, *without}.difference(struct.__struct_fields__)
        assert not unknown, f"{struct.__name__} has no {unknown}"
        self.flags = [
            FieldFlag(struct, field, exceptions.get(field.name, Flag()))
            for field in msgspec.structs.fields(struct)
            if not field.required and (field.name in only if only else field.name not in without)
        ]

    def take(self, typed: dict[str, Any]) -> Options:
        """What the parser found, out of `typed`. Raises ParameterError for what cannot be parsed."""
        values = [(flag.field, flag.value(typed.pop(flag.field.name))) for flag in self.flags]
        return {field.name: value for field, value in values if value != field.default}


class FieldFlag:
    """The flag of one field."""

    def __init__(
        self, struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo, exceptions: Flag
    ) -> None:
        self.field = field
        self._struct = struct
        self._exceptions = exceptions
        self._type = exceptions.type or _type(struct, field)
        default = field.default if exceptions.default is msgspec.UNSET else exceptions.default
        self._default = None if default == () else default

    @property
    def parameter(self) -> inspect.Parameter:
        """Of the function that the parser calls."""
        name = self._exceptions.name or self._name
        option = typer.Option(
            *([] if name is None else [name]),
            metavar=self._exceptions.metavar or ("SECONDS" if self.field.name.endswith("_s") else None),
            envvar=self._exceptions.envvar,
            show_default=self._default is not None,
        )
        return inspect.Parameter(
            self.field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self._default,
            annotation=Annotated[self._type if self._default is not None else self._type | None, option],
        )

    @property
    def _name(self) -> str | None:
        """None for a switch: the parser names it, and its opposite."""
        if self._type is bool:
            return None
        words = self.field.name.removesuffix("s" if self._is_several else "_s")
        return f"--{words.replace('_', '-')}"

    @property
    def _is_several(self) -> bool:
        return get_origin(self._type) is list

    def value(self, typed: Any) -> object:
        """The field's."""
        if typed is None:
            return self.field.default
        if self._exceptions.parse is not None:
            return self._exceptions.parse(self.field.name, typed)
        return tuple(typed) if self._is_several else typed

    def explain(self, option: TyperOption, names: Mapping[str, str]) -> None:
        """Gives the option its help. `names` says how the command's parameters are typed."""
        text, _, none = _first_paragraph(self._struct, self.field.name, names).partition("None: ")
        repeated = "May be repeated." if self._is_several else ""
        option.help = " ".join(filter(None, (text.strip(), self._exceptions.note, repeated)))
        if none and self._default is None:
            option.show_default = none.removesuffix(".")


def _type(struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> Any:
    """What a user types: one value, or a list."""
    is_union = get_origin(field.type) in (Union, UnionType)
    types = [each for each in get_args(field.type) if each is not NoneType] if is_union else [field.type]
    for each in types:
        if get_origin(each) in (tuple, Sequence):
            return list[get_args(each)[0]]  # type: ignore[misc]
    if len(types) == 1 and (types[0] in (bool, int, float, str) or get_origin(types[0]) is Literal):
        return types[0]
    raise TypeError(f"{struct.__name__}.{field.name} is no flag by itself: name its type and how to parse it")


# --- help -----------------------------------------------------------------------------------------------------


def _first_paragraph(struct: type[msgspec.Struct], field: str, names: Mapping[str, str]) -> str:
    """On one line, with the names of parameters as they are typed."""
    paragraph = " ".join(field_docs(struct).get(field, "").split("\n\n")[0].split())
    return re.sub("`(.+?)`", lambda quoted: names.get(quoted[1], quoted[1]), paragraph)


@functools.cache
def field_docs(struct: type[msgspec.Struct]) -> Mapping[str, str]:
    """The string below each field in the source; nothing where there is no source."""
    try:
        source = inspect.getsource(sys.modules[struct.__module__])
    except OSError:
        return {}
    docs: dict[str, str] = {}
    for definition in ast.parse(source).body:
        if isinstance(definition, ast.ClassDef) and definition.name == struct.__name__:
            for pair in pairwise(definition.body):
                match pair:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        docs[name] = inspect.cleandoc(text)
    return docs


# --- commands -------------------------------------------------------------------------------------------------


def add_command(
    app: typer.Typer, *, epilog: str | None = None
) -> Callable[[Callable[..., Action]], Callable[..., Action]]:
    """Makes a function a command, with flags in place of its parameters that are `Options`."""

    def add(function: Callable[..., Action]) -> Callable[..., Action]:
        signature = inspect.signature(function)
        sources = {name: _flags_of(each.annotation) for name, each in signature.parameters.items()}

        @functools.wraps(function)
        def parsed(**typed: Any) -> Action:
            taken = {name: source.take(typed) for name, source in sources.items() if source is not None}
            return function(**typed, **taken)

        parameters: list[inspect.Parameter] = []
        flags: dict[str, FieldFlag] = {}
        for name, source in sources.items():
            if source is None:
                parameters.append(signature.parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY))
            else:
                parameters += [flag.parameter for flag in source.flags]
                flags |= {flag.field.name: flag for flag in source.flags}
        parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

        class Command(TyperCommand):
            """Finds the help of its flags when it is to be shown: to read sources takes a while."""

            def format_options(self, *args: Any, **kwargs: Any) -> None:
                names = {each.name: _as_typed(each) for each in self.params if each.name is not None}
                for option in self.params:
                    if isinstance(option, TyperOption) and option.name in flags:
                        flags[option.name].explain(option, names)
                super().format_options(*args, **kwargs)

        app.command(cls=Command, epilog=epilog)(parsed)
        return function

    return add


def _flags_of(annotation: Any) -> FlagsOf | None:
    return next((each for each in get_args(annotation) if isinstance(each, FlagsOf)), None)


def _as_typed(parameter: Any) -> str:
    if isinstance(parameter, TyperArgument):
        return parameter.metavar or parameter.name.upper()
    return str(parameter.opts[0])
