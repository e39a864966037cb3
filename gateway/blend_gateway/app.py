"""The composition root: the only place where the gateway's parts are wired together."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from blend_engine.errors import BlendError
from blend_gateway.documents import DocumentRegistry
from blend_gateway.errors import (
    GatewayError,
    MethodNotAllowed,
    RouteNotFound,
    error_body,
    error_headers,
    shape_of,
)
from blend_gateway.middleware import RequestContext
from blend_gateway.ports import ChatBackend
from blend_gateway.routes import chat, documents, service
from blend_gateway.runtime import Runtime, Service
from blend_gateway.settings import Settings
from blend_gateway.telemetry import EngineView, Metrics

_log = logging.getLogger(__name__)

StartBackend = Callable[[Metrics], Awaitable[ChatBackend]]
"""Starts the engine; awaited in the background, so probes answer meanwhile."""


def create_app(
    settings: Settings,
    start_backend: StartBackend,
    *,
    on_fatal: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Wire the application.

    Args:
        settings: The gateway's settings.
        start_backend: Makes the backend when the server starts.
        on_fatal: Called when that failed; the server should stop.
    """
    runtime = Runtime(settings=settings, metrics=Metrics())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None, None]:
        starting = asyncio.create_task(_start(runtime, start_backend, on_fatal))
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.wait((starting,))
            await _stop(runtime)

    app = FastAPI(
        title="Blendgate",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.runtime = runtime
    for routes in (chat, documents, service):
        routes.add_routes(app)
    _add_error_handlers(app)
    app.add_middleware(RequestContext, metrics=runtime.metrics)
    return app


async def _start(
    runtime: Runtime, start_backend: StartBackend, on_fatal: Callable[[], None]
) -> None:
    try:
        backend = await start_backend(runtime.metrics)
    except Exception as error:  # noqa: BLE001 - whatever it is, the server cannot serve
        _log.exception("the engine failed to start")
        runtime.failure = error
        runtime.started.set()
        on_fatal()
        return
    registry = DocumentRegistry(
        backend.engine,
        backend.encode_document,
        max_documents=runtime.settings.limits.registered_documents,
        on_compiled=runtime.metrics.warm_seconds.observe,
    )
    runtime.metrics.watch(
        EngineView(
            store=backend.engine.store_stats,
            compile_queue_depth=lambda: backend.engine.compile_queue_depth,
            documents=registry.count_by_status,
            is_supported=lambda: backend.engine.unsupported_reason is None,
        )
    )
    runtime.service = Service(backend=backend, documents=registry)
    runtime.started.set()
    reason = backend.engine.unsupported_reason
    if reason is not None:
        _log.warning("this model is served without blending: %s", reason)
    _log.info("ready")


async def _stop(runtime: Runtime) -> None:
    if runtime.service is not None:
        await runtime.service.documents.close()
        runtime.service.backend.close()


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(GatewayError, _answer_error)
    app.add_exception_handler(BlendError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)


async def _answer_error(request: Request, error: Exception) -> Response:
    body = error_body(error)
    request.app.state.runtime.metrics.rejections.labels(body["error"]["code"]).inc()
    return JSONResponse(body, status_code=shape_of(error).status, headers=error_headers(error))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such path, or not by that method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:128]
    if error.status_code == 405:
        refusal: GatewayError = MethodNotAllowed(f"{request.method} is not allowed on {path}")
        response = await _answer_error(request, refusal)
        response.headers["allow"] = ", ".join(_allowed_methods(request))
        return response
    if error.status_code == 404:
        return await _answer_error(request, RouteNotFound(f"there is no {path}"))
    raise error


def _allowed_methods(request: Request) -> list[str]:
    """Every method of the path; Starlette names those of the first matching route only."""
    methods: set[str] = set()
    for route in request.app.router.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    """The client is gone; the status is for the log."""
    return Response(status_code=499)
