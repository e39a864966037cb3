"""Pure ASGI middleware: request ids, counting, and the last resort for errors.

Pure, because Starlette's `BaseHTTPMiddleware` stands between a stream and its client's disconnect.
"""

import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blend_gateway.errors import error_body
from blend_gateway.telemetry import Metrics

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_UNROUTED = "unrouted"


class RequestContext:
    """Echoes or makes `X-Request-Id`, counts requests, and answers what nothing else answered.

    The id is for the client and the log. The engine never sees it, so two clients cannot collide.

    Args:
        app: The next application.
        metrics: Where requests are counted.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 499  # the client left before there was an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self._metrics.inflight.inc()
        try:
            await self._answer(scope, receive, send_with_id, lambda: status != 499)
        finally:
            self._metrics.inflight.dec()
            self._metrics.requests.labels(_route(scope), str(status)).inc()

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Callable[[Message], Awaitable[None]],
        has_started: Callable[[], bool],
    ) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            _log.exception("request %s failed", scope["state"]["request_id"])
            if has_started():
                raise
            await JSONResponse(error_body(error), status_code=500)(scope, receive, send)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            sent: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(sent):
                return sent
            break
    return f"req_{uuid.uuid4().hex}"


def _route(scope: Scope) -> str:
    """The route's template, never the path a client chose."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else _UNROUTED
