"""Errors of the engine.

    BlendError
      BlendClientError        the caller's input cannot be served; HTTP 4xx
        InvalidBlendParams    malformed spans, policy or ratio
        ColdDocument          strict mode met a segment without KV; carries the segment indices
        InvalidGrammar        what the answer is constrained to cannot be compiled
      BlendServerError        our side failed; HTTP 5xx
        EngineUnavailable     the engine is gone or does not answer
        EngineBusy            the engine takes no more requests for now

Nothing below reaches vLLM's scheduler or worker: inside the connector every failure is a miss.
"""

from collections.abc import Sequence


class BlendError(Exception):
    """Root of every error the engine raises to its callers."""


class BlendClientError(BlendError):
    """The request cannot be served as it was sent."""


class InvalidBlendParams(BlendClientError, ValueError):
    """A span, policy or ratio is malformed."""


class ColdDocument(BlendClientError):
    """Strict mode asked for KV that is not resident.

    Args:
        segment_indices: Indices into the request's segments that missed.
    """

    def __init__(self, segment_indices: Sequence[int]) -> None:
        super().__init__(f"segments without KV: {list(segment_indices)}")
        self.segment_indices = tuple(segment_indices)


class InvalidGrammar(BlendClientError):
    """The grammar, schema or expression that constrains the answer cannot be compiled here."""


class BlendServerError(BlendError):
    """The engine failed; nothing is wrong with the request."""


class EngineUnavailable(BlendServerError):
    """The engine is gone or did not answer in time."""


class EngineBusy(BlendServerError):
    """The engine's queue is full; the same request may succeed later."""
