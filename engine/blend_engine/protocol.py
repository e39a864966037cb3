"""What crosses a process boundary: parameters in, reports and store events out.

The wire form is a plain dict under ``kv_transfer_params["blend"]``, so it survives msgpack and
reads well in a debugger. Malformed input raises `InvalidBlendParams` here, in the caller's process;
the connector treats whatever it cannot read as a plain request.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self

from pydantic import TypeAdapter

from blend_engine.errors import InvalidBlendParams
from blend_engine.segments import SegmentContext, SegmentKey, SegmentSpan

WIRE_VERSION = 1
WIRE_KEY = "blend"
DEFAULT_CHECK_LAYER = 1


class Policy(StrEnum):
    """Which hit tokens a pass recomputes."""

    NONE = "none"
    """None of them: full reuse."""
    SINKS = "sinks"
    """The first ``ceil(ratio * length)`` tokens of each segment."""
    HKVD = "hkvd"
    """The ``ceil(ratio * hits)`` tokens of highest KV deviation at the check layer."""


class SegmentStatus(StrEnum):
    """What became of one segment of a request."""

    HIT = "hit"
    MISS = "miss"
    TOO_SHORT = "too_short"
    TOO_LARGE = "too_large"
    FAILED = "failed"


class FallbackReason(StrEnum):
    """Why some or all of a request was computed although it named segments."""

    MISS = "miss"
    TOO_SHORT = "too_short"
    LOAD_FAILED = "load_failed"
    STORE_FULL = "store_full"
    UNSUPPORTED_MODEL = "unsupported_model"
    PROMPT_LOGPROBS = "prompt_logprobs"
    GATE = "gate"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendParams:
    """A request that may reuse segments.

    Args:
        plan_id: Chosen by the caller, unique; the report comes back under it.
        tenant: Whose KV may be used.
        segments: Sorted, disjoint spans of the prompt. Empty spans are allowed and ignored.
        policy: Which hit tokens are recomputed.
        recompute_ratio: Recomputed over hit tokens of the `free` context, in [0, 1].
        check_layer: Layer whose KV deviation `Policy.HKVD` ranks by.
        approximate_salt: Whether the request runs under a blend salt, so that vLLM's own prefix
            hits may be blended blocks and the whole request is reported approximate.
        strict: Whether a document without KV ends the request with `ColdDocument`.
    """

    plan_id: str
    tenant: str
    segments: tuple[SegmentSpan, ...]
    policy: Policy = Policy.SINKS
    recompute_ratio: float = 0.10
    check_layer: int = DEFAULT_CHECK_LAYER
    approximate_salt: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            InvalidBlendParams: Spans overlap or are unsorted, or a number is out of range.
        """
        if not 0.0 <= self.recompute_ratio <= 1.0:
            raise InvalidBlendParams(
                f"`recompute_ratio` must be in [0, 1], got {self.recompute_ratio!r}"
            )
        if self.check_layer < 0:
            raise InvalidBlendParams(f"`check_layer` must be >= 0, got {self.check_layer!r}")
        previous_end = 0
        for span in self.segments:
            _check_span(span, least_start=previous_end)
            previous_end = span.end

    def to_kv_transfer_params(self) -> dict[str, Any]:
        """The dict for `SamplingParams.extra_args["kv_transfer_params"]`."""
        return _wire("use", asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileParams:
    """A request that compiles: its prompt is preamble + segment + one throwaway token."""

    plan_id: str
    tenant: str
    segment: SegmentSpan

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            InvalidBlendParams: The span is empty, or a prefix segment does not start at 0.
        """
        _check_span(self.segment, least_start=0)
        if self.segment.num_tokens == 0:
            raise InvalidBlendParams("a segment to compile needs at least one token")

    def to_kv_transfer_params(self) -> dict[str, Any]:
        """The dict for `SamplingParams.extra_args["kv_transfer_params"]`."""
        return _wire("compile", asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class DropParams:
    """A request that only removes segments from the store; its prompt is one throwaway token."""

    plan_id: str
    keys: tuple[SegmentKey, ...]

    def to_kv_transfer_params(self) -> dict[str, Any]:
        """The dict for `SamplingParams.extra_args["kv_transfer_params"]`."""
        return _wire("drop", asdict(self))


RequestParams = BlendParams | CompileParams | DropParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendReport:
    """What one plan did. ``prefix + reused + recomputed + computed == prompt_tokens``.

    Args:
        plan_id: As sent.
        prompt_tokens: Length of the prompt in tokens.
        prefix_tokens: Exact prefix hits: vLLM's own cached blocks and the stored leading segment.
        reused_tokens: Non-prefix hits whose KV was used as stored, rotated.
        recomputed_tokens: Non-prefix hits recomputed in layers beyond the check layer.
        computed_tokens: Everything else; no KV existed.
        approximate: Whether any KV in the prompt may differ from full prefill's.
        recompute_ratio: recomputed over (reused + recomputed); 0 without non-prefix hits.
        charged_ratio: Token-layers spent on hit tokens over layers x hit tokens, the peek included.
        segments: One status per span of the request, in its order.
        fallback_reason: Why segments were computed; None when all were hits.
        loaded_tokens: Tokens whose KV was written from the store; the proof that a load happened.
    """

    plan_id: str
    prompt_tokens: int
    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    approximate: bool
    recompute_ratio: float
    charged_ratio: float
    segments: tuple[SegmentStatus, ...]
    fallback_reason: FallbackReason | None
    loaded_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV was not computed again: prefix + reused."""
        return self.prefix_tokens + self.reused_tokens

    def to_wire(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        """From `to_wire`'s plain data."""
        reason = wire["fallback_reason"]
        return cls(
            **{
                **wire,
                "segments": tuple(SegmentStatus(status) for status in wire["segments"]),
                "fallback_reason": None if reason is None else FallbackReason(reason),
            }
        )


class StoreEventKind(StrEnum):
    """What happened to a segment in the store."""

    STORED = "stored"
    EVICTED = "evicted"
    DROPPED = "dropped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEvent:
    """One change of what is resident. `reason` is filled for FAILED."""

    kind: StoreEventKind
    key: SegmentKey
    num_tokens: int = 0
    num_bytes: int = 0
    plan_id: str | None = None
    reason: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        """From `to_wire`'s plain data."""
        return cls(**{**wire, "kind": StoreEventKind(wire["kind"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The store at one moment. Bytes are host memory, summed over layers of one rank."""

    num_segments: int
    num_bytes: int
    budget_bytes: int
    num_leases: int
    num_evictions: int
    num_load_failures: int
    loaded_tokens: int

    def to_wire(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        """From `to_wire`'s plain data."""
        return cls(**wire)


def parse_request_params(kv_transfer_params: Any) -> RequestParams | None:
    """Read a request's parameters; None where it carries none or another version's.

    Raises:
        InvalidBlendParams: Ours, but malformed.
    """
    if not isinstance(kv_transfer_params, dict):
        return None
    wire = kv_transfer_params.get(WIRE_KEY)
    if not isinstance(wire, dict) or wire.get("version") != WIRE_VERSION:
        return None
    try:
        kind = _KINDS[wire["kind"]]
        unlike = set(wire["params"]) ^ set(kind.__dataclass_fields__)
        if unlike:
            raise ValueError(f"missing or unknown: {sorted(map(str, unlike))}")
        # Strict, as JSON: lists stand for tuples and strings for enums; nothing else is coerced.
        encoded = json.dumps(wire["params"], allow_nan=False)
        return _PARSERS[kind].validate_json(encoded, strict=True)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidBlendParams(f"malformed blend parameters: {error}") from error


def spans_of(params: RequestParams) -> tuple[SegmentSpan, ...]:
    """The segments that a request names, in order."""
    if isinstance(params, BlendParams):
        return params.segments
    return (params.segment,) if isinstance(params, CompileParams) else ()


def check_request(
    params: RequestParams, *, num_layers: int, cache_salt: str | None, prompt_tokens: int | None
) -> None:
    """Check what only the request that carries the parameters can tell.

    Args:
        params: The request's.
        num_layers: Layers of the model.
        cache_salt: Of the request.
        prompt_tokens: Length of its prompt, where that is known.

    Raises:
        InvalidBlendParams: Spans end beyond the prompt, the model has no such check layer, or
            blended blocks would be found by requests that blend nothing.
    """
    spans = spans_of(params)
    if spans and prompt_tokens is not None and spans[-1].end > prompt_tokens:
        raise InvalidBlendParams(f"{spans[-1]!r} ends beyond a prompt of {prompt_tokens} tokens")
    if not isinstance(params, BlendParams):
        return
    # The default stands for the last layer of a model that has only one.
    last = max(num_layers - 1, DEFAULT_CHECK_LAYER)
    if params.policy is Policy.HKVD and params.check_layer > last:
        raise InvalidBlendParams(
            f"`check_layer` must be in [0, {last}] for this model, got {params.check_layer!r}"
        )
    if not cache_salt and any(span.context is not SegmentContext.PREFIX for span in spans):
        raise InvalidBlendParams(
            "segments other than the leading one need a `cache_salt` of the request, and one that "
            "requests which must be exact do not use"
        )


def _check_span(span: SegmentSpan, *, least_start: int) -> None:
    if span.start < least_start or span.end < span.start:
        raise InvalidBlendParams(f"spans must be sorted and disjoint, got {span!r}")
    if span.context is SegmentContext.PREFIX and span.start != 0:
        raise InvalidBlendParams(f"a prefix segment starts at 0, got {span!r}")


def _wire(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    return {WIRE_KEY: {"version": WIRE_VERSION, "kind": kind, "params": params}}


_KINDS: Mapping[str, type[RequestParams]] = MappingProxyType(
    {"use": BlendParams, "compile": CompileParams, "drop": DropParams}
)

_PARSERS: Mapping[type[RequestParams], TypeAdapter[RequestParams]] = MappingProxyType(
    {kind: TypeAdapter(kind) for kind in _KINDS.values()}
)
"""Check types and ranges: the scheduler role computes with these and must never raise on them."""
