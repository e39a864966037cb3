"""Request bodies: bytes in, plain JSON values out, and nothing else gets past.

`json.loads` alone lets through NaN, infinities, integers without end and lone surrogates, each of
which breaks something further in; here they are 400.
"""

import asyncio
import json
import math
from typing import Any, NoReturn

from starlette.requests import Request

from blend_gateway.errors import BodyTooLarge, InvalidRequest

_INT64_DIGITS = 19
_SMALL_BYTES = 256 << 10
"""From here on a body takes long to parse, seconds at 8 MiB of brackets, so others get a turn."""


async def read_json_object(request: Request, *, max_bytes: int, max_depth: int) -> dict[str, Any]:
    """Read a JSON object from a request's body.

    Raises:
        InvalidRequest: Wrong content type, not UTF-8, not JSON, not an object, or out of bounds.
        BodyTooLarge: More than `max_bytes`.
        starlette.requests.ClientDisconnect: The client went away before the body ended.
    """
    check_content_type(request.headers.get("content-type", ""))
    _check_encoding(request.headers.get("content-encoding", "identity"))
    raw = await read_bytes(request, max_bytes=max_bytes)
    if len(raw) < _SMALL_BYTES:
        return parse_json_object(raw, max_depth=max_depth)
    return await asyncio.to_thread(parse_json_object, raw, max_depth=max_depth)


def check_content_type(content_type: str) -> None:
    """Accept JSON only.

    Raises:
        InvalidRequest: Any other content type.
    """
    media_type, _, parameters = content_type.lower().partition(";")
    charset = parameters.partition("charset=")[2].partition(";")[0].strip(' "')
    if media_type.strip() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise InvalidRequest(
            "the content type must be `application/json`, in UTF-8", code="invalid_content_type"
        )


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise InvalidRequest(
            f"the content encoding {encoding[:64]!r} is not supported; send the body as it is",
            code="invalid_content_encoding",
        )


async def read_bytes(request: Request, *, max_bytes: int) -> bytes:
    """Read a whole body, stopping as soon as it is too long.

    Raises:
        BodyTooLarge: More than `max_bytes`.
        starlette.requests.ClientDisconnect: The client went away before the body ended.
    """
    too_large = BodyTooLarge(f"the body must have at most {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > _INT64_DIGITS or int(declared) > max_bytes):
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def parse_json_object(raw: bytes, *, max_depth: int) -> dict[str, Any]:
    """Parse a JSON object strictly.

    Raises:
        InvalidRequest: Not UTF-8, not JSON, not an object, or out of bounds.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid_json("the body is not valid UTF-8") from error
    try:
        value = json.loads(
            text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_reject_constant
        )
    except RecursionError as error:
        raise _invalid_json(f"the body nests deeper than {max_depth} levels") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _invalid_json(f"the body is not valid JSON: {error.msg} at {where}") from error
    if not isinstance(value, dict):
        raise _invalid_json("the body must be a JSON object")
    _check_values(value, max_depth)
    return value


def _invalid_json(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_json")


def _parse_int(digits: str) -> int:
    value = int(digits) if len(digits) <= _INT64_DIGITS + 1 else None
    if value is None or not -(2**63) <= value < 2**63:
        raise _invalid_json("the body has an integer outside 64 bits")
    return value


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _invalid_json("the body has a number outside the range of a double")
    return value


def _reject_constant(name: str) -> NoReturn:
    raise _invalid_json(f"the body has {name}, which is not JSON")


def _check_values(root: Any, max_depth: int) -> None:
    """Bound the nesting and refuse lone surrogates, without recursion."""
    level = [root]
    for _ in range(max_depth):
        if not level:
            return
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, dict):
                for key in value:
                    _check_text(key)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        level = below
    if level:
        raise _invalid_json(f"the body nests deeper than {max_depth} levels")


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _invalid_json("the body has a lone surrogate, which is not text") from error
