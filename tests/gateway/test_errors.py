import pytest

from blend_engine.errors import ColdDocument, EngineUnavailable, InvalidBlendParams
from blend_gateway import errors
from blend_gateway.errors import (
    ERROR_SHAPES,
    DocumentCold,
    EngineNotReady,
    GatewayError,
    InvalidRequest,
    error_body,
    error_headers,
    shape_of,
)


def test_every_gateway_error_is_in_the_table() -> None:
    classes = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, GatewayError)
    }
    assert classes - set(ERROR_SHAPES) == {GatewayError}


@pytest.mark.parametrize("error_class", ERROR_SHAPES)
def test_every_error_says_type_and_code(error_class: type[Exception]) -> None:
    error = error_class.__new__(error_class)
    shape = shape_of(error)
    assert 400 <= shape.status < 600
    assert shape.type
    assert shape.code.replace("_", "").isalpha()


def test_the_body_is_openais() -> None:
    error = InvalidRequest("no", param="n", code="invalid_value")
    assert error_body(error) == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }


def test_what_nobody_foresaw_tells_nothing() -> None:
    body = error_body(RuntimeError("/etc/secret"))
    assert shape_of(RuntimeError()).status == 500
    assert "secret" not in str(body)


def test_engine_errors_are_in_the_table() -> None:
    assert shape_of(ColdDocument([0])).code == "document_cold"
    assert shape_of(InvalidBlendParams("x")).status == 400
    assert shape_of(EngineUnavailable("x")).status == 503
    assert "x-secret" not in str(error_body(EngineUnavailable("x-secret")))


def test_headers_say_whether_to_try_again() -> None:
    assert error_headers(DocumentCold("x")) == {"x-should-retry": "false"}
    assert error_headers(EngineNotReady("x")) == {"retry-after": "5"}
    assert error_headers(InvalidRequest("x")) == {}
