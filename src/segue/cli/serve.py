"""`segue serve`: an HTTP server. The model loads while the server's modules are imported."""

import importlib.util
from concurrent.futures import Future
from threading import Thread

from segue.args import EngineArgs
from segue.errors import UsageError
from segue.llm.async_llm import AsyncLLM
from segue.server.ops.listen import bind, check_tls
from segue.server.shared.options import ServerOptions

NEEDS = ("starlette", "uvicorn", "prometheus_client")
"""Of the extra "server"."""


def serve(args: EngineArgs, options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'segue serve needs {", ".join(missing)}: pip install "segue[server]"')
    check_tls(options)
    listener = bind(options)
    try:
        loading = _load(args)
        from segue.server.run import run_server

        llm = loading.result()
        try:
            run_server(llm, args.model, options, listener)
        finally:
            llm.shutdown()
    finally:
        listener.close()


def _load(args: EngineArgs) -> "Future[AsyncLLM]":
    """Begins to load the model."""
    loading: Future[AsyncLLM] = Future()

    def load() -> None:
        try:
            loading.set_result(AsyncLLM(args))
        except BaseException as error:
            loading.set_exception(error)

    Thread(target=load, name="segue-load", daemon=True).start()
    return loading
