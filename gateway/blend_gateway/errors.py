"""Gateway errors, and the one table from an error to its HTTP status and OpenAI body.

    GatewayError
      InvalidRequest            the body, a field or a header is malformed
        UnsupportedField        known to OpenAI or vLLM, not served here
        ContextLengthExceeded   the prompt does not fit the model
      ModelNotFound             no such model is served
      DocumentNotFound          unknown here, or another tenant's
      RouteNotFound             no such path
      MethodNotAllowed          the path exists, the method does not
      BodyTooLarge              more bytes than the limit
      DocumentCold              strict mode met a document without KV
      TooManyDocuments          the tenant's registry is full
      Overloaded                the engine's queue is full
      EngineNotReady            the engine is still starting
      EngineDown                the engine died
      RequestFailed             the engine gave this request up

The engine's own errors (`blend_engine.errors`) are in the same table. Whatever is not in it is a
500 whose text tells the client nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from blend_engine.errors import (
    BlendClientError,
    BlendServerError,
    ColdDocument,
    EngineBusy,
    EngineUnavailable,
    InvalidGrammar,
)

CLIENT_ERROR = "invalid_request_error"
SERVER_ERROR = "server_error"


class GatewayError(Exception):
    """An error that is answered in OpenAI's shape.

    Args:
        message: What was wrong and what was expected; shown to the client.
        param: The request field it is about.
        code: Overrides the table's code where one class covers several cases.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(GatewayError):
    """The body, a field or a header is malformed."""


class UnsupportedField(InvalidRequest):
    """A field that OpenAI or vLLM knows and this server does not serve."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit the model's context."""


class ModelNotFound(GatewayError):
    """No model of that name is served."""


class DocumentNotFound(GatewayError):
    """The document is unknown to the caller's tenant."""


class RouteNotFound(GatewayError):
    """No such path."""


class MethodNotAllowed(GatewayError):
    """The path exists; the method does not."""


class BodyTooLarge(GatewayError):
    """The body has more bytes than the limit."""


class DocumentCold(GatewayError):
    """Strict mode asked for KV that is not resident."""


class TooManyDocuments(GatewayError):
    """The tenant has registered as many documents as it may."""


class Overloaded(GatewayError):
    """The engine's queue is full; nothing is wrong with the request."""


class EngineNotReady(GatewayError):
    """The engine is still starting."""


class EngineDown(GatewayError):
    """The engine died and waits for a restart."""


class RequestFailed(GatewayError):
    """The engine gave this request up; the next one may succeed."""


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How one class of errors looks over HTTP.

    Args:
        status: HTTP status.
        type: OpenAI's error type.
        code: OpenAI's error code, a string.
        retry_after_s: Sent as `Retry-After`.
        should_retry: Sent as `x-should-retry`, which the OpenAI clients obey.
    """

    status: int
    type: str
    code: str
    retry_after_s: int | None = None
    should_retry: bool | None = None


ERROR_SHAPES: Mapping[type[Exception], ErrorShape] = MappingProxyType(
    {
        InvalidRequest: ErrorShape(400, CLIENT_ERROR, "invalid_request"),
        UnsupportedField: ErrorShape(400, CLIENT_ERROR, "unsupported_parameter"),
        ContextLengthExceeded: ErrorShape(400, CLIENT_ERROR, "context_length_exceeded"),
        ModelNotFound: ErrorShape(404, CLIENT_ERROR, "model_not_found"),
        DocumentNotFound: ErrorShape(404, CLIENT_ERROR, "document_not_found"),
        RouteNotFound: ErrorShape(404, CLIENT_ERROR, "route_not_found"),
        MethodNotAllowed: ErrorShape(405, CLIENT_ERROR, "method_not_allowed"),
        BodyTooLarge: ErrorShape(413, CLIENT_ERROR, "body_too_large"),
        DocumentCold: ErrorShape(409, CLIENT_ERROR, "document_cold", should_retry=False),
        TooManyDocuments: ErrorShape(409, CLIENT_ERROR, "too_many_documents", should_retry=False),
        Overloaded: ErrorShape(503, SERVER_ERROR, "overloaded", retry_after_s=1),
        EngineNotReady: ErrorShape(503, SERVER_ERROR, "engine_not_ready", retry_after_s=5),
        EngineDown: ErrorShape(503, SERVER_ERROR, "engine_unavailable", retry_after_s=10),
        RequestFailed: ErrorShape(500, SERVER_ERROR, "request_failed"),
        BlendClientError: ErrorShape(400, CLIENT_ERROR, "invalid_request"),
        ColdDocument: ErrorShape(409, CLIENT_ERROR, "document_cold", should_retry=False),
        InvalidGrammar: ErrorShape(400, CLIENT_ERROR, "invalid_grammar"),
        BlendServerError: ErrorShape(500, SERVER_ERROR, "request_failed"),
        EngineUnavailable: ErrorShape(503, SERVER_ERROR, "engine_unavailable", retry_after_s=10),
        EngineBusy: ErrorShape(503, SERVER_ERROR, "overloaded", retry_after_s=1),
    }
)
UNFORESEEN = ErrorShape(500, SERVER_ERROR, "internal_error")


def shape_of(error: BaseException) -> ErrorShape:
    """The entry of the nearest class in the table; a 500 where there is none."""
    for cls in type(error).__mro__:
        if cls in ERROR_SHAPES:
            return ERROR_SHAPES[cls]
    return UNFORESEEN


def error_body(error: BaseException) -> dict[str, Any]:
    """OpenAI's ``{"error": {message, type, param, code}}``."""
    shape = shape_of(error)
    message, param, code = "The server failed to answer this request.", None, None
    if isinstance(error, GatewayError):
        message, param, code = error.message, error.param, error.code
    elif shape.status < 500:
        message = str(error)
    return {
        "error": {
            "message": message,
            "type": shape.type,
            "param": param,
            "code": code or shape.code,
        }
    }


def error_headers(error: BaseException) -> dict[str, str]:
    """`Retry-After` and `x-should-retry` where the table has them."""
    shape = shape_of(error)
    headers = {}
    if shape.retry_after_s is not None:
        headers["retry-after"] = str(shape.retry_after_s)
    if shape.should_retry is not None:
        headers["x-should-retry"] = "true" if shape.should_retry else "false"
    return headers
