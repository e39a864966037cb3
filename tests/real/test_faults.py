"""Faults injected into a real engine: the affected tokens are computed afresh, and nothing is lost.

The oracle is the same prompt planned with the affected segments as misses.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.real.driver import TENANT, Answer, Driver, Prompt, max_logprob_difference
from tests.real.texts import fact_document, question

from blend_engine.model_pass import ModelPass
from blend_engine.plan import Hit
from blend_engine.pool import SegmentPool, StoredSegment
from blend_engine.protocol import FallbackReason, Policy, SegmentStatus
from blend_engine.segments import SegmentContext, segment_key

LEADING, FIRST, SECOND, THIRD = range(4)

Damage = Callable[[SegmentPool, Any, StoredSegment], None]


@pytest.fixture
def prompt(driver: Driver) -> Iterator[Prompt]:
    """Three stored documents."""
    made = driver.prompt(
        [driver.encode(fact_document(seed, 4)) for seed in (81, 82, 83)], question(82)
    )
    driver.compile(made)
    yield made
    assert driver.scheduler.store_stats().num_leases == 0


def without(prompt: Prompt, *indices: int) -> Prompt:
    """The same ids, with some segments unnamed, so that they are computed."""
    return replace(
        prompt,
        spans=tuple(span for index, span in enumerate(prompt.spans) if index not in indices),
    )


def check_failed(driver: Driver, answer: Answer, oracle: Answer, failed: set[int]) -> None:
    """The answer is the oracle's, and the report and the counters name what failed."""
    assert max_logprob_difference(answer, oracle) < 1e-4
    assert answer.token_ids == oracle.token_ids
    report = answer.report
    assert report is not None
    found = {i for i, status in enumerate(report.segments) if status is SegmentStatus.FAILED}
    assert found == failed
    assert report.fallback_reason is FallbackReason.LOAD_FAILED
    tokens = (report.prefix_tokens, report.reused_tokens, report.recomputed_tokens)
    assert sum(tokens) + report.computed_tokens == report.prompt_tokens
    assert driver.scheduler.store_stats().num_leases == 0


def check_whole(answer: Answer) -> None:
    """Every segment is a hit."""
    assert answer.report is not None
    assert set(answer.report.segments) == {SegmentStatus.HIT}


def flip_a_key(pool: SegmentPool, key: Any, stored: StoredSegment) -> None:
    with torch.inference_mode():
        stored.k_LTHD[3, 5, 0, 0] += 1.0


def lose_the_last_value(pool: SegmentPool, key: Any, stored: StoredSegment) -> None:
    with torch.inference_mode():
        stored.v_LTHD[-1, -1, -1, -1] = 0.0


def truncate(pool: SegmentPool, key: Any, stored: StoredSegment) -> None:
    shorter = (stored.k_LTHD[:, :-1].clone(), stored.v_LTHD[:, :-1].clone())
    pool.put(key, StoredSegment.seal(*shorter, stored.start))


def truncate_values(pool: SegmentPool, key: Any, stored: StoredSegment) -> None:
    pool.put(key, StoredSegment.seal(stored.k_LTHD, stored.v_LTHD[:, :-1].clone(), stored.start))


def remove(pool: SegmentPool, key: Any, stored: StoredSegment) -> None:
    """As if it had been evicted between the plan and the load."""
    pool.free(key)


@pytest.mark.parametrize(
    "damage", [flip_a_key, lose_the_last_value, truncate, truncate_values, remove]
)
@pytest.mark.parametrize("policy", [Policy.SINKS, Policy.HKVD])
def test_damaged_kv_is_computed(
    driver: Driver, prompt: Prompt, damage: Damage, policy: Policy
) -> None:
    oracle = driver.blend(without(prompt, SECOND), policy, 0.2, max_tokens=4)
    key = segment_key(TENANT, SegmentContext.FREE, prompt.segment(SECOND))
    stored = driver.worker.pool.get(key)
    assert stored is not None
    failures = driver.scheduler.store_stats().num_load_failures
    damage(driver.worker.pool, key, stored)
    answer = driver.blend(prompt, policy, 0.2, max_tokens=4)
    check_failed(driver, answer, oracle, {SECOND})
    assert driver.scheduler.store_stats().num_load_failures == failures + 1
    # It is not found again until it is made again.
    assert driver.worker.pool.get(key) is None or not driver.scheduler._index.lookup(
        key, prompt.segment(SECOND), (TENANT, SegmentContext.FREE)
    )
    driver.compile_ids(SegmentContext.FREE, prompt.segment(SECOND))
    check_whole(driver.blend(prompt, policy, 0.2))


