"""vLLM's exceptions and error responses, as the gateway's errors."""

from typing import Any

from jinja2 import TemplateError as JinjaError
from vllm.entrypoints.serve.engine.protocol import ErrorInfo
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMNotFoundError,
    VLLMServerError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError

from blend_engine.errors import BlendError
from blend_gateway.assembler.errors import AssemblyError
from blend_gateway.errors import (
    ContextLengthExceeded,
    DocumentNotFound,
    EngineDown,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestFailed,
)
from blend_gateway.fields import SERVED_FIELDS

_LENGTH_PARAMETERS = ("input_tokens", "input_text")
_LENGTH_PHRASE = "maximum context length"


def translate(error: Exception) -> Exception:
    """The gateway's error for what vLLM or the assembler raised; others come back as they are."""
    if isinstance(error, GatewayError | BlendError):
        return error
    if isinstance(error, AssemblyError):
        return _from_assembly(error)
    if isinstance(error, VLLMValidationError | VLLMUnprocessableEntityError):
        return _from_validation(str(error.args[0]), error.parameter)
    if isinstance(error, VLLMNotFoundError):
        return ModelNotFound(str(error), param="model")
    if isinstance(error, GracefulHTTPError | RetryableRequestError):
        return Overloaded(str(error))
    if isinstance(error, EngineDeadError):
        return EngineDown("the engine died; the server needs a restart")
    if isinstance(error, GenerationError | VLLMServerError):
        return RequestFailed("the engine failed to answer this request")
    # vLLM raises bare ValueErrors for some bad fields, and Jinja errors for templates that refuse
    # the messages; it answers all of them with a 400, too.
    if isinstance(error, VLLMClientError | ValueError | JinjaError | NotImplementedError):
        return _from_validation(str(error), None)
    return error


def from_error_info(info: ErrorInfo) -> GatewayError:
    """The gateway's error for an error response that vLLM made."""
    if info.code == 404:
        return ModelNotFound(info.message, param=info.param or "model")
    if info.code == 503:
        return Overloaded(info.message)
    if info.code >= 500:
        return RequestFailed("the engine failed to answer this request")
    return _from_validation(info.message, info.param)


def from_error_event(body: dict[str, Any]) -> GatewayError:
    """The gateway's error for the body of an error event that vLLM put into a stream."""
    return from_error_info(ErrorInfo.model_validate(body["error"]))


def _from_assembly(error: AssemblyError) -> GatewayError:
    if error.code == "document_not_found":
        return DocumentNotFound(error.message, param=error.param)
    return InvalidRequest(error.message, param=error.param, code=error.code)


def _from_validation(message: str, param: str | None) -> InvalidRequest:
    if param in _LENGTH_PARAMETERS or _LENGTH_PHRASE in message:
        return ContextLengthExceeded(message, param="messages")
    # vLLM mostly names the field first; it does not always fill `parameter`.
    first_word = message.partition(" ")[0].strip("`")
    if param is None and first_word in SERVED_FIELDS:
        param = first_word
    return InvalidRequest(message, param=param, code="invalid_value")
