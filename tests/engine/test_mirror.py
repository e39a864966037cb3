"""Rules of `EngineMirror`: what the front end knows of the store and of its requests' plans."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from blend_engine.mirror import EngineMirror, MirrorStatLogger
from blend_engine.protocol import (
    BlendParams,
    BlendReport,
    FallbackReason,
    Policy,
    SegmentStatus,
    StoreEvent,
    StoreEventKind,
    StoreStats,
)
from blend_engine.reporting import BlendStats, Outbox, describe
from blend_engine.segments import SegmentContext, SegmentKey, SegmentSpan

pytestmark = pytest.mark.vllm

KEY = SegmentKey("document")
STORE = StoreStats(
    num_segments=1,
    num_bytes=2,
    budget_bytes=3,
    num_leases=4,
    num_evictions=5,
    num_load_failures=6,
    loaded_tokens=7,
)
REPORT = BlendReport(
    plan_id="plan",
    prompt_tokens=100,
    prefix_tokens=10,
    reused_tokens=40,
    recomputed_tokens=20,
    computed_tokens=30,
    approximate=True,
    recompute_ratio=1 / 3,
    charged_ratio=1 / 3,
    segments=(SegmentStatus.HIT, SegmentStatus.MISS),
    fallback_reason=FallbackReason.MISS,
    loaded_tokens=60,
)


@dataclass
class SchedulerStats:
    """As much of vLLM's statistics of one step as the logger looks at."""

    kv_connector_stats: dict[str, Any] | None = None


def step(*sent: BlendReport | StoreEvent, store: StoreStats = STORE) -> dict[str, Any]:
    """What one step's statistics carry, made as the scheduler role makes it."""
    outbox = Outbox(
        reports=[each for each in sent if isinstance(each, BlendReport)],
        events=[each for each in sent if isinstance(each, StoreEvent)],
        announce=True,
    )
    stats = outbox.take(store)
    assert stats is not None
    return stats.data


def event(kind: StoreEventKind, **fields: Any) -> StoreEvent:
    return StoreEvent(kind=kind, key=KEY, **fields)


def mirror_of(*steps: dict[str, Any]) -> EngineMirror:
    mirror = EngineMirror()
    for data in steps:
        mirror.observe(data)
    return mirror


def test_report_is_found_by_its_plan():
    """A report waits under the id that its request carried, and can be read more than once."""
    mirror = mirror_of(step(REPORT, replace(REPORT, plan_id="other", prompt_tokens=7)))
    assert mirror.report("plan") == REPORT
    assert mirror.report("plan") == REPORT
    assert mirror.report("other").prompt_tokens == 7
    assert mirror.report("unknown") is None


def test_first_report_of_a_plan_stands():
    """With n > 1 every child reports; later ones hit the blocks of the first and know less."""
    mirror = mirror_of(step(REPORT), step(replace(REPORT, reused_tokens=0, prefix_tokens=90)))
    assert mirror.report("plan") == REPORT


def test_oldest_reports_are_pushed_out():
    """Reports that nobody asks for do not grow without bound."""
    count = 5000
    mirror = mirror_of(*(step(replace(REPORT, plan_id=str(number))) for number in range(count)))
    kept = [number for number in range(count) if mirror.report(str(number)) is not None]
    assert kept == list(range(count - 4096, count))


def test_wait_ends_with_the_report():
    """Whoever waits is woken by the step that brings the report, not by others."""

    async def main() -> None:
        mirror = EngineMirror()
        waiter = asyncio.create_task(mirror.wait_for_report("plan", timeout_s=10.0))
        await asyncio.sleep(0)
        mirror.observe(step(replace(REPORT, plan_id="other")))
        await asyncio.sleep(0)
        assert not waiter.done()
        mirror.observe(step(REPORT))
        assert await waiter == REPORT

    asyncio.run(main())


def test_report_that_is_there_is_not_waited_for():
    """No time passes where the report has come already."""

    async def main() -> None:
        assert await mirror_of(step(REPORT)).wait_for_report("plan", timeout_s=0.0) == REPORT

    asyncio.run(main())


def test_wait_without_report_ends():
    """A request that ended without a report does not hang its caller."""

    async def main() -> None:
        mirror = EngineMirror()
        assert await mirror.wait_for_report("plan", timeout_s=0.001) is None
        mirror.observe(step(REPORT))
        assert await mirror.wait_for_report("plan", timeout_s=0.001) == REPORT

    asyncio.run(main())


def test_all_who_wait_for_a_plan_are_woken():
    """The stream and the response headers may ask for the same report."""

    async def main() -> None:
        mirror = EngineMirror()
        waiters = [
            asyncio.create_task(mirror.wait_for_report("plan", timeout_s=10.0)) for _ in range(3)
        ]
        await asyncio.sleep(0)
        mirror.observe(step(REPORT))
        assert await asyncio.gather(*waiters) == [REPORT] * 3

    asyncio.run(main())


@pytest.mark.parametrize("kind", [StoreEventKind.EVICTED, StoreEventKind.DROPPED])
def test_residency_follows_the_store(kind):
    """A segment is resident from when it is stored to when it leaves, and again."""
    mirror = EngineMirror()
    assert not mirror.is_resident(KEY)
    mirror.observe(step(event(StoreEventKind.STORED)))
    assert mirror.is_resident(KEY)
    assert not mirror.is_resident(SegmentKey("another"))
    mirror.observe(step(event(kind)))
    assert not mirror.is_resident(KEY)
    mirror.observe(step(event(kind)))
    mirror.observe(step(event(StoreEventKind.STORED)))
    assert mirror.is_resident(KEY)


