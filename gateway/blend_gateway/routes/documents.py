"""/v1/documents: register texts, see where their KV is, warm it again, remove it."""

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blend_gateway.body import read_json_object
from blend_gateway.documents import DocumentRegistry, Entry, RegisteredStatus
from blend_gateway.errors import InvalidRequest
from blend_gateway.registration import parse_registration
from blend_gateway.routes.chat import run_unless_disconnected
from blend_gateway.runtime import Runtime, runtime_of, tenant_of

_MAX_PAGE = 100
_DEFAULT_PAGE = 20


def add_routes(app: FastAPI) -> None:
    """Add the document routes."""
    path = "/v1/documents"
    app.add_api_route(path, register_documents, methods=["POST"])
    app.add_api_route(path, list_documents, methods=["GET"])
    app.add_api_route(f"{path}/{{document_id}}", get_document, methods=["GET"])
    app.add_api_route(f"{path}/{{document_id}}", delete_document, methods=["DELETE"])
    app.add_api_route(f"{path}/{{document_id}}/warm", warm_document, methods=["POST"])


async def register_documents(request: Request) -> Response:
    """Register one document, or several; 202 while a compile is on its way, 200 otherwise."""
    runtime = runtime_of(request)
    registry = runtime.require_service().documents
    limits = runtime.settings.limits
    seconds = _wait_seconds(request, runtime)
    body = await read_json_object(request, max_bytes=limits.body_bytes, max_depth=limits.json_depth)
    drafts, is_batch = parse_registration(body, limits)
    tenant = tenant_of(request)
    entries = [await registry.register(tenant, draft) for draft in drafts]
    await run_unless_disconnected(request, registry.wait(entries, seconds))
    shown = [_shown(registry, entry) for entry in entries]
    content = {"object": "list", "data": shown} if is_batch else shown[0]
    return JSONResponse(content, status_code=_status_code(entries))


async def list_documents(request: Request) -> Response:
    """List the tenant's documents, newest first unless `order=asc`."""
    registry = runtime_of(request).require_service().documents
    query = request.query_params
    page = registry.page(
        tenant_of(request),
        limit=_limit(query.get("limit")),
        after=query.get("after"),
        newest_first=_one_of(query, "order", ("desc", "asc")) != "asc",
        status=_status(query),
    )
    data = [_shown(registry, entry) for entry in page.entries]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": page.has_more,
        }
    )


async def get_document(request: Request, document_id: str) -> Response:
    """Describe one document; its text is never shown."""
    registry = runtime_of(request).require_service().documents
    return JSONResponse(_shown(registry, registry.get(tenant_of(request), document_id)))


async def delete_document(request: Request, document_id: str) -> Response:
    """Remove a document and its KV; answered when both are gone."""
    registry = runtime_of(request).require_service().documents
    await registry.delete(tenant_of(request), document_id)
    return JSONResponse({"id": document_id, "object": "document.deleted", "deleted": True})


async def warm_document(request: Request, document_id: str) -> Response:
    """Make a document's KV again, for example after eviction."""
    runtime = runtime_of(request)
    registry = runtime.require_service().documents
    seconds = _wait_seconds(request, runtime)
    entry = registry.warm(tenant_of(request), document_id)
    await run_unless_disconnected(request, registry.wait([entry], seconds))
    return JSONResponse(_shown(registry, entry), status_code=_status_code([entry]))


def _shown(registry: DocumentRegistry, entry: Entry) -> dict[str, Any]:
    status = registry.status(entry)
    failure = entry.failure if status is RegisteredStatus.FAILED else None
    return {
        "id": entry.id,
        "object": "document",
        "created_at": entry.created_at,
        "title": entry.draft.title,
        "label": entry.draft.label,
        "bytes": len(entry.draft.text.encode()),
        "tokens": entry.num_tokens,
        "metadata": dict(entry.draft.metadata),
        "status": str(status),
        "last_error": failure and {"code": failure.code, "message": failure.message},
    }


def _status_code(entries: list[Entry]) -> int:
    return 202 if any(entry.is_pending for entry in entries) else 200


def _wait_seconds(request: Request, runtime: Runtime) -> float:
    value = request.query_params.get("wait")
    if value is None:
        return 0.0
    most = runtime.settings.limits.wait_s
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= most:
        raise InvalidRequest(
            f"`wait` must be a number of seconds in [0, {most:g}], got {value[:64]!r}",
            param="wait",
            code="invalid_value",
        )
    return seconds


def _limit(value: str | None) -> int:
    if value is None:
        return _DEFAULT_PAGE
    limit = int(value) if value.isascii() and value.isdecimal() and len(value) < 8 else 0
    if not 1 <= limit <= _MAX_PAGE:
        raise InvalidRequest(
            f"`limit` must be an integer in [1, {_MAX_PAGE}], got {value[:64]!r}",
            param="limit",
            code="invalid_value",
        )
    return limit


def _status(query: Mapping[str, str]) -> RegisteredStatus | None:
    value = _one_of(query, "status", tuple(RegisteredStatus))
    return None if value is None else RegisteredStatus(value)


def _one_of(query: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    value = query.get(name)
    if value is not None and value not in allowed:
        raise InvalidRequest(
            f"`{name}` must be one of {', '.join(allowed)}, got {value[:64]!r}",
            param=name,
            code="invalid_value",
        )
    return value