def test_damaged_leading_segment_is_computed(driver: Driver, prompt: Prompt) -> None:
    oracle = driver.blend(without(prompt, LEADING), Policy.SINKS, 0.2, max_tokens=4)
    stored = driver.stored(SegmentContext.PREFIX, prompt.segment(LEADING))
    flip_a_key(driver.worker.pool, None, stored)
    answer = driver.blend(prompt, Policy.SINKS, 0.2, max_tokens=4)
    assert max_logprob_difference(answer, oracle) < 1e-4
    assert answer.report is not None
    assert answer.report.segments[LEADING] is SegmentStatus.FAILED


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("out of memory")])
@pytest.mark.parametrize("step", ["rotate", "_write"])
@pytest.mark.parametrize("layer", [0, 17])
def test_load_without_memory_is_computed(
    driver: Driver,
    prompt: Prompt,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    layer: int,
    error: Exception,
) -> None:
    """Some layers may be written by then. The stored KV stays: another request can load it."""
    oracle = driver.blend(without(prompt, SECOND), Policy.SINKS, 0.2, max_tokens=4)
    load, original = ModelPass.load, getattr(ModelPass, step)
    loading: list[Hit] = []
    num_layers = driver.worker._attached.num_layers
    one_at_a_time = [range(index, index + 1) for index in range(num_layers)]

    def remember(run: ModelPass, hit: Hit, *arguments: Any) -> Any:
        loading.append(hit)
        return load(run, hit, *arguments)

    def failing(run: ModelPass, *arguments: Any) -> Any:
        first_layer = arguments[2].start if step == "rotate" else arguments[0]
        if loading[-1].segment_index == SECOND and first_layer == layer:
            raise error
        return original(run, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ModelPass, "_layers_at_once", lambda *_: one_at_a_time)
        patch.setattr(ModelPass, "load", remember)
        patch.setattr(ModelPass, step, failing)
        answer = driver.blend(prompt, Policy.SINKS, 0.2, max_tokens=4)
    check_failed(driver, answer, oracle, {SECOND})
    check_whole(driver.blend(prompt, Policy.SINKS, 0.2))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("a bug")])
@pytest.mark.parametrize("step", ["peek", "compute"])
def test_pass_that_raises_is_repeated_without_stored_kv(
    driver: Driver,
    prompt: Prompt,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: Exception,
) -> None:
    oracle = driver.full(prompt.ids, max_tokens=4)
    original = getattr(ModelPass, step)
    calls = []

    def failing_once(run: ModelPass, *arguments: Any, **options: Any) -> Any:
        calls.append(step)
        if len(calls) == 1:
            raise error
        return original(run, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ModelPass, step, failing_once)
        answer = driver.blend(prompt, Policy.HKVD, 0.2, max_tokens=4)
    check_failed(driver, answer, oracle, {LEADING, FIRST, SECOND, THIRD})
    check_whole(driver.blend(prompt, Policy.HKVD, 0.2))


def test_slow_load_changes_nothing(
    driver: Driver, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = driver.blend(prompt, Policy.SINKS, 0.2, max_tokens=4)
    original = SegmentPool.get

    def slow(pool: SegmentPool, key: Any) -> StoredSegment | None:
        time.sleep(0.3)
        return original(pool, key)

    monkeypatch.setattr(SegmentPool, "get", slow)
    answer = driver.blend(prompt, Policy.SINKS, 0.2, max_tokens=4)
    assert max_logprob_difference(answer, quick) < 1e-5
    assert answer.report is not None
    assert answer.report.fallback_reason is None


@pytest.mark.parametrize("step", ["allocate", "compute_and_capture"])
def test_compile_that_fails_stores_nothing(
    driver: Driver, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ids = driver.encode(fact_document({"allocate": 84, "compute_and_capture": 86}[step], 4))
    taken = driver.scheduler.store_stats().num_bytes

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(ModelPass, step, failing)
        driver.compile_ids(SegmentContext.FREE, ids)
    assert driver.stored(SegmentContext.FREE, ids) is None
    assert driver.scheduler.store_stats().num_bytes == taken
    driver.compile_ids(SegmentContext.FREE, ids)
    assert driver.stored(SegmentContext.FREE, ids) is not None


def test_full_store_keeps_what_it_has(
    driver: Driver, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment for which no room can be made is served by computing it."""
    index = driver.scheduler._index
    monkeypatch.setattr(index, "_budget_bytes", index.num_bytes)
    monkeypatch.setattr(index, "reserve", lambda key, token_ids, owner: False)
    more = driver.prompt([driver.encode(fact_document(seed, 4)) for seed in (81, 85)], question(85))
    driver.compile_ids(SegmentContext.FREE, more.segment(SECOND))
    assert driver.stored(SegmentContext.FREE, more.segment(SECOND)) is None
    oracle = driver.blend(without(more, SECOND), Policy.SINKS, 0.2, max_tokens=4)
    answer = driver.blend(more, Policy.SINKS, 0.2, max_tokens=4)
    assert answer.token_ids == oracle.token_ids
    assert answer.report is not None
    assert answer.report.segments == (SegmentStatus.HIT, SegmentStatus.HIT, SegmentStatus.MISS)
    assert driver.stored(SegmentContext.FREE, prompt.segment(THIRD)) is not None
