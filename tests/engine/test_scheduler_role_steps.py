"""The scheduler role and work over several steps: who waits, who is spread, how it ends."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.vllm_steps import (
    Request,
    Steps,
    blend_request,
    compile_request,
    document,
    drop_request,
    key_of,
)

from blend_engine.messages import CANCELLED, BlendAck, BlendMetadata, PassOutcome
from blend_engine.protocol import BlendReport, StoreEventKind

pytestmark = pytest.mark.vllm

DOC, LONG = document(0), document(1, 60)
BUDGET = 40
SYNCHRONOUS = 30


@pytest.fixture
def steps() -> Steps:
    """Passes may compute 40 tokens a step, synchronous ones 30; the store holds `DOC`."""
    steps = Steps(budget_tokens=BUDGET)
    steps.store(DOC)
    return steps


def ask(steps: Steps, request: Request) -> tuple[int | None, bool]:
    return steps.scheduler.get_num_new_matched_tokens(request, 0)


def admit(steps: Steps, request: Request) -> None:
    """Ask and allocate, without a place in the step's forward."""
    answer, is_async = ask(steps, request)
    assert answer
    assert is_async
    steps.scheduler.update_state_after_alloc(request, list(range(1, 20)), answer)


def outcome_of(metadata: BlendMetadata, **fields: Any) -> BlendAck:
    pass_ids = [turn.pass_id for turn in metadata.slices]
    return BlendAck(
        ready=True,
        outcomes=[PassOutcome(pass_id=pass_id, **fields) for pass_id in pass_ids],
    )


def test_long_compile_is_spread_and_short_one_is_not(steps: Steps) -> None:
    assert ask(steps, compile_request(LONG)) == (62, True)
    assert ask(steps, compile_request(document(2))) == (22, False)


def test_long_pass_is_spread_by_what_it_computes(steps: Steps) -> None:
    """Not by what it loads: the same range at a small ratio is synchronous."""
    steps.store(document(3, 20), document(4, 20))
    documents = (DOC, document(3, 20), document(4, 20))
    assert ask(steps, blend_request(*documents, recompute_ratio=0.1)) == (63, False)
    assert ask(steps, blend_request(*documents, recompute_ratio=0.9)) == (63, True)


def test_a_step_that_is_full_defers(steps: Steps) -> None:
    """Two small passes do not fit one step; the second is admitted to the next."""
    first, second = blend_request(DOC, recompute_ratio=0.9), blend_request(DOC, recompute_ratio=0.9)
    assert steps.admit(first) is not None
    assert ask(steps, second) == (None, False)
    assert len(steps.run_step().passes) == 1
    assert steps.admit(second) is not None
    assert len(steps.run_step().passes) == 1


def test_what_computes_nothing_is_never_deferred(steps: Steps) -> None:
    """A request without hits adds nothing to a full step."""
    steps.admit(blend_request(DOC, recompute_ratio=0.9))
    assert ask(steps, blend_request(document(9))) == (0, False)


def test_slices_begin_a_step_later_and_go_on_until_the_end(steps: Steps) -> None:
    """The order goes with the first, and nothing is ordered twice."""
    request = compile_request(LONG)
    admit(steps, request)
    assert steps.build().slices == []
    turns = [steps.build() for _ in range(3)]
    assert [turn.slices[0].order is None for turn in turns] == [False, True, True]
    assert all(turn.slice_tokens == BUDGET for turn in turns)
    order = turns[0].slices[0].order
    assert order is not None
    assert (order.piece_tokens, order.plan.covered_end) == (BUDGET // 4, 62)
    steps.acknowledge(outcome_of(turns[-1], captured=True))
    assert steps.build() == BlendMetadata()
    assert steps.events_of(StoreEventKind.STORED) == [key_of(LONG)]


def test_vllm_takes_the_request_up_without_a_second_report(steps: Steps) -> None:
    """It allocates once more then, with no external tokens; that is no plan of its own."""
    steps.store(document(5, 20))
    request = blend_request(DOC, document(5, 20), recompute_ratio=0.9)
    admit(steps, request)
    steps.build()
    steps.acknowledge(outcome_of(steps.build(), reused_tokens=4, recomputed_tokens=36))
    (report,) = steps.reports
    assert isinstance(report, BlendReport)
    steps.scheduler.update_state_after_alloc(request, list(range(1, 20)), 0)
    steps.acknowledge(BlendAck(ready=True))
    assert len(steps.reports) == 1


def test_synchronous_passes_leave_a_piece(steps: Steps) -> None:
    admit(steps, compile_request(LONG))
    steps.build()
    steps.admit(blend_request(DOC, recompute_ratio=0.9))
    metadata = steps.build()
    assert len(metadata.passes) == 1
    assert metadata.slice_tokens == BUDGET - (1 + 18)


def test_one_long_compile_at_a_time(steps: Steps) -> None:
    """Also within one step; a user's long pass is not held up by it."""
    steps.store(document(5, 20))
    admit(steps, compile_request(LONG))
    assert ask(steps, compile_request(document(6, 60))) == (None, False)
    steps.build()
    assert ask(steps, compile_request(document(6, 60))) == (None, False)
    request = blend_request(DOC, document(5, 20), recompute_ratio=0.9)
    admit(steps, request)
    steps.build()
    turns = steps.build().slices
    assert [turn.request_id == request.request_id for turn in turns] == [True, False]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_abort_stops_the_pass_and_frees_what_it_held(steps: Steps, num_steps: int) -> None:
    """Before its first slice and after; the workers say when its blocks are free."""
    request = compile_request(LONG)
    before = steps.scheduler.store_stats()
    admit(steps, request)
    for _ in range(num_steps):
        steps.build()
    steps.finish(request)
    metadata = steps.build()
    (cancellation,) = metadata.cancelled
    assert (cancellation.request_id, cancellation.is_started) == (
        request.request_id,
        num_steps == 2,
    )
    assert metadata.slices == []
    steps.acknowledge(
        BlendAck(
            ready=True,
            outcomes=[PassOutcome(pass_id=cancellation.pass_id, error=CANCELLED)],
        )
    )
    assert steps.scheduler.store_stats() == before
    # The room that was reserved is given back by name, though nothing came to be there.
    assert steps.build() == BlendMetadata(freed_keys=[key_of(LONG)])
    (event,) = steps.events
    assert (event.kind, event.reason) == (StoreEventKind.FAILED, CANCELLED)


def test_aborted_use_makes_no_report_and_keeps_no_lease(steps: Steps) -> None:
    steps.store(document(5, 20))
    request = blend_request(DOC, document(5, 20), recompute_ratio=0.9)
    admit(steps, request)
    assert steps.num_leases == 2
    steps.build()
    steps.finish(request)
    (cancellation,) = steps.build().cancelled
    outcome = PassOutcome(pass_id=cancellation.pass_id, error=CANCELLED)
    steps.acknowledge(BlendAck(ready=True, outcomes=[outcome]))
    assert steps.num_leases == 0
    assert steps.reports == []


def test_drop_waits_for_a_long_pass(steps: Steps) -> None:
    """As for a synchronous one: its leases are why."""
    steps.store(document(5, 20))
    admit(steps, blend_request(DOC, document(5, 20), recompute_ratio=0.9))
    steps.build()
    drop = drop_request(key_of(DOC))
    assert ask(steps, drop) == (None, False)
    steps.acknowledge(outcome_of(steps.build(), reused_tokens=4, recomputed_tokens=36))
    assert ask(steps, drop) == (0, False)