def test_events_of_one_step_are_taken_in_order():
    """What happened last in a step is what holds after it."""
    stored, evicted = event(StoreEventKind.STORED), event(StoreEventKind.EVICTED)
    assert mirror_of(step(evicted, stored)).is_resident(KEY)
    assert not mirror_of(step(stored, evicted)).is_resident(KEY)


def test_steps_that_vllm_merged_are_taken_in_order():
    """Statistics of several steps may arrive as one."""
    first = BlendStats(data=step(event(StoreEventKind.STORED), REPORT))
    last = BlendStats(
        data=step(event(StoreEventKind.EVICTED), store=replace(STORE, num_segments=0))
    )
    mirror = mirror_of(first.aggregate(last).data)
    assert not mirror.is_resident(KEY)
    assert mirror.report("plan") == REPORT
    assert mirror.store.num_segments == 0


def test_failed_compile_is_told_once():
    """A failure belongs to the compile that failed, and leaves residency alone."""
    mirror = mirror_of(
        step(event(StoreEventKind.STORED)),
        step(event(StoreEventKind.FAILED, plan_id="plan", reason="store_full")),
    )
    assert mirror.is_resident(KEY)
    assert mirror.take_compile_failure("other") is None
    assert mirror.take_compile_failure("plan") == "store_full"
    assert mirror.take_compile_failure("plan") is None


def test_failure_always_has_a_reason():
    """A failure without a reason is still a failure."""
    mirror = mirror_of(step(event(StoreEventKind.FAILED, plan_id="plan")))
    assert mirror.take_compile_failure("plan") == "unknown"


def test_oldest_failures_are_pushed_out():
    """Failures that nobody asks for do not grow without bound."""
    count = 5000
    mirror = mirror_of(
        step(
            *(
                event(StoreEventKind.FAILED, plan_id=str(number), reason="store_full")
                for number in range(count)
            )
        )
    )
    assert mirror.take_compile_failure(str(count - 4096 - 1)) is None
    assert mirror.take_compile_failure(str(count - 4096)) == "store_full"


def test_counters_are_those_last_heard():
    """The store's counters are replaced, never added up."""
    assert EngineMirror().store.num_bytes == 0
    later = replace(STORE, num_bytes=1, num_leases=0)
    assert mirror_of(step(), step(store=later)).store == later


def test_unsupported_model_is_heard_of():
    """Why a model is not blended reaches the front end."""
    outbox = Outbox(unsupported_reason="MLA", announce=True)
    assert mirror_of(outbox.take(STORE).data).unsupported_reason == "MLA"
    assert mirror_of(step()).unsupported_reason is None


def test_a_lease_that_comes_back_without_a_report_is_told():
    """Its request has ended early; the gauge does not wait for another request's report."""
    outbox = Outbox(announce=True)
    assert outbox.take(STORE) is not None
    assert outbox.take(STORE) is None
    freed = replace(STORE, num_leases=0)
    assert mirror_of(outbox.take(freed).data).store == freed
    assert outbox.take(freed) is None


def test_the_log_line_tells_plan_and_outcome_but_not_whose():
    """One line holds what was asked for and what came of it."""
    span = SegmentSpan(start=3, end=60, context=SegmentContext.FREE)
    params = BlendParams(
        plan_id="plan", tenant="someone", segments=(span,), policy=Policy.HKVD, recompute_ratio=0.25
    )
    line = describe(params, REPORT)
    assert "policy=hkvd ratio=0.25 segments=57;" in line
    assert "prompt=100 prefix=10 reused=40 recomputed=20 computed=30 charged=0.333" in line
    assert "statuses=hit,miss fallback=miss approximate" in line
    assert "someone" not in line
    assert "\n" not in line
    assert describe(params, None).endswith("segments=57; ended without a report")
    assert describe(None, None) == "no plan"


def test_logger_feeds_the_mirror():
    """vLLM's statistics hook hands over what the connector sent, and survives steps without."""
    mirror = EngineMirror()
    logger = MirrorStatLogger(mirror)
    logger.log_engine_initialized()
    logger.record(None, None)
    logger.record(SchedulerStats(), None)
    logger.record(SchedulerStats(kv_connector_stats={}), None)
    assert mirror.report("plan") is None
    logger.record(SchedulerStats(kv_connector_stats=step(REPORT)), None)
    assert mirror.report("plan") == REPORT


@pytest.mark.parametrize("leaves", ["timeout", "cancel"])
def test_waiter_that_gives_up_does_not_cost_others_the_report(leaves):
    """A client that leaves does not keep the report from another who waits for the same plan."""

    async def main() -> None:
        mirror = EngineMirror()
        patience_s = 0.001 if leaves == "timeout" else 10.0
        one = asyncio.create_task(mirror.wait_for_report("plan", patience_s))
        other = asyncio.create_task(mirror.wait_for_report("plan", 0.2))
        await asyncio.sleep(0)
        if leaves == "cancel":
            one.cancel()
        await asyncio.wait([one])
        mirror.observe(step(REPORT))
        assert await other == REPORT

    asyncio.run(main())
