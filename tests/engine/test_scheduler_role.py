"""The scheduler role, step by step: what it answers, orders, leases and reports."""

import pytest

pytest.importorskip("vllm")

from tests.engine.vllm_steps import (
    BLOCK_SIZE,
    QUESTION,
    ConnectorOutput,
    Steps,
    blend_request,
    compile_request,
    document,
    key_of,
    request_of,
)

from blend_engine.messages import BlendAck, BlendMetadata
from blend_engine.protocol import (
    BlendParams,
    BlendReport,
    FallbackReason,
    Policy,
    SegmentStatus,
)
from blend_engine.segments import SegmentContext, SegmentSpan

pytestmark = pytest.mark.vllm

DOC, OTHER = document(0), document(1)
HIT, MISS = SegmentStatus.HIT, SegmentStatus.MISS


@pytest.fixture
def steps() -> Steps:
    """An engine whose store holds `DOC`."""
    steps = Steps()
    steps.store(DOC)
    return steps


def total(report: BlendReport) -> int:
    return (
        report.prefix_tokens
        + report.reused_tokens
        + report.recomputed_tokens
        + report.computed_tokens
    )


# What it answers.


def test_range_reaches_the_end_of_the_last_hit(steps):
    """The question is vLLM's, everything before it the pass's."""
    assert steps.ask(blend_request(OTHER, DOC)) == 1 + len(OTHER) + 1 + len(DOC)
    assert steps.ask(blend_request(DOC, OTHER)) == 1 + len(DOC)
    assert steps.ask(blend_request(OTHER)) == 0


def test_last_token_is_left_to_vllm(steps):
    """A prompt that ends with its document leaves one token to sample from."""
    assert steps.ask(blend_request(DOC, question=())) == len(DOC)


def test_local_hit_shortens_the_range(steps):
    """Only what vLLM's own cache lacks is announced, also from inside a document."""
    assert steps.ask(blend_request(DOC), BLOCK_SIZE) == 1 + len(DOC) - BLOCK_SIZE
    assert steps.ask(blend_request(DOC, question=range(50)), 2 * BLOCK_SIZE) == 0


def test_question_has_no_effects(steps):
    """Asking any number of times, with any local hit, takes nothing and tells nobody."""
    request = blend_request(DOC, OTHER)
    before = steps.scheduler.store_stats()
    for local_tokens in (0, 0, BLOCK_SIZE, 0, 2 * BLOCK_SIZE, 0):
        answer = steps.ask(request, local_tokens)
        assert answer == max(0, 1 + len(DOC) - local_tokens)
    assert steps.ask(compile_request(OTHER)) == 2 + len(OTHER)
    assert steps.scheduler.store_stats() == before
    assert steps.scheduler.take_stats() is None
    assert steps.build() == BlendMetadata()


def test_last_answer_before_admission_counts(steps):
    """A request that was asked about with another local hit is planned with the one it has."""
    request = blend_request(DOC)
    steps.ask(request, 0)
    steps.admit(request, local_blocks=[501])
    (order,) = steps.run_step().passes
    assert (order.plan.num_computed, order.plan.covered_end) == (BLOCK_SIZE, 1 + len(DOC))


def test_nothing_is_planned_before_the_workers_hold_the_model():
    """A request that comes first is computed, and says that nothing was blended."""
    steps = Steps(is_ready=False)
    request = blend_request(DOC)
    report = steps.serve(request)
    assert report.computed_tokens == len(request.prompt_token_ids)
    assert report.fallback_reason is FallbackReason.UNSUPPORTED_MODEL


def test_unsupported_model_is_served_without_blending(steps):
    """The workers' refusal is announced once and ends all planning."""
    steps.acknowledge(BlendAck(ready=False, unsupported_reason="MLA"))
    assert steps.ask(blend_request(DOC)) == 0
    assert steps.ask(compile_request(OTHER)) == 0
    assert steps.scheduler.take_stats() is None
    steps.scheduler.update_connector_output(None)
    steps.acknowledge(None)
    assert steps.ask(blend_request(DOC)) == 0


