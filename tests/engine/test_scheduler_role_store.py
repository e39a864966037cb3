"""The scheduler role and the store: compiles, leases, room, failed loads."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

pytest.importorskip("vllm")

from tests.engine.vllm_steps import (
    BLOCK_SIZE,
    BYTES_PER_TOKEN,
    Request,
    Steps,
    blend_request,
    compile_request,
    document,
    drop_request,
    key_of,
)

from blend_engine.messages import Capture
from blend_engine.protocol import (
    WIRE_KEY,
    WIRE_VERSION,
    FallbackReason,
    SegmentStatus,
    StoreEvent,
    StoreEventKind,
)

pytestmark = pytest.mark.vllm

DOC, OTHER, THIRD = document(0), document(1), document(2)
EVICTED, FAILED, STORED = StoreEventKind.EVICTED, StoreEventKind.FAILED, StoreEventKind.STORED


# Compiles.


def test_compile_captures_its_segment_and_is_a_hit_once_acknowledged():
    """KV is found when the workers hold it, not when it was ordered."""
    steps = Steps()
    steps.admit(compile_request(DOC, plan_id="mine"))
    metadata = steps.build()
    (order,) = metadata.passes
    assert order.capture == Capture(key=key_of(DOC), start=2, end=2 + len(DOC))
    assert order.plan.covered_end == 2 + len(DOC)
    assert steps.ask(blend_request(DOC)) == 0
    steps.acknowledge(steps.worker.run(metadata))
    assert steps.ask(blend_request(DOC)) == 1 + len(DOC)
    assert steps.events == [
        StoreEvent(
            kind=STORED,
            key=key_of(DOC),
            num_tokens=len(DOC),
            num_bytes=len(DOC) * 2,
            plan_id="mine",
        )
    ]


def test_compile_computes_all_of_its_prompt():
    """Canonical KV comes from one computation, whatever vLLM's cache holds."""
    steps = Steps()
    steps.admit(compile_request(DOC), local_blocks=[501])
    (order,) = steps.run_step().passes
    assert order.fresh_ranges == ((0, BLOCK_SIZE),)


def test_same_compile_twice_in_a_step_is_captured_once():
    """Two front ends may ask for one segment; one pass makes it."""
    steps = Steps()
    steps.admit(compile_request(DOC))
    steps.admit(compile_request(DOC))
    captures = [order.capture for order in steps.run_step().passes]
    assert captures == [Capture(key=key_of(DOC), start=2, end=2 + len(DOC)), None]
    assert [(event.kind, event.key) for event in steps.events] == [(STORED, key_of(DOC))]


def test_compile_of_a_resident_segment_makes_no_pass():
    """What is there is not made again, and the caller hears that it is there."""
    steps = Steps()
    steps.store(DOC)
    steps.serve(compile_request(DOC, plan_id="again"))
    assert [(event.kind, event.plan_id) for event in steps.events] == [(STORED, "again")]
    assert steps.scheduler.store_stats().num_segments == 1


def test_failed_compile_leaves_nothing():
    """Its room is free again, the caller hears why, and the next attempt is not in its way."""
    steps = Steps(store_tokens=len(DOC))
    steps.worker.fails_captures = True
    steps.serve(compile_request(DOC, plan_id="mine"))
    (event,) = steps.events
    assert (event.kind, event.plan_id, event.reason) == (FAILED, "mine", "out_of_memory")
    assert steps.scheduler.store_stats().num_bytes == 0
    steps.worker.fails_captures = False
    steps.store(DOC)
    assert key_of(DOC) in steps.worker.held


def test_compile_that_cannot_run_says_so():
    """A caller who waits for a compile hears of its end in every case."""
    steps = Steps(is_ready=False)
    steps.serve(compile_request(DOC, plan_id="mine"))
    (event,) = steps.events
    assert (event.kind, event.plan_id, event.reason) == (FAILED, "mine", "not_compilable")


