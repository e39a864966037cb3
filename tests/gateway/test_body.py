import contextlib

import pytest
from hypothesis import given, strategies as st

from blend_gateway.body import check_content_type, parse_json_object
from blend_gateway.errors import InvalidRequest


def parse(raw: bytes) -> dict[str, object]:
    return parse_json_object(raw, max_depth=8)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"nonsense", id="no-json"),
        pytest.param(b"[]", id="array"),
        pytest.param(b"null", id="null"),
        pytest.param(b'"text"', id="string"),
        pytest.param(b'{"a": NaN}', id="nan"),
        pytest.param(b'{"a": -Infinity}', id="infinity"),
        pytest.param(b'{"a": 1e999}', id="float-overflow"),
        pytest.param(b'{"a": ' + b"9" * 30 + b"}", id="int-overflow"),
        pytest.param(b'{"a": ' + b"9" * 9999 + b"}", id="int-without-end"),
        pytest.param(b'{"a": 9223372036854775808}', id="int64-plus-one"),
        pytest.param(b'{"a": "\\ud800"}', id="lone-surrogate"),
        pytest.param(b'{"\\udfff": 1}', id="lone-surrogate-in-a-key"),
        pytest.param(b'{"a": "\xff"}', id="not-utf8"),
        pytest.param("{}".encode("utf-16"), id="utf-16"),
        pytest.param(b'{"a": ' + b"[" * 9 + b"]" * 9 + b"}", id="deep"),
        pytest.param(b'{"a": ' + b"[" * 200_000, id="deep-and-unfinished"),
    ],
)
def test_what_is_not_plain_json_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(raw)
    assert caught.value.code == "invalid_json"


def test_the_bounds_themselves_pass() -> None:
    raw = b'{"a": [9223372036854775807, -9223372036854775808, 1.5, "\\ud83d\\ude00"]}'
    assert parse(raw) == {"a": [2**63 - 1, -(2**63), 1.5, "\U0001f600"]}


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_client_error(raw: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse(raw), dict)


@pytest.mark.parametrize("value", ["", "text/plain", "application/jsonp", "multipart/form-data"])
def test_other_content_types_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequest):
        check_content_type(value)


@pytest.mark.parametrize("value", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_content_types_pass(value: str) -> None:
    check_content_type(value)
