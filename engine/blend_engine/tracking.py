"""Requests that carry blend parameters, from vLLM's first question about them to their end."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.logger import init_logger

from blend_engine.errors import InvalidBlendParams
from blend_engine.hazards import ForwardWrite
from blend_engine.index import Owner, TokenArray
from blend_engine.plan import Plan
from blend_engine.protocol import (
    BlendParams,
    CompileParams,
    DropParams,
    RequestParams,
    SegmentStatus,
    check_request,
    parse_request_params,
    spans_of,
)
from blend_engine.segments import SegmentKey, SegmentSpan, segment_key

logger = init_logger(__name__)


@dataclass(slots=True)
class TrackedRequest:
    """One request.

    Args:
        params: What it asked for.
        prompt: Its prompt ids, int32.
        spans: Its segments.
        keys: Their keys.
        plan: The latest answer to `get_num_new_matched_tokens`; final at allocation.
        statuses: Per segment, as of that answer.
        is_large: Whether that answer's pass is spread over steps.
        reported: Whether its report or its compile's event is out; a resumed request tells nothing
            twice.
    """

    params: RequestParams
    prompt: TokenArray
    spans: tuple[SegmentSpan, ...]
    keys: tuple[SegmentKey, ...]
    plan: Plan | None = None
    statuses: tuple[SegmentStatus, ...] = ()
    is_large: bool = False
    reported: bool = False

    def token_ids(self, index: int) -> TokenArray:
        """A segment's own ids."""
        span = self.spans[index]
        return self.prompt[span.start : span.end]

    def is_cached(self, span: SegmentSpan, num_computed: int) -> bool:
        """Whether vLLM has all of a segment; the prompt's last token it computes in any case."""
        end = min(span.end, len(self.prompt) - 1)
        return span.num_tokens == 0 or (span.start < num_computed and end <= num_computed)

    def owner(self, index: int) -> Owner:
        """Whose a segment is, and what it is compiled behind."""
        assert not isinstance(self.params, DropParams), "a drop names keys alone"
        return self.params.tenant, self.spans[index].context


class RequestTracker:
    """Tracked requests by vLLM's request id.

    Args:
        num_layers: Layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._requests: dict[str, TrackedRequest | None] = {}
        self._leaving: dict[str, tuple[SegmentKey, ...]] = {}

    def get(self, request_id: str) -> TrackedRequest | None:
        """A request met before."""
        return self._requests.get(request_id)

    def track(self, request: Any) -> TrackedRequest | None:
        """The request, read on first sight; None where it carries nothing that we can read."""
        if request.request_id not in self._requests:
            self._requests[request.request_id] = _read(request, self._num_layers)
        return self._requests[request.request_id]

    def await_removal(self, request_id: str, keys: tuple[SegmentKey, ...]) -> None:
        """Let nobody take segments up, or one that is always in use would never go."""
        self._leaving[request_id] = keys

    def end_removal(self, request_id: str) -> None:
        """The request's segments are gone, or are not to go any more."""
        self._leaving.pop(request_id, None)

    def is_leaving(self, key: SegmentKey) -> bool:
        """Whether a request waits to remove the segment."""
        return any(key in keys for keys in self._leaving.values())

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)
        self.end_removal(request_id)


class BlockFollower:
    """Block lists of all scheduled requests, to know what a step's forward writes."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}

    def follow(self, scheduler_output: Any) -> None:
        """Take in a step. Resumed requests come with whole lists, running ones with increments."""
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._blocks[request_id] = list(new_ids[0]) if new_ids else []
            elif new_ids:
                self._blocks.setdefault(request_id, []).extend(new_ids[0])
        for request_id in scheduler_output.finished_req_ids:
            self.forget(request_id)

    def forward_writes(self, scheduler_output: Any) -> dict[str, ForwardWrite]:
        """Per scheduled request what this step's forward writes."""
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts.update(
            (new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs
        )
        return {
            request_id: ForwardWrite(
                block_ids=self._blocks.get(request_id, ()),
                start=starts[request_id],
                end=starts[request_id] + num_tokens,
            )
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
            if request_id in starts
        }

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._blocks.pop(request_id, None)


def loaded_statuses(tracked: TrackedRequest, plan: Plan | None) -> tuple[SegmentStatus, ...]:
    """The statuses as they come true: a resident segment that is not loaded is no hit."""
    if not tracked.statuses:
        return ()
    loaded = {hit.segment_index for hit in plan.hits} if plan else set()
    num_computed = plan.num_computed if plan else 0
    return tuple(
        SegmentStatus.MISS
        if status is SegmentStatus.HIT
        and index not in loaded
        and not tracked.is_cached(span, num_computed)
        else status
        for index, (span, status) in enumerate(zip(tracked.spans, tracked.statuses, strict=True))
    )


def may_reuse(request: Any) -> bool:
    """Whether cached KV may stand for the prompt: no prompt logprobs, no adapter."""
    return (
        not getattr(request, "skip_reading_prefix_cache", False)
        and getattr(request, "lora_request", None) is None
    )


def _read(request: Any, num_layers: int) -> TrackedRequest | None:
    try:
        params = parse_request_params(getattr(request, "kv_transfer_params", None))
        if params is None or request.prompt_token_ids is None:
            return None
        check_request(
            params,
            num_layers=num_layers,
            cache_salt=getattr(request, "cache_salt", None),
            prompt_tokens=len(request.prompt_token_ids),
        )
    except InvalidBlendParams as error:
        logger.warning("request %s is served without blending: %s", request.request_id, error)
        return None
    prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
    spans = spans_of(params)
    tenant = params.tenant if isinstance(params, BlendParams | CompileParams) else ""
    keys = tuple(segment_key(tenant, span.context, prompt[span.start : span.end]) for span in spans)
    return TrackedRequest(params=params, prompt=prompt, spans=spans, keys=keys)