@pytest.mark.parametrize("cut", ["vLLM", "prompt"])
def test_segment_that_the_pass_does_not_cover_is_not_captured(cut):
    """A capture beyond what the pass computes ends the worker, so it is never ordered."""
    steps = Steps()
    request = compile_request(DOC, plan_id="mine")
    if cut == "prompt":
        request.prompt_token_ids.pop()
    steps.admit(request, num_external=BLOCK_SIZE if cut == "vLLM" else None)
    for order in steps.run_step().passes:
        assert order.capture is None or order.capture.end <= order.plan.covered_end
    assert steps.events_of(STORED) == []
    assert steps.scheduler.store_stats().num_bytes == 0


def test_compile_of_what_no_lookup_would_find_takes_no_room():
    """A segment below the least length; its caller hears why."""
    steps = Steps()
    steps.serve(compile_request(DOC[:3], plan_id="mine"))
    (event,) = steps.events
    assert (event.kind, event.plan_id, event.reason) == (FAILED, "mine", "too_short")
    assert steps.scheduler.store_stats().num_bytes == 0


# Leases and room.


def test_lease_lasts_from_admission_to_acknowledgement():
    """A segment is held for a pass from when it is promised to when it was used."""
    steps = Steps()
    steps.store(DOC)
    request = blend_request(DOC)
    steps.ask(request)
    assert steps.num_leases == 0
    steps.admit(request)
    assert steps.num_leases == 1
    metadata = steps.build()
    assert steps.num_leases == 1
    steps.acknowledge(steps.worker.run(metadata))
    assert steps.num_leases == 0


def test_aborted_request_gives_its_lease_back():
    """An abort between order and acknowledgement leaks nothing, and is reported all the same."""
    steps = Steps()
    steps.store(DOC)
    request = blend_request(DOC)
    steps.admit(request)
    metadata = steps.build()
    steps.finish(request)
    assert steps.num_leases == 1
    steps.acknowledge(steps.worker.run(metadata))
    assert steps.num_leases == 0
    assert len(steps.reports) == 1


def test_a_document_behind_many_prefixes_is_stored_once_and_always_found():
    """What stands before it is no part of its name: no copies pile up, and none is ever short."""
    steps = Steps(store_tokens=2 * len(DOC))
    for number in range(6):
        steps.serve(compile_request(DOC))
        before = [document(10 + number, 3 + index) for index in range(number)]
        report = steps.serve(blend_request(*before, DOC, leading=document(20 + number, 9)))
        assert report.segments[-1] is SegmentStatus.HIT
        assert report.loaded_tokens == len(DOC)
    stats = steps.scheduler.store_stats()
    assert (stats.num_segments, stats.num_evictions) == (1, 0)
    assert stats.num_bytes == len(DOC) * BYTES_PER_TOKEN


def test_same_document_twice_in_a_prompt_is_reused_twice():
    """Each place counts: two hits, two leases, and both given back."""
    steps = Steps()
    steps.store(DOC)
    steps.admit(blend_request(DOC, DOC))
    assert steps.num_leases == 2
    steps.run_step()
    assert steps.num_leases == 0
    assert steps.reports[-1].loaded_tokens == 2 * len(DOC)


def test_full_store_evicts_the_least_recently_used():
    """Room is made by use; workers free the victim in the step that fills its room."""
    steps = Steps(store_tokens=2 * len(DOC))
    steps.store(DOC, OTHER)
    steps.serve(blend_request(DOC))
    steps.admit(compile_request(THIRD))
    metadata = steps.run_step()
    assert metadata.freed_keys == [key_of(OTHER)]
    assert [order.capture.key for order in metadata.passes] == [key_of(THIRD)]
    assert [(event.kind, event.key) for event in steps.events] == [
        (EVICTED, key_of(OTHER)),
        (STORED, key_of(THIRD)),
    ]
    assert steps.worker.held == {key_of(DOC), key_of(THIRD)}
    assert steps.scheduler.store_stats().num_evictions == 1


