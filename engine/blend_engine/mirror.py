"""EngineMirror: what the front end has heard of the connector's scheduler role.

Fed by a vLLM stat logger in the front-end process. A hint for statuses and strict mode; the
scheduler role overrules it. Reports wait here until they are asked for.
"""

import asyncio
from collections import OrderedDict
from typing import Any

from typing_extensions import override
from vllm.v1.metrics.loggers import StatLoggerBase

from blend_engine.protocol import BlendReport, StoreEvent, StoreEventKind, StoreStats
from blend_engine.segments import SegmentKey

_MAX_REPORTS = 4096
"""Reports that nobody asked for, for example of aborted requests, are dropped oldest first."""


class EngineMirror:
    """Reports by plan, residency by key, and the store's counters."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str, BlendReport] = OrderedDict()
        self._report_waiters: dict[str, list[asyncio.Event]] = {}
        self._compile_failures: OrderedDict[str, str] = OrderedDict()
        self._resident: set[SegmentKey] = set()
        self.unsupported_reason: str | None = None
        self.store = StoreStats(
            num_segments=0,
            num_bytes=0,
            budget_bytes=0,
            num_leases=0,
            num_evictions=0,
            num_load_failures=0,
            loaded_tokens=0,
        )

    def is_resident(self, key: SegmentKey) -> bool:
        """Whether the segment was stored and not removed since, as far as is known."""
        return key in self._resident

    def report(self, plan_id: str) -> BlendReport | None:
        """The report of a plan, if it has come. Stays until it is pushed out by newer ones."""
        return self._reports.get(plan_id)

    async def wait_for_report(self, plan_id: str, timeout_s: float) -> BlendReport | None:
        """The report of a plan; it comes with the step that made the first token, or just after."""
        if plan_id not in self._reports:
            event = asyncio.Event()
            waiters = self._report_waiters.setdefault(plan_id, [])
            waiters.append(event)
            try:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            except TimeoutError:
                return None
            finally:
                waiters.remove(event)
                if not waiters:
                    self._report_waiters.pop(plan_id, None)
        return self._reports.get(plan_id)

    def take_compile_failure(self, plan_id: str) -> str | None:
        """Why a compile failed, once; None where it did not."""
        return self._compile_failures.pop(plan_id, None)

    def observe(self, data: dict[str, Any]) -> None:
        """Take in one step's statistics."""
        self.store = StoreStats.from_wire(data["store"])
        self.unsupported_reason = data.get("unsupported_reason")
        for wire in data.get("events", ()):
            self._observe_event(StoreEvent.from_wire(wire))
        for wire in data.get("reports", ()):
            report = BlendReport.from_wire(wire)
            # With n > 1 every child reports; the first says what the prompt cost.
            self._reports.setdefault(report.plan_id, report)
            for event in self._report_waiters.get(report.plan_id, ()):
                event.set()
        while len(self._reports) > _MAX_REPORTS:
            self._reports.popitem(last=False)

    def _observe_event(self, event: StoreEvent) -> None:
        if event.kind is StoreEventKind.STORED:
            self._resident.add(event.key)
        elif event.kind is StoreEventKind.FAILED:
            if event.plan_id is not None:
                self._compile_failures[event.plan_id] = event.reason or "unknown"
            while len(self._compile_failures) > _MAX_REPORTS:
                self._compile_failures.popitem(last=False)
        else:
            self._resident.discard(event.key)


class MirrorStatLogger(StatLoggerBase):
    """vLLM's hook for statistics, feeding a mirror."""

    def __init__(self, mirror: EngineMirror) -> None:
        self._mirror = mirror

    @override
    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        data = getattr(scheduler_stats, "kv_connector_stats", None)
        if data:
            self._mirror.observe(data)

    @override
    def log_engine_initialized(self) -> None:
        """Nothing to say."""
