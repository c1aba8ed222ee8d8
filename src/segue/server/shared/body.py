"""A request's body: JSON within a size, as a struct. Fields that are not known are ignored and logged.

A field that is null is a field that was left out, in every object that has declared fields, however deep: see
`read_fields`, through which all that clients send becomes a struct.
"""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import Any, ClassVar, TypeVar, overload

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from segue.errors import ParameterError
from segue.server.shared.http_errors import HttpError
from segue.server.shared.serving import serving_of

_AT = re.compile(r"^(?P<why>.*) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_SHOWN_CHARS = 60


class Unsupported(msgspec.Struct, frozen=True):
    """A field of OpenAI's or vLLM's that is taken only where it asks for nothing."""

    why: str
    neutral: tuple[object, ...] = ()
    """Beside null."""


class RequestBody(msgspec.Struct, kw_only=True):
    """Base of the bodies."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Known, and without a meaning here."""


Body = TypeVar("Body", bound=RequestBody)
Fields = TypeVar("Fields")
_ANYTHING = inspect.AnyType()


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body as a struct. Raises HttpError or ParameterError."""
    fields = await _read_json(request)
    if not isinstance(fields, dict):
        raise HttpError("the body must be a JSON object")
    for name, rule in kind.unsupported.items():
        value = fields.get(name)
        if value is not None and value not in rule.neutral:
            raise ParameterError(name, _shown(value), rule.why)
    known = set(kind.__struct_encode_fields__) | kind.ignored | set(kind.unsupported)
    for name in fields:
        if name not in known:
            unknown = ascii(name)[:_SHOWN_CHARS]
            serving_of(request).warn_once(f"{kind.__name__}: ignored the unknown field {unknown}")
    return read_fields(fields, kind)


@overload
def read_fields(value: object, kind: type[Fields]) -> Fields: ...
@overload
def read_fields(value: object, kind: Any) -> Any: ...
def read_fields(value: object, kind: Any) -> Any:
    """What was read from JSON, as a struct (or one of a union of structs).

    null is taken as absent wherever the type declares fields or the type of an object's values. What it does not
    declare (JSON schemas, `chat_template_kwargs`, messages) is kept as it is, since null may mean something there.
    Raises HttpError, with the field that is wrong.
    """
    try:
        with _without_gc():
            return msgspec.convert(_without_nulls(value, _type_of(kind)), kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except RecursionError:
        raise HttpError("the body is nested too deeply") from None


@cache
def _type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _without_nulls(value: object, kind: inspect.Type) -> object:
    if isinstance(kind, inspect.Metadata):
        return _without_nulls(value, kind.type)
    options = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, list):
        items = next((each.item_type for each in options if isinstance(each, inspect.ListType)), None)
        if items is None:
            return value
        return [_without_nulls(item, items) if isinstance(item, list | dict) else item for item in value]
    if not isinstance(value, dict):
        return value
    match _object_type(value, options):
        case None | inspect.DictType(value_type=inspect.AnyType() | inspect.CustomType()):
            return value
        case inspect.DictType(value_type=declared):
            types: Mapping[str, inspect.Type] = dict.fromkeys(value, declared)
        case inspect.StructType(fields=fields):
            types = {field.encode_name: field.type for field in fields}
    return {
        name: _without_nulls(item, types.get(name, _ANYTHING))
        for name, item in value.items()
        if item is not None
    }


def _object_type(
    value: Mapping[str, object], options: Sequence[inspect.Type]
) -> inspect.StructType | inspect.DictType | None:
    """Which of these an object is read as: of several structs, the one that its tag names."""
    for option in options:
        match option:
            case inspect.DictType():
                return option
            case inspect.StructType() if (
                option.tag_field is None or value.get(option.tag_field) == option.tag
            ):
                return option
    return None


async def _read_json(request: Request) -> object:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(
            "the body must be JSON: send it with Content-Type: application/json",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    try:
        data = await _read_bytes(request)
        with _without_gc():
            return msgspec.json.decode(data)
    except RecursionError:
        raise HttpError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(f"the body is not valid JSON: {error}") from None


@contextmanager
def _without_gc() -> Iterator[None]:
    """A million small lists are made at once, none of them garbage: looking for it would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def _read_bytes(request: Request) -> bytes:
    limit = serving_of(request).options.max_request_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise HttpError("the body is not complete") from None
    return b"".join(parts)


def _too_large(limit: int) -> HttpError:
    return HttpError(
        f"the body has more than {limit} bytes; --max-request-bytes raises the limit",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        headers={"connection": "close"},
    )


def _validation_error(message: str) -> HttpError:
    """What msgspec says, with the field where OpenAI's clients look for it."""
    path, why = "", message
    if (found := _AT.match(message)) is not None:
        path, why = found["path"], found["why"]
    if (missing := _MISSING.match(why)) is not None:
        path = f"{path}.{missing['name']}".lstrip(".")
        return HttpError(f"{path}: is required", param=path, code="missing_required_parameter")
    return HttpError(f"{path}: {why}" if path else why, param=path or None, code="invalid_type")


def _shown(value: object) -> object:
    """What can be repeated in a message of one line."""
    text = repr(value)
    return value if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
