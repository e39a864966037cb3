"""What requests leave behind in the scheduler role, and what they cannot do to others."""

import pytest

pytest.importorskip("vllm")

from tests.engine.vllm_steps import (
    Steps,
    blend_request,
    compile_request,
    document,
    drop_request,
    key_of,
    request_of,
)

from blend_engine.protocol import StoreEventKind

pytestmark = pytest.mark.vllm

DOC, OTHER = document(0), document(1)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    """Served, asked about only, aborted after their order, or not ours at all."""
    steps = Steps()
    steps.store(DOC)
    aborted, asked = blend_request(DOC), blend_request(OTHER)
    steps.admit(aborted)
    metadata = steps.build()
    steps.ask(asked)
    steps.finish(aborted)
    steps.finish(asked)
    steps.acknowledge(steps.worker.run(metadata))
    for request in (blend_request(DOC, OTHER), request_of(range(40), None), drop_request()):
        steps.serve(request)
    steps.run_step()
    scheduler = steps.scheduler
    assert scheduler._requests._requests == {}
    assert scheduler._blocks._blocks == {}
    assert len(scheduler._flights) == 0
    assert scheduler.take_stats() is None


def test_another_tenants_requests_leave_a_segment_alone() -> None:
    """Misses, compiles, failed loads and drops of the same text end nothing of its first owner."""
    steps = Steps()
    steps.store(DOC)
    for _ in range(3):
        assert steps.serve(blend_request(DOC, tenant="rival")).loaded_tokens == 0
    steps.store(DOC, tenant="rival")
    steps.worker.held.remove(key_of(DOC, tenant="rival"))
    assert steps.serve(blend_request(DOC, tenant="rival")).loaded_tokens == 0
    steps.serve(compile_request(DOC, tenant="rival"))
    steps.serve(drop_request(key_of(DOC, tenant="rival")))
    assert steps.serve(blend_request(DOC)).loaded_tokens == len(DOC)


def test_preempted_compile_that_has_told_its_end_only_ends() -> None:
    """Its segment may be gone by then: neither is it made again, nor has the compile failed."""
    steps = Steps()
    steps.store(DOC)
    request = compile_request(DOC, plan_id="mine")
    steps.admit(request)
    steps.run_step()
    assert [(event.kind, event.plan_id) for event in steps.events] == [
        (StoreEventKind.STORED, "mine")
    ]
    steps.serve(drop_request(key_of(DOC)))
    steps.events.clear()
    steps.admit(request, resumed=True)
    assert steps.run_step().passes == []
    assert [event for event in steps.events if event.plan_id == "mine"] == []
