"""What a server says about itself: models, health, version, metrics."""

from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from segue import __version__
from segue.errors import EngineDead
from segue.host.client import EngineState
from segue.server.shared.metrics import CONTENT_TYPE
from segue.server.shared.serving import Serving, serving_of
from segue.server.shared.sse import json_response


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "segue"
    root: str
    parent: str | None = None
    max_model_len: int
    """The longest prompt and answer together, in tokens."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(msgspec.Struct, frozen=True):
    engine: EngineState
    """While it is "restarting", requests are taken, and answered in a moment. While they are refused, there is an error
    in place of this."""


class Version(msgspec.Struct, frozen=True):
    version: str


async def list_models(request: Request) -> Response:
    serving = serving_of(request)
    return json_response(ModelList(data=[_model(serving, name) for name in serving.model_names]))


async def get_model(request: Request) -> Response:
    serving = serving_of(request)
    return json_response(_model(serving, serving.check_model(request.path_params["model"])))


async def health(request: Request) -> Response:
    """200 while requests are answered; 503 while the engine is started again, and when it is gone."""
    llm = serving_of(request).llm
    await llm.check_health()
    state = llm.engine_loop.state
    status = HTTPStatus.OK if state == "running" else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(msgspec.json.encode(Health(state)), status_code=status, media_type="application/json")


async def version(request: Request) -> Response:
    return json_response(Version(__version__))


async def metrics(request: Request) -> Response:
    serving = serving_of(request)
    try:
        stats = await serving.llm.stats()
    except EngineDead:
        stats = None
    return Response(serving.metrics.exposition(stats, serving.llm.config), media_type=CONTENT_TYPE)


def _model(serving: Serving, name: str) -> Model:
    return Model(
        id=name, created=serving.created, root=serving.model_name, max_model_len=serving.max_model_len
    )
