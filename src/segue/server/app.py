"""The ASGI application: every path, and what all requests pass through.

CORS → request id, count, log → where it comes from → key → errors → endpoint
"""

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from segue.server.api.chat import ChatChunk, ChatCompletion, ChatRequest, create_chat_completion
from segue.server.api.completions import Completion, CompletionRequest, create_completion
from segue.server.api.docs import docs_page
from segue.server.api.openapi import Endpoint, openapi_json
from segue.server.api.response_objects import AnyEvent, ResponseObject
from segue.server.api.response_request import ResponsesRequest
from segue.server.api.responses import create_response
from segue.server.api.stored_items import StoredItems
from segue.server.api.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    detokenize,
    tokenize,
)
from segue.server.ops.access import KeyCheck, PlaceCheck, RequestLog
from segue.server.ops.info import (
    Health,
    Model,
    ModelList,
    Version,
    get_model,
    health,
    list_models,
    metrics,
    version,
)
from segue.server.shared.http_errors import error_response, on_not_found, on_wrong_method
from segue.server.shared.serving import Serving
from segue.server.shared.sse import CLIENT_CLOSED_REQUEST

Handler = Callable[[Request], Awaitable[Response]]

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation",
        body=ChatRequest,
        answer=ChatCompletion,
        chunk=ChatChunk,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        create_completion,
        "Continue a prompt",
        body=CompletionRequest,
        answer=Completion,
        chunk=Completion,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        create_response,
        "Answer a conversation, in OpenAI's newer form",
        body=ResponsesRequest,
        answer=ResponseObject,
        chunk=AnyEvent,
    ),
    Endpoint("GET", "/v1/models", list_models, "The models that are served", answer=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", get_model, "One of them", answer=Model),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize,
        "A text or a conversation as token ids",
        body=TokenizeRequest,
        answer=TokenizeResponse,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        detokenize,
        "Token ids as a text",
        body=DetokenizeRequest,
        answer=DetokenizeResponse,
    ),
    Endpoint("GET", "/health", health, "200 while requests are answered", answer=Health),
    Endpoint("GET", "/version", version, "The version of Segue", answer=Version),
    Endpoint("GET", "/metrics", metrics, "Numbers for Prometheus", media_type="text/plain"),
)


def create_app(serving: Serving, *, more_routes: tuple[BaseRoute, ...] = ()) -> Starlette:
    """`more_routes` are what is not OpenAI's HTTP API: WebSockets, pages."""
    routes: list[BaseRoute] = [
        Route(endpoint.path, partial(_answer, endpoint.handler), methods=[endpoint.method])
        for endpoint in ENDPOINTS
    ]
    routes += [
        Route("/openapi.json", partial(_answer, _openapi)),
        Route("/docs", partial(_answer, _docs)),
    ]
    app = Starlette(
        routes=[*routes, *more_routes], exception_handlers={404: on_not_found, 405: on_wrong_method}
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    app.state.stored_items = StoredItems()
    options = serving.options
    if options.api_keys:
        app.add_middleware(KeyCheck, keys=options.api_keys)
    app.add_middleware(PlaceCheck, options=options)
    app.add_middleware(RequestLog, metrics=serving.metrics, router=app.router, tells=options.access_log)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


async def _answer(handler: Handler, request: Request) -> Response:
    """What the handler answers, or the error that it raises."""
    try:
        return await handler(request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:
        return error_response(error)


async def _openapi(request: Request) -> Response:
    return Response(openapi_json(ENDPOINTS), media_type="application/json")


async def _docs(request: Request) -> Response:
    return HTMLResponse(docs_page(openapi_json(ENDPOINTS)))