def test_readiness_reaches_the_front_end():
    """The first acknowledgement is told even where nothing else happened."""
    steps = Steps(is_ready=False)
    assert steps.scheduler.take_stats() is None
    ack = BlendAck(ready=False, unsupported_reason="MLA")
    steps.scheduler.update_connector_output(ConnectorOutput(ack))
    assert steps.scheduler.take_stats().data["unsupported_reason"] == "MLA"
    assert steps.scheduler.take_stats() is None


def test_request_that_may_not_reuse_is_computed(steps):
    """Prompt logprobs need every token, and an adapter's KV is not the base model's."""
    for name in ("skip_reading_prefix_cache", "lora_request"):
        request = blend_request(DOC)
        setattr(request, name, True)
        assert steps.ask(request) == 0
        assert steps.serve(request).computed_tokens == len(request.prompt_token_ids)


def test_other_tenants_segment_is_a_miss(steps):
    """KV of one tenant is never found by another."""
    assert steps.ask(blend_request(DOC, tenant="rival")) == 0


def test_short_segment_is_not_looked_up(steps):
    """A segment below the least length is computed and says so."""
    report = steps.serve(blend_request(DOC[:3]))
    assert report.segments == (SegmentStatus.TOO_SHORT,)
    assert report.fallback_reason is FallbackReason.TOO_SHORT


def test_segment_larger_than_the_store_is_named_so(steps):
    """It can never be kept, so nobody is told to compile it again."""
    ids = range(steps.scheduler.store_stats().budget_bytes + 1)
    report = steps.serve(blend_request(ids))
    assert report.segments == (SegmentStatus.TOO_LARGE,)
    assert report.fallback_reason is FallbackReason.STORE_FULL


# What it orders.


def test_order_carries_the_request(steps):
    """The worker gets the ids of the covered range, the blocks and the policy."""
    request = blend_request(DOC, policy=Policy.HKVD, recompute_ratio=0.25, check_layer=3)
    block_ids = steps.admit(request)
    (order,) = steps.run_step().passes
    assert order.token_ids.tolist() == request.prompt_token_ids[: 1 + len(DOC)]
    assert order.block_ids == tuple(block_ids)
    assert (order.policy, order.recompute_ratio, order.check_layer) == (Policy.HKVD, 0.25, 3)
    assert order.capture is None
    assert [hit.key for hit in order.plan.hits] == [key_of(DOC)]


def test_passes_run_in_the_order_of_admission(steps):
    """A pass may read what the one before it has written."""
    requests = [blend_request(DOC, question=[number]) for number in range(3)]
    block_ids = [tuple(steps.admit(request)) for request in requests]
    passes = steps.run_step().passes
    assert [order.block_ids for order in passes] == block_ids
    assert len({order.pass_id for order in passes}) == 3


def test_order_is_given_once(steps):
    """A step without admissions has no passes."""
    steps.admit(blend_request(DOC))
    assert len(steps.run_step().passes) == 1
    assert steps.run_step() == BlendMetadata()


def test_count_rounded_down_by_vllm_is_kept(steps):
    """The pass covers what vLLM has admitted; the rest of the document is vLLM's to compute."""
    request = blend_request(DOC)
    report = steps.serve(request, num_external=BLOCK_SIZE)
    assert report.loaded_tokens == BLOCK_SIZE - 1
    assert total(report) == report.prompt_tokens
    assert steps.num_leases == 0


def test_range_refused_by_vllm_makes_no_pass(steps):
    """vLLM may take none of what it was offered."""
    report = steps.serve(blend_request(DOC), num_external=0)
    assert report.computed_tokens == report.prompt_tokens
    assert (report.loaded_tokens, steps.num_leases) == (0, 0)


def test_document_cut_off_by_vllm_is_no_hit(steps):
    """A document that vLLM has computed after all is not reported as reused, and has a reason."""
    steps.store(OTHER)
    report = steps.serve(blend_request(DOC, OTHER), num_external=BLOCK_SIZE)
    assert report.loaded_tokens == BLOCK_SIZE - 1
    assert report.segments[1] is not HIT
    assert report.fallback_reason is not None


# Same-step hazard.


