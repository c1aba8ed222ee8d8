"""Errors as OpenAI's clients expect them: every one that the server sends is made here."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from segue.errors import CapacityError, EngineDead, ParameterError, SegueError, UsageError
from segue.server.shared import request_id

log = logging.getLogger("segue.server")


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    """The field of the request that is wrong."""
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    """What every error looks like."""

    error: ErrorObject


class HttpError(UsageError):
    """What only HTTP knows to be wrong: the path, the key, the form of the body."""

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def error_of(error: Exception) -> tuple[HTTPStatus, ErrorResponse]:
    """The status and the body for an error. What is no SegueError is logged, and not shown."""
    match error:
        case HttpError():
            status, param, code = error.status, error.param, error.code
        case ParameterError():
            status, param, code = HTTPStatus.BAD_REQUEST, error.parameter, None
        case CapacityError():
            status, param, code = HTTPStatus.BAD_REQUEST, None, "context_length_exceeded"
        case UsageError():
            status, param, code = HTTPStatus.BAD_REQUEST, None, None
        case EngineDead():
            status, param, code = HTTPStatus.SERVICE_UNAVAILABLE, None, "engine_unavailable"
        case _:
            status, param, code = HTTPStatus.INTERNAL_SERVER_ERROR, None, None
    if isinstance(error, SegueError):
        message = str(error)
    else:
        log.error("internal error in %s", request_id.current() or "a session", exc_info=error)
        message = "internal error; the server's log has it"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return status, ErrorResponse(ErrorObject(message=message, type=kind, param=param, code=code))


def error_response(error: Exception) -> Response:
    """The answer to a request that fails before anything of it was answered."""
    status, body = error_of(error)
    headers = error.headers if isinstance(error, HttpError) else None
    return Response(
        msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers
    )


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of exceptions."""
    return error_response(error)


async def on_not_found(request: Request, error: Exception) -> Response:
    return error_response(
        HttpError(f"Invalid URL ({request.method} {request.url.path})", status=HTTPStatus.NOT_FOUND)
    )


async def on_wrong_method(request: Request, error: Exception) -> Response:
    message = (
        f"Not allowed to {request.method} on {request.url.path}. "
        "(HINT: Perhaps you meant to use a different HTTP method?)"
    )
    allowed = getattr(error, "headers", None)
    return error_response(
        HttpError(message, status=HTTPStatus.METHOD_NOT_ALLOWED, code="method_not_supported", headers=allowed)
    )


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about these parameters (keys) name the request's field (values) instead."""
    try:
        yield
    except ParameterError as error:
        name = names.get(error.parameter)
        if name is None:
            raise
        raise ParameterError(name, error.value, error.why) from None