def test_store_that_is_full_of_leases_refuses():
    """A segment in use is never evicted; the compile fails instead, and its caller hears why."""
    steps = Steps(store_tokens=len(DOC))
    steps.store(DOC)
    steps.admit(blend_request(DOC))
    steps.admit(compile_request(OTHER, plan_id="mine"))
    metadata = steps.run_step()
    assert metadata.freed_keys == []
    assert [order.capture for order in metadata.passes] == [None, None]
    (event,) = steps.events
    assert (event.kind, event.plan_id, event.reason) == (FAILED, "mine", "store_full")
    assert steps.reports[-1].segments == (SegmentStatus.HIT,)
    steps.store(OTHER)


# Failed loads.


def test_failed_load_is_a_miss():
    """KV that is gone is computed, counted, reported, and not promised again."""
    steps = Steps()
    steps.store(DOC, OTHER)
    steps.worker.held.remove(key_of(DOC))
    report = steps.serve(blend_request(OTHER, DOC))
    assert report.segments == (SegmentStatus.HIT, SegmentStatus.FAILED)
    assert report.fallback_reason is FallbackReason.LOAD_FAILED
    assert report.loaded_tokens == len(OTHER)
    assert report.computed_tokens == report.prompt_tokens - len(OTHER)
    assert steps.scheduler.store_stats().num_load_failures == 1
    assert steps.num_leases == 0
    assert steps.serve(blend_request(DOC)).segments == (SegmentStatus.MISS,)
    steps.store(DOC)
    assert steps.serve(blend_request(DOC)).segments == (SegmentStatus.HIT,)


def test_failed_load_of_a_segment_that_others_use():
    """Two passes that miss the same KV both end well, and the segment goes once."""
    steps = Steps()
    steps.store(DOC)
    steps.worker.held.clear()
    requests = [blend_request(DOC), blend_request(DOC)]
    orders = []
    for request in requests:
        steps.admit(request)
        orders.append(steps.build())
    for metadata in orders:
        steps.acknowledge(steps.worker.run(metadata))
    assert steps.num_leases == 0
    assert steps.scheduler.store_stats().num_bytes == 0
    assert steps.run_step().freed_keys == [key_of(DOC)]


# Malformed parameters.


@pytest.mark.parametrize(
    ("sound", "changes"),
    [
        (blend_request(DOC), {"tenant": 5}),
        (blend_request(DOC), {"tenant": "\ud800"}),
        (blend_request(DOC), {"segments": [{"start": 0, "end": float("inf"), "context": "free"}]}),
        (compile_request(DOC), {"tenant": None}),
        (compile_request(DOC), {"segment": {"start": 9, "end": 2, "context": "free"}}),
        (drop_request(key_of(DOC)), {"keys": [["key"]]}),
    ],
    ids=["tenant", "surrogate", "infinite", "compile-tenant", "inverted", "unhashable"],
)
def test_damaged_parameters_mean_a_plain_request(sound, changes):
    """Values of the wrong type or range end neither the engine nor the request."""
    steps = Steps()
    sound.kv_transfer_params[WIRE_KEY]["params"].update(changes)
    assert steps.admit(sound) is not None
    assert steps.run_step().passes == []
    assert steps.reports == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("abxyz", max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text("abxyz", max_size=4), inner, max_size=3)
        ),
        max_leaves=5,
    )
)
def test_malformed_parameters_mean_a_plain_request(junk: Any):
    """The connector never raises on request data: what it cannot read is computed by vLLM."""
    steps = Steps()
    sound = blend_request(DOC)
    for wire in (
        junk,
        {WIRE_KEY: junk},
        {WIRE_KEY: {"version": WIRE_VERSION, "kind": "use", "params": junk}},
        {WIRE_KEY: {**sound.kv_transfer_params[WIRE_KEY], "kind": junk}},
    ):
        request = Request("junk", sound.prompt_token_ids, wire)
        assert steps.ask(request) == 0
        assert steps.serve(request) is None
