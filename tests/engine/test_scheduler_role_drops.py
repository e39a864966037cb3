"""The scheduler role: what removes segments from its store."""

import pytest

pytest.importorskip("vllm")

from tests.engine.vllm_steps import (
    Steps,
    blend_request,
    compile_request,
    document,
    drop_request,
    key_of,
)

from blend_engine.messages import BlendMetadata
from blend_engine.protocol import SegmentStatus, StoreEventKind
from blend_engine.segments import SegmentKey

pytestmark = pytest.mark.vllm

DOC, OTHER = document(0), document(1)
DROPPED = StoreEventKind.DROPPED


@pytest.fixture
def steps_in_use() -> tuple[Steps, BlendMetadata]:
    """A pass is under way that uses `DOC`."""
    steps = Steps()
    steps.store(DOC)
    steps.admit(blend_request(DOC))
    return steps, steps.build()


def test_drop_frees_the_workers_once():
    """A dropped segment is a miss from then on, and its KV goes with the same step."""
    steps = Steps()
    steps.store(DOC)
    assert steps.admit(drop_request(key_of(DOC), plan_id="mine")) is not None
    assert steps.ask(blend_request(DOC)) == 0
    assert steps.run_step().freed_keys == [key_of(DOC)]
    assert steps.run_step().freed_keys == []
    dropped = [event for event in steps.events if event.kind is DROPPED]
    assert [(event.key, event.plan_id) for event in dropped] == [(key_of(DOC), "mine")]
    assert steps.scheduler.store_stats().num_bytes == 0


@pytest.mark.parametrize("built", [False, True], ids=["admitted", "ordered"])
def test_drop_waits_for_leases(built):
    """A drop is deferred while a pass needs the segment, and done after it."""
    steps = Steps()
    steps.store(DOC, OTHER)
    steps.admit(blend_request(DOC))
    metadata = steps.build() if built else None
    drop = drop_request(key_of(OTHER), key_of(DOC))
    assert steps.admit(drop) is None
    assert steps.admit(drop) is None
    metadata = metadata or steps.build()
    steps.acknowledge(steps.worker.run(metadata))
    assert steps.events_of(DROPPED) == []
    assert steps.reports[-1].segments == (SegmentStatus.HIT,)
    assert steps.admit(drop) is not None
    assert set(steps.run_step().freed_keys) == {key_of(DOC), key_of(OTHER)}
    assert steps.worker.held == set()


def test_drop_waits_for_a_compile():
    """What is being made is dropped when it is made, and does not come back."""
    steps = Steps()
    steps.admit(compile_request(DOC))
    drop = drop_request(key_of(DOC))
    assert steps.admit(drop) is None
    steps.run_step()
    steps.serve(drop)
    assert steps.ask(blend_request(DOC)) == 0
    assert steps.worker.held == set()


def test_drop_of_others_does_not_wait():
    """A lease holds its own segment and no other."""
    steps = Steps()
    steps.store(DOC, OTHER)
    steps.admit(blend_request(DOC))
    assert steps.admit(drop_request(key_of(OTHER), SegmentKey("unknown"))) is not None
    assert steps.run_step().freed_keys == [key_of(OTHER)]


def test_what_a_drop_waits_for_is_not_taken_up_again(steps_in_use):
    """A segment that every request uses would never go; who comes later computes it."""
    steps, metadata = steps_in_use
    drop = drop_request(key_of(DOC))
    assert steps.admit(drop) is None
    assert steps.ask(blend_request(DOC)) == 0
    assert steps.ask(compile_request(DOC)) is None
    steps.acknowledge(steps.worker.run(metadata))
    assert steps.admit(drop) is not None
    steps.run_step()
    assert steps.worker.held == set()
    steps.finish(drop)
    steps.store(DOC)
    assert steps.serve(blend_request(DOC)).segments == (SegmentStatus.HIT,)


def test_a_drop_that_is_given_up_leaves_the_segment(steps_in_use):
    steps, metadata = steps_in_use
    drop = drop_request(key_of(DOC))
    assert steps.admit(drop) is None
    steps.finish(drop)
    steps.acknowledge(steps.worker.run(metadata))
    assert steps.serve(blend_request(DOC)).segments == (SegmentStatus.HIT,)


def test_reset_forgets_every_segment():
    """KV of other weights is nobody's: the next request computes, the workers free."""
    steps = Steps()
    steps.store(DOC, OTHER)
    assert steps.scheduler.reset_cache()
    assert steps.serve(blend_request(DOC)).segments == (SegmentStatus.MISS,)
    assert steps.worker.held == set()
    steps.admit(compile_request(DOC))
    assert not steps.scheduler.reset_cache()
