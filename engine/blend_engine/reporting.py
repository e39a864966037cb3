"""Reports and store events on their way to the front end, as vLLM connector statistics.

Statistics travel with the outputs of the step, so a report is there with the first token; the dict
that `request_finished` returns is lost when a stop string ends a request in the front end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from blend_engine.messages import PassOutcome
from blend_engine.protocol import (
    BlendParams,
    BlendReport,
    CompileParams,
    FallbackReason,
    SegmentStatus,
    StoreEvent,
    StoreEventKind,
    StoreStats,
)
from blend_engine.segments import SegmentContext, SegmentKey


@dataclass
class BlendStats(KVConnectorStats):
    """Reports, events, the store's counters and the refusal, if any, of one or more steps."""

    data: dict[str, Any] = field(default_factory=dict)

    @override
    def reset(self) -> None:
        self.data = {}

    @override
    def aggregate(self, other: KVConnectorStats) -> "BlendStats":
        merged = dict(self.data)
        for key, value in other.data.items():
            if isinstance(value, list):
                merged[key] = [*merged.get(key, []), *value]
            else:
                merged[key] = value
        return BlendStats(data=merged)

    @override
    def reduce(self) -> dict[str, int | float]:
        store = self.data.get("store", {})
        reports = self.data.get("reports", [])
        return {
            "plans": len(reports),
            "reused_tokens": sum(report["reused_tokens"] for report in reports),
            "recomputed_tokens": sum(report["recomputed_tokens"] for report in reports),
            "store_bytes": store.get("num_bytes", 0),
            "store_segments": store.get("num_segments", 0),
            "loaded_tokens_total": store.get("loaded_tokens", 0),
        }

    @override
    def is_empty(self) -> bool:
        return not self.data


@dataclass
class Outbox:
    """Collects reports and events between two calls of `get_kv_connector_stats`."""

    reports: list[BlendReport] = field(default_factory=list)
    events: list[StoreEvent] = field(default_factory=list)
    unsupported_reason: str | None = None
    announce: bool = False
    _told: StoreStats | None = None

    def take(self, store: StoreStats) -> BlendStats | None:
        """Everything collected, with the store as it is now; None where there is nothing new.

        The store alone is news, too: leases of a request that ends early come back without a
        report, and would else be seen as held until another request reports.
        """
        is_changed = self._told not in (None, store)
        if not (self.reports or self.events or self.announce or is_changed):
            return None
        self._told = store
        stats = BlendStats(
            data={
                "reports": [report.to_wire() for report in self.reports],
                "events": [event.to_wire() for event in self.events],
                "store": store.to_wire(),
                "unsupported_reason": self.unsupported_reason,
            }
        )
        self.reports, self.events, self.announce = [], [], False
        return stats


def compile_event(
    params: CompileParams,
    key: SegmentKey,
    kind: StoreEventKind,
    reason: str | None,
    *,
    bytes_per_token: int,
) -> StoreEvent:
    """How a compile ended.

    Args:
        params: What it was to make.
        key: What that is stored under.
        kind: STORED or FAILED.
        reason: Why it failed.
        bytes_per_token: KV bytes of one token over all layers.
    """
    num_tokens = params.segment.num_tokens
    return StoreEvent(
        kind=kind,
        key=key,
        num_tokens=num_tokens,
        num_bytes=num_tokens * bytes_per_token,
        plan_id=params.plan_id,
        reason=reason,
    )


def describe(params: BlendParams | None, report: BlendReport | None) -> str:
    """A request's plan and outcome in one line for the log; nothing of its text or tenant."""
    if params is None:
        return "no plan"
    lengths = ",".join(str(span.num_tokens) for span in params.segments)
    plan = (
        f"plan {params.plan_id} policy={params.policy} ratio={params.recompute_ratio:g}"
        f" segments={lengths}{' strict' if params.strict else ''}"
    )
    if report is None:
        return f"{plan}; ended without a report"
    return (
        f"{plan}; prompt={report.prompt_tokens} prefix={report.prefix_tokens}"
        f" reused={report.reused_tokens} recomputed={report.recomputed_tokens}"
        f" computed={report.computed_tokens} charged={report.charged_ratio:.3f}"
        f" statuses={','.join(report.segments)}"
        f" fallback={report.fallback_reason or 'none'}"
        f" {'approximate' if report.approximate else 'exact'}"
    )


def make_report(
    params: BlendParams,
    *,
    prompt_tokens: int,
    local_tokens: int,
    statuses: Sequence[SegmentStatus],
    outcome: PassOutcome | None,
    fallback_reason: FallbackReason | None = None,
) -> BlendReport:
    """Account for every prompt token of one plan.

    Args:
        params: The request's parameters.
        prompt_tokens: Length of the prompt.
        local_tokens: Tokens found in vLLM's own prefix cache and used from there.
        statuses: Per segment, before loads; a failed load turns HIT into FAILED.
        outcome: What the pass did; None where none ran.
        fallback_reason: Overrides what the statuses say.
    """
    final = list(statuses)
    for index in outcome.failed_segments if outcome else ():
        final[index] = SegmentStatus.FAILED
    reused = outcome.reused_tokens if outcome else 0
    recomputed = outcome.recomputed_tokens if outcome else 0
    exact_loaded = outcome.loaded_exact_tokens if outcome else 0
    prefix = local_tokens + exact_loaded
    blended = reused + recomputed
    return BlendReport(
        plan_id=params.plan_id,
        prompt_tokens=prompt_tokens,
        prefix_tokens=prefix,
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        computed_tokens=prompt_tokens - prefix - blended,
        approximate=blended > 0 or (params.approximate_salt and local_tokens > 0),
        recompute_ratio=recomputed / blended if blended else 0.0,
        charged_ratio=outcome.charged_ratio if outcome else 0.0,
        segments=tuple(final),
        fallback_reason=fallback_reason or _fallback_reason(params, final),
        loaded_tokens=blended + exact_loaded,
    )


def _fallback_reason(
    params: BlendParams, statuses: Sequence[SegmentStatus]
) -> FallbackReason | None:
    """The gravest reason among documents; a short or new leading segment is nobody's concern."""
    found = {
        status
        for span, status in zip(params.segments, statuses, strict=True)
        if span.context is not SegmentContext.PREFIX
    }
    for status, reason in (
        (SegmentStatus.FAILED, FallbackReason.LOAD_FAILED),
        (SegmentStatus.MISS, FallbackReason.MISS),
        (SegmentStatus.TOO_LARGE, FallbackReason.STORE_FULL),
        (SegmentStatus.TOO_SHORT, FallbackReason.TOO_SHORT),
    ):
        if status in found:
            return reason
    return None
