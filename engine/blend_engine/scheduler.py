"""The scheduler role: decides what every pass does; holds the index of what is resident.

Side effects happen in `update_state_after_alloc` only: leases are taken and room is reserved there,
and both end when the workers acknowledge the pass. `get_num_new_matched_tokens` may be asked any
number of times and changes nothing but a memo. Nothing here raises on request data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blend_engine.budget import PassBudget, StepSpending, pass_tokens
from blend_engine.config import BlendConfig
from blend_engine.flights import AdmittedPass, Flight, Flights
from blend_engine.index import SegmentIndex
from blend_engine.messages import CANCELLED, BlendAck, BlendMetadata, Capture, PassOutcome
from blend_engine.plan import Plan, make_plan
from blend_engine.protocol import (
    BlendParams,
    CompileParams,
    DropParams,
    FallbackReason,
    SegmentStatus,
    StoreEvent,
    StoreEventKind,
    StoreStats,
)
from blend_engine.reporting import BlendStats, Outbox, compile_event, make_report
from blend_engine.segments import SegmentKey, SegmentSpan
from blend_engine.tracking import (
    BlockFollower,
    RequestTracker,
    TrackedRequest,
    loaded_statuses,
    may_reuse,
)


@dataclass(slots=True)
class _Counters:
    load_failures: int = 0
    loaded_tokens: int = 0


class BlendScheduler:
    """Plans passes and accounts for them.

    Args:
        config: The connector's settings.
        block_size: Tokens per block of vLLM's cache.
        bytes_per_token: KV bytes of one token over all layers on one rank.
        num_layers: Attention layers of the model.
        budget: What passes may add to a step.
    """

    def __init__(
        self,
        config: BlendConfig,
        *,
        block_size: int,
        bytes_per_token: int,
        num_layers: int,
        budget: PassBudget,
    ) -> None:
        self._config = config
        self._num_layers = num_layers
        self._index = SegmentIndex(budget_bytes=config.store_bytes, bytes_per_token=bytes_per_token)
        self._bytes_per_token = bytes_per_token
        self._requests = RequestTracker(num_layers)
        self._blocks = BlockFollower()
        self._spending = StepSpending(budget)
        self._admitted: list[AdmittedPass] = []
        self._flights = Flights(block_size=block_size, piece_tokens=budget.piece_tokens)
        self._outbox = Outbox()
        self._counters = _Counters()
        self._ready = False
        self._unsupported_reason: str | None = None

    # What vLLM's scheduler asks, in the order it asks.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed: int
    ) -> tuple[int | None, bool]:
        """How many tokens after `num_computed` a pass would cover, and whether over several steps.

        None defers the request to a later step.
        """
        tracked = self._requests.track(request)
        if tracked is None:
            return 0, False
        if isinstance(tracked.params, DropParams):
            self._requests.await_removal(request.request_id, tracked.params.keys)
            return (None if self._in_use(tracked.params.keys) else 0), False
        if isinstance(tracked.params, CompileParams) and self._requests.is_leaving(tracked.keys[0]):
            return None, False
        plan = tracked.plan = self._plan(tracked, request, num_computed)
        if not plan.num_external_tokens:
            return 0, False
        tokens = self._tokens_of(tracked, plan)
        tracked.is_large = self._spending.is_large(tokens)
        if tracked.is_large:
            has_room = self._has_room(is_compile=isinstance(tracked.params, CompileParams))
            return (plan.num_external_tokens, True) if has_room else (None, False)
        return (plan.num_external_tokens if self._spending.fits(tokens) else None), False

    def update_state_after_alloc(
        self, request: Any, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """The request is admitted to this step with that many external tokens."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if isinstance(tracked.params, DropParams):
            self._requests.end_removal(request.request_id)
            self._drop(tracked.params)
            return
        plan = tracked.plan
        if plan is None or num_external_tokens == 0:
            self._report_unplanned(tracked, plan, may_reuse(request))
            return
        if num_external_tokens != plan.num_external_tokens:
            # vLLM may round an external count down to whole blocks; the rest is its own to compute.
            plan = self._replan(tracked, plan, plan.num_computed + num_external_tokens)
        self._admit(request.request_id, tracked, plan, tuple(block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> BlendMetadata:
        """The step's orders."""
        self._blocks.follow(scheduler_output)
        admitted, self._admitted = self._admitted, []
        writes = self._blocks.forward_writes(scheduler_output) if admitted else {}
        left = self._spending.end_step()
        # Taken before this step's passes are launched: those admitted now begin in the next one.
        slices = self._flights.slices()
        metadata = BlendMetadata(
            freed_keys=self._index.take_evicted(),
            cancelled=self._flights.take_cancelled(),
            slices=slices,
            slice_tokens=left if slices else 0,
        )
        for item in admitted:
            order = self._flights.launch(item, writes)
            if order is not None:
                metadata.passes.append(order)
        for key in metadata.freed_keys:
            self._outbox.events.append(StoreEvent(kind=StoreEventKind.EVICTED, key=key))
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """Workers have finished a step."""
        ack = getattr(connector_output, "kv_connector_worker_meta", None)
        if not isinstance(ack, BlendAck):
            return
        if (ack.ready, ack.unsupported_reason) != (self._ready, self._unsupported_reason):
            self._ready, self._unsupported_reason = ack.ready, ack.unsupported_reason
            self._outbox.unsupported_reason = ack.unsupported_reason
            self._outbox.announce = True
        for outcome in ack.outcomes:
            flight = self._flights.land(outcome.pass_id)
            if flight is not None:
                self._settle(flight, outcome)

    def request_finished(self, request: Any) -> None:
        """Forget the request; its passes settle with their acknowledgement."""
        self._flights.cancel(request.request_id)
        self._requests.forget(request.request_id)
        self._blocks.forget(request.request_id)

    def reset_cache(self) -> bool:
        """Forget all segments, as for other weights; False where one of the old is being made."""
        return self._index.clear()

    def take_stats(self) -> BlendStats | None:
        """Reports and events since the last call."""
        return self._outbox.take(self.store_stats())

    def store_stats(self) -> StoreStats:
        """The store now."""
        return StoreStats(
            num_segments=len(self._index),
            num_bytes=self._index.num_bytes,
            budget_bytes=self._config.store_bytes,
            num_leases=self._index.num_leases,
            num_evictions=self._index.num_evictions,
            num_load_failures=self._counters.load_failures,
            loaded_tokens=self._counters.loaded_tokens,
        )

    # Tracking and planning.

    def _plan(self, tracked: TrackedRequest, request: Any, num_computed: int) -> Plan:
        nothing = Plan(num_computed=num_computed, covered_end=num_computed, hits=())
        params = tracked.params
        servable = self._ready and self._unsupported_reason is None and may_reuse(request)
        if isinstance(params, CompileParams):
            # The prompt's last token is vLLM's, so a segment that ends there cannot be captured.
            fits = params.segment.end < len(tracked.prompt)
            # One that no lookup would find would only take room.
            fits = fits and params.segment.num_tokens >= self._config.min_segment_tokens
            # Nor is one compiled again whose event is out: preempted, it only has to end.
            is_over = tracked.reported or self._is_resident(tracked, 0)
            if not servable or not fits or is_over:
                return nothing
            end = max(num_computed, len(tracked.prompt) - 1)
            return Plan(num_computed=num_computed, covered_end=end, hits=())
        assert isinstance(params, BlendParams)
        keys = self._resident_keys(tracked)
        tracked.statuses = tuple(
            SegmentStatus.HIT
            if key is not None or tracked.is_cached(span, num_computed)
            else self._status_of_miss(span)
            for span, key in zip(tracked.spans, keys, strict=True)
        )
        if not servable:
            return nothing
        return make_plan(
            tracked.spans, keys, num_computed=num_computed, prompt_len=len(tracked.prompt)
        )

    def _replan(self, tracked: TrackedRequest, plan: Plan, covered_end: int) -> Plan:
        """The same plan with the end that the scheduler has fixed."""
        if isinstance(tracked.params, CompileParams):
            return Plan(num_computed=plan.num_computed, covered_end=covered_end, hits=())
        return make_plan(
            tracked.spans,
            self._resident_keys(tracked),
            num_computed=plan.num_computed,
            prompt_len=len(tracked.prompt),
            covered_end=covered_end,
        )

    def _tokens_of(self, tracked: TrackedRequest, plan: Plan) -> int:
        assert not isinstance(tracked.params, DropParams)
        return pass_tokens(plan, tracked.params, self._num_layers)

    def _has_room(self, *, is_compile: bool) -> bool:
        """Whether another large pass may start, counting those admitted in this very step."""
        is_taken = any(
            item.is_asynchronous and item.is_compile == is_compile for item in self._admitted
        )
        return not is_taken and self._flights.has_room(is_compile=is_compile)

    def _admit(
        self, request_id: str, tracked: TrackedRequest, plan: Plan, block_ids: tuple[int, ...]
    ) -> None:
        if not tracked.is_large:
            self._spending.take(self._tokens_of(tracked, plan))
        self._admitted.append(
            AdmittedPass(
                request_id=request_id,
                tracked=tracked,
                plan=plan,
                block_ids=block_ids,
                statuses=loaded_statuses(tracked, plan),
                leased=self._lease(plan),
                capture=self._reserve(tracked, plan),
                is_asynchronous=tracked.is_large,
            )
        )

    def _resident_keys(self, tracked: TrackedRequest) -> list[SegmentKey | None]:
        return [
            key if self._is_resident(tracked, index) else None
            for index, key in enumerate(tracked.keys)
        ]

    def _status_of_miss(self, span: SegmentSpan) -> SegmentStatus:
        if span.num_tokens < self._config.min_segment_tokens:
            return SegmentStatus.TOO_SHORT
        return SegmentStatus.MISS if self._index.fits(span.num_tokens) else SegmentStatus.TOO_LARGE

    def _is_resident(self, tracked: TrackedRequest, index: int) -> bool:
        span = tracked.spans[index]
        key = tracked.keys[index]
        if span.num_tokens < self._config.min_segment_tokens or self._requests.is_leaving(key):
            return False
        return self._index.lookup(key, tracked.token_ids(index), tracked.owner(index))

    def _report_unplanned(
        self, tracked: TrackedRequest, plan: Plan | None, may_blend: bool
    ) -> None:
        params = tracked.params
        if tracked.reported:
            # Resumed, or taken up when its asynchronous pass has ended.
            return
        if isinstance(params, CompileParams):
            self._report_unplanned_compile(tracked)
        elif isinstance(params, BlendParams):
            tracked.reported = True
            reason = None
            if not self._ready or self._unsupported_reason is not None:
                reason = FallbackReason.UNSUPPORTED_MODEL
            elif not may_blend:
                reason = FallbackReason.PROMPT_LOGPROBS
            self._outbox.reports.append(
                make_report(
                    params,
                    prompt_tokens=len(tracked.prompt),
                    local_tokens=plan.num_computed if plan else 0,
                    statuses=loaded_statuses(tracked, plan),
                    outcome=None,
                    fallback_reason=reason,
                )
            )

    def _report_unplanned_compile(self, tracked: TrackedRequest) -> None:
        if self._is_resident(tracked, 0):
            self._compile_event(tracked, StoreEventKind.STORED, None)
        else:
            is_short = tracked.spans[0].num_tokens < self._config.min_segment_tokens
            reason = self._unsupported_reason or ("too_short" if is_short else "not_compilable")
            self._compile_event(tracked, StoreEventKind.FAILED, reason)

    def _compile_event(
        self, tracked: TrackedRequest, kind: StoreEventKind, reason: str | None
    ) -> None:
        params = tracked.params
        assert isinstance(params, CompileParams)
        tracked.reported = True
        bytes_per_token = self._bytes_per_token
        self._outbox.events.append(
            compile_event(params, tracked.keys[0], kind, reason, bytes_per_token=bytes_per_token)
        )

    # Leases, room, removal.

    def _lease(self, plan: Plan) -> tuple[SegmentKey, ...]:
        keys = tuple(hit.key for hit in plan.hits)
        for key in keys:
            self._index.acquire(key)
        return keys

    def _reserve(self, tracked: TrackedRequest, plan: Plan) -> Capture | None:
        params = tracked.params
        if not isinstance(params, CompileParams):
            return None
        span, key = params.segment, tracked.keys[0]
        if plan.covered_end < span.end:
            self._compile_event(tracked, StoreEventKind.FAILED, "not_covered")
            return None
        if self._index.is_reserved(key):
            # The same segment is being compiled in this very step; that one's event serves both.
            return None
        if not self._index.reserve(key, tracked.token_ids(0).copy(), tracked.owner(0)):
            reason = "store_full" if self._index.fits(span.num_tokens) else "too_large"
            self._compile_event(tracked, StoreEventKind.FAILED, reason)
            return None
        return Capture(key=key, start=span.start, end=span.end)

    def _in_use(self, keys: Sequence[SegmentKey]) -> bool:
        leased = self._flights.leased_keys()
        leased.update(key for item in self._admitted for key in item.leased)
        return any(key in leased or self._index.is_reserved(key) for key in keys)

    def _drop(self, params: DropParams) -> None:
        self._index.drop(params.keys)
        for key in params.keys:
            self._outbox.events.append(
                StoreEvent(kind=StoreEventKind.DROPPED, key=key, plan_id=params.plan_id)
            )

    # One pass.

    def _settle(self, flight: Flight, outcome: PassOutcome) -> None:
        item = flight.admitted
        for key in item.leased:
            self._index.release(key)
        self._counters.load_failures += len(outcome.failed_segments)
        for key in outcome.failed_keys:
            self._index.discard(key)
        self._counters.loaded_tokens += (
            outcome.reused_tokens + outcome.recomputed_tokens + outcome.loaded_exact_tokens
        )
        tracked = item.tracked
        if item.capture is not None:
            self._settle_capture(tracked, item.capture, outcome)
        elif (
            isinstance(tracked.params, BlendParams)
            and not tracked.reported
            and outcome.error != CANCELLED
        ):
            tracked.reported = True
            self._outbox.reports.append(
                make_report(
                    tracked.params,
                    prompt_tokens=len(tracked.prompt),
                    local_tokens=flight.local_tokens,
                    statuses=item.statuses,
                    outcome=outcome,
                )
            )

    def _settle_capture(
        self, tracked: TrackedRequest, capture: Capture, outcome: PassOutcome
    ) -> None:
        if outcome.captured:
            self._index.complete(capture.key)
            self._compile_event(tracked, StoreEventKind.STORED, None)
        else:
            self._index.abandon(capture.key)
            self._compile_event(tracked, StoreEventKind.FAILED, outcome.error or "not_captured")
