"""POST /v1/chat/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from blend_gateway.body import read_json_object
from blend_gateway.ports import Completion, EventStream
from blend_gateway.protocol import ChatCall, parse_chat
from blend_gateway.runtime import runtime_of, tenant_of

WARNING_HEADER = "x-blendgate-warning"
_Result = TypeVar("_Result")


def add_routes(app: FastAPI) -> None:
    """Add the chat route."""
    app.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"])


async def create_chat_completion(request: Request) -> Response:
    """Answer a chat, with documents whose KV is reused wherever they stand."""
    runtime = runtime_of(request)
    service = runtime.require_service()
    limits = runtime.settings.limits
    body = await read_json_object(request, max_bytes=limits.body_bytes, max_depth=limits.json_depth)
    arrived = time.perf_counter()
    tenant = tenant_of(request)
    call = parse_chat(body, request.headers, tenant=tenant, limits=limits)
    answer = await run_unless_disconnected(
        request, service.backend.chat(call, service.documents.resolver(tenant))
    )
    runtime.metrics.count_outcome(call.blend.mode, answer.outcome)
    headers = _headers(call, answer)
    if isinstance(answer, Completion):
        return JSONResponse(answer.body, headers=headers)
    runtime.metrics.observe_first_token(answer.outcome, time.perf_counter() - arrived)
    return EventStreamResponse(answer.events, headers=headers)


class EventStreamResponse(StreamingResponse):
    """Server-sent events, closed when the response ends, however it ends.

    Starlette leaves that to the garbage collector; the engine must stop when its reader is gone.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], headers: Mapping[str, str]) -> None:
        super().__init__(events, headers=headers)
        self._events = events

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def run_unless_disconnected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await `work`, cancelling it when the client goes away. The body must have been read.

    Raises:
        ClientDisconnect: The client went away first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            # Whatever it ends with, nobody is left to read it.
            await asyncio.gather(task, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _headers(call: ChatCall, answer: Completion | EventStream) -> dict[str, str]:
    headers = {}
    if call.warning is not None:
        headers[WARNING_HEADER] = call.warning
    if call.num_documents and call.blend.reports:
        headers |= answer.outcome.headers
    if isinstance(answer, EventStream):
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return headers