def test_blocks_that_another_forward_writes_in_this_step_are_fresh(steps):
    """A local hit on blocks published by a request of the same step holds no KV yet."""
    first = blend_request(OTHER, DOC, question=range(60))
    second = blend_request(OTHER, DOC, question=range(60))
    shared = steps.admit(first, num_external=0)[:1]
    steps.admit(second, local_blocks=shared)
    (order,) = steps.run_step().passes
    assert order.fresh_ranges == ((0, BLOCK_SIZE),)
    report = steps.reports[-1]
    assert (report.prefix_tokens, total(report)) == (0, report.prompt_tokens)


def test_part_of_a_shared_block_that_a_pass_wrote_is_not_fresh(steps):
    """Passes run in order, so what an earlier one covers is there; its forward's part is not."""
    first = blend_request(DOC, question=range(60))
    second = blend_request(DOC, OTHER, DOC)
    shared = steps.admit(first)[:2]
    steps.admit(second, local_blocks=shared)
    assert steps.run_step().passes[1].fresh_ranges == ((1 + len(DOC), 2 * BLOCK_SIZE),)


def test_blocks_of_earlier_steps_are_not_fresh(steps):
    """Only a step's own writes are missing when its passes run."""
    first = blend_request(OTHER, DOC, question=range(60))
    shared = steps.admit(first, num_external=0)[:1]
    steps.run_step()
    steps.continue_request(first, None, len(first.prompt_token_ids))
    steps.admit(blend_request(OTHER, DOC), local_blocks=shared)
    (order,) = steps.run_step().passes
    assert order.fresh_ranges == ()
    assert steps.reports[-1].prefix_tokens == BLOCK_SIZE


def test_running_prefill_is_a_hazard_too(steps):
    """A chunk of a request admitted earlier writes its blocks in this step."""
    first = blend_request(OTHER, OTHER, DOC)
    blocks = steps.admit(first, num_external=0)
    steps.output.num_scheduled_tokens[first.request_id] = BLOCK_SIZE
    steps.output.scheduled_new_reqs[-1].block_ids = (blocks[:1],)
    steps.run_step()
    steps.continue_request(first, blocks[1:], BLOCK_SIZE, BLOCK_SIZE)
    steps.admit(blend_request(OTHER, OTHER, DOC), local_blocks=blocks[:2])
    (order,) = steps.run_step().passes
    assert order.fresh_ranges == ((BLOCK_SIZE, 2 * BLOCK_SIZE),)


@pytest.mark.parametrize("known_to_workers", [True, False], ids=["cached", "new"])
def test_resumed_request_has_new_blocks(steps, known_to_workers):
    """After preemption a request writes where it was put again, not where it was before."""
    first = blend_request(OTHER, OTHER, DOC, question=range(60))
    old = steps.admit(first, num_external=0)
    steps.run_step()
    new = steps.admit(first, num_external=0, resumed=known_to_workers)
    steps.admit(blend_request(OTHER, OTHER, DOC), local_blocks=old[:2])
    steps.admit(blend_request(OTHER, OTHER, DOC), local_blocks=new[:2])
    stale, shared = steps.run_step().passes
    assert stale.fresh_ranges == ()
    assert shared.fresh_ranges == ((0, 2 * BLOCK_SIZE),)


# What it reports.


def test_report_accounts_for_every_token(steps):
    """prefix + reused + recomputed + computed is the prompt; the sinks are ceil(ratio * length)."""
    request = blend_request(OTHER, DOC, question=QUESTION, recompute_ratio=0.12)
    report = steps.serve(request)
    assert report == BlendReport(
        plan_id=report.plan_id,
        prompt_tokens=1 + len(OTHER) + 1 + len(DOC) + len(QUESTION),
        prefix_tokens=0,
        reused_tokens=len(DOC) - 3,
        recomputed_tokens=3,
        computed_tokens=1 + len(OTHER) + 1 + len(QUESTION),
        approximate=True,
        recompute_ratio=3 / len(DOC),
        charged_ratio=0.0,
        segments=(MISS, HIT),
        fallback_reason=FallbackReason.MISS,
        loaded_tokens=len(DOC),
    )
    assert steps.scheduler.store_stats().loaded_tokens == len(DOC)


def test_leading_segment_in_first_place_is_exact(steps):
    """KV compiled behind nothing and used behind nothing counts as prefix, not as approximate."""
    leading = document(8)
    steps.serve(compile_request(leading, SegmentContext.PREFIX))
    report = steps.serve(blend_request(leading=leading))
    assert (report.prefix_tokens, report.loaded_tokens) == (len(leading), len(leading))
    assert (report.approximate, report.fallback_reason) == (False, None)
    assert steps.serve(blend_request(DOC, leading=leading)).approximate


