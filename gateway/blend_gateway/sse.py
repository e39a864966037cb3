"""Server-sent events on their way out: the usage chunk gets our counts, errors get our shape."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from blend_gateway.errors import error_body
from blend_gateway.outcome import Outcome

DONE = "data: [DONE]\n\n"
_PREFIX = "data: "
_ERROR_PREFIX = 'data: {"error"'
_USAGE_MARK = '"choices":[]'
"""In the text of a chunk, only the usage chunk can have it: in strings, quotes are escaped."""


async def finish_events(
    first: str,
    rest: AsyncGenerator[str, None],
    outcome: Outcome,
    *,
    reports: bool,
    error_of: Callable[[dict[str, Any]], Exception],
) -> AsyncGenerator[str, None]:
    """Pass events on, completed.

    Args:
        first: The first event.
        rest: The others; closed when this generator is.
        outcome: What the usage chunk gets.
        reports: Whether it gets the `blend` object.
        error_of: The exception behind an error event, given its body.
    """
    async with aclosing(rest):
        yield _finish(first, outcome, reports, error_of)
        async for event in rest:
            yield _finish(event, outcome, reports, error_of)


def error_event(error: BaseException) -> str:
    """An error as an event; `DONE` follows it."""
    return f"{_PREFIX}{json.dumps(error_body(error))}\n\n"


def _finish(
    event: str,
    outcome: Outcome,
    reports: bool,
    error_of: Callable[[dict[str, Any]], Exception],
) -> str:
    if event.startswith(_ERROR_PREFIX):
        return error_event(error_of(json.loads(event[len(_PREFIX) :])))
    if _USAGE_MARK not in event:
        return event
    body = json.loads(event[len(_PREFIX) :])
    outcome.add_to(body, reports=reports)
    return f"{_PREFIX}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