@pytest.mark.parametrize("name", ["skip_reading_prefix_cache", "lora_request"])
def test_request_that_may_not_reuse_claims_no_hit(steps, name):
    """A prompt that was computed from first to last token does not call its documents reused."""
    request = blend_request(DOC)
    setattr(request, name, True)
    report = steps.serve(request)
    assert report.computed_tokens == report.prompt_tokens
    assert report.segments != (HIT,)
    assert report.fallback_reason is not None


def test_question_after_admission_does_not_change_the_report(steps):
    """What a pass did is told as it was admitted, whatever is asked before it is acknowledged."""
    request = blend_request(OTHER, DOC)
    steps.admit(request)
    metadata = steps.build()
    steps.store(OTHER)
    steps.ask(request)
    steps.acknowledge(steps.worker.run(metadata))
    assert steps.reports[-1].segments == (MISS, HIT)


def test_empty_document_is_no_reason_for_a_fallback(steps):
    """Empty spans are ignored: a prompt whose documents are all reused has nothing to explain."""
    report = steps.serve(blend_request([], DOC))
    assert report.loaded_tokens == len(DOC)
    assert report.fallback_reason is None


@pytest.mark.parametrize("is_resident", [True, False])
def test_document_that_vllm_has_but_for_the_prompts_last_token_is_a_hit(steps, is_resident):
    """That token is vLLM's in any case: nothing was left to load, so nothing was missed."""
    last = document(3, BLOCK_SIZE)
    if is_resident:
        steps.store(last)
    report = steps.serve(blend_request(last, question=()), local_blocks=[501])
    assert report.segments == (HIT,)
    assert report.fallback_reason is None
    assert report.computed_tokens == 1


@pytest.mark.parametrize("under_blend_salt", [True, False])
def test_local_hit_under_a_blend_salt_is_approximate(steps, under_blend_salt):
    """vLLM's own cached blocks may be blended ones where the salt says so."""
    request = blend_request(OTHER, approximate_salt=under_blend_salt)
    report = steps.serve(request, local_blocks=[501])
    assert report.prefix_tokens == BLOCK_SIZE
    assert report.approximate is under_blend_salt


@pytest.mark.parametrize("num_external", [None, 0], ids=["pass", "no pass"])
def test_plan_is_reported_once(steps, num_external):
    """A request that is preempted and comes back, with a pass or without, reports no more."""
    request = blend_request(DOC)
    steps.admit(request)
    steps.run_step()
    assert steps.admit(request, resumed=True, num_external=num_external) is not None
    steps.run_step()
    assert [report.segments for report in steps.reports] == [(HIT,)]
    assert steps.num_leases == 0


def test_resumed_request_may_have_more_than_its_prompt(steps):
    """vLLM's cache may also hold what a preempted request had generated."""
    request = blend_request(DOC)
    steps.admit(request)
    steps.run_step()
    assert steps.ask(request, 4 * BLOCK_SIZE) == 0
    steps.scheduler.update_state_after_alloc(request, [1, 2, 3, 4, 5], 0)
    assert steps.run_step().passes == []


def test_request_without_our_parameters_leaves_no_trace(steps):
    """Plain requests, other connectors' and embeddings are vLLM's alone."""
    embeds = blend_request(DOC)
    foreign = request_of(range(40), None)
    foreign.kv_transfer_params = {"do_remote_prefill": True}
    for request in (request_of(range(40), None), foreign):
        assert steps.ask(request) == 0
        assert steps.serve(request) is None
    embeds.prompt_token_ids = None
    assert steps.ask(embeds) == 0
    steps.scheduler.update_state_after_alloc(embeds, [1, 2], 0)
    assert steps.run_step().passes == []


def test_spans_beyond_the_prompt_mean_a_plain_request(steps):
    """Spans that cannot be meant are not planned from, and nothing is raised."""
    span = SegmentSpan(start=1, end=100, context=SegmentContext.FREE)
    params = BlendParams(plan_id="p", tenant="acme", segments=(span,))
    assert steps.serve(request_of([7, *DOC], params)) is None
