"""The budget of passes: what one costs, which are large, what a step has left."""

import itertools

import pytest
from hypothesis import given, strategies as st

from blend_engine.budget import PassBudget, StepSpending, pass_tokens
from blend_engine.plan import Plan, make_plan
from blend_engine.protocol import BlendParams, CompileParams, Policy
from blend_engine.segments import SegmentContext, SegmentSpan, segment_key

NUM_LAYERS = 10


def plan_of(*, num_computed: int = 0, lengths: tuple[int, ...] = (40, 60)) -> Plan:
    """A leading segment of 20 tokens, then documents, five fresh tokens before each."""
    spans, at = [SegmentSpan(start=0, end=20, context=SegmentContext.PREFIX)], 20
    for length in lengths:
        at += 5
        spans.append(SegmentSpan(start=at, end=at + length, context=SegmentContext.FREE))
        at += length
    keys = [segment_key("t", span.context, range(span.start, span.end)) for span in spans]
    return make_plan(spans, keys, num_computed=num_computed, prompt_len=at + 30)


def params_of(policy: Policy, ratio: float, check_layer: int = 1) -> BlendParams:
    return BlendParams(
        plan_id="p",
        tenant="t",
        segments=(),
        policy=policy,
        recompute_ratio=ratio,
        check_layer=check_layer,
    )


@pytest.mark.parametrize(
    ("policy", "ratio", "check_layer", "expected"),
    [
        (Policy.NONE, 0.5, 1, 10),
        (Policy.SINKS, 0.0, 1, 10),
        (Policy.SINKS, 0.25, 1, 10 + 10 + 15),
        (Policy.SINKS, 0.01, 1, 10 + 1 + 1),
        (Policy.SINKS, 1.0, 1, 110),
        (Policy.HKVD, 0.25, 1, 10 + 25 + 110 // 10),
        (Policy.HKVD, 0.25, 0, 10 + 25),
        (Policy.HKVD, 0.25, 99, 10 + 25 + 110 * 9 // 10),
        (Policy.HKVD, 1.0, 1, 110),
    ],
)
def test_pass_costs_what_it_computes(
    policy: Policy, ratio: float, check_layer: int, expected: int
) -> None:
    """Gaps, selected tokens, and the peek by its share of the layers; exact hits are free."""
    assert pass_tokens(plan_of(), params_of(policy, ratio, check_layer), NUM_LAYERS) == expected


def test_local_hit_takes_its_part_of_the_selection() -> None:
    """Sinks that vLLM's own cache holds already are not computed again."""
    plan = plan_of(num_computed=30)
    assert pass_tokens(plan, params_of(Policy.SINKS, 0.25), NUM_LAYERS) == 5 + 5 + 15


@pytest.mark.parametrize("num_computed", [0, 64])
def test_compile_costs_all_that_it_covers(num_computed: int) -> None:
    """Also what vLLM has cached of its prompt, for it is computed again."""
    span = SegmentSpan(start=10, end=90, context=SegmentContext.FREE)
    params = CompileParams(plan_id="c", tenant="t", segment=span)
    plan = Plan(num_computed=num_computed, covered_end=90, hits=())
    assert pass_tokens(plan, params, NUM_LAYERS) == 90


@given(st.integers(2, 5000), st.integers(1, 5000), st.lists(st.integers(0, 6000)))
def test_step_never_exceeds_its_budget(step_tokens: int, limit: int, passes: list[int]) -> None:
    """Whatever joins, a piece is left for asynchronous passes and the sum stays in the budget."""
    budget = PassBudget.of_steps(step_tokens, limit)
    assert 1 <= budget.piece_tokens <= limit
    spending, joined = StepSpending(budget), 0
    for tokens in passes:
        if not spending.is_large(tokens) and spending.fits(tokens):
            spending.take(tokens)
            joined += tokens
    left = spending.end_step()
    assert left >= budget.piece_tokens
    assert joined + left == step_tokens


@given(st.integers(2, 5000), st.lists(st.integers(0, 6000), min_size=1))
def test_every_small_pass_joins_in_the_end(step_tokens: int, passes: list[int]) -> None:
    """What is deferred fits an empty step, so nothing waits for ever."""
    spending = StepSpending(PassBudget.of_steps(step_tokens, step_tokens))
    waiting = [tokens for tokens in passes if not spending.is_large(tokens)]
    for _ in itertools.repeat(None, len(passes)):
        left = []
        for tokens in waiting:
            if spending.fits(tokens):
                spending.take(tokens)
            else:
                left.append(tokens)
        waiting = left
        spending.end_step()
    assert waiting == []


def test_large_is_a_matter_of_length_alone() -> None:
    """The same segment is compiled in the same pieces whatever else its step holds."""
    spending = StepSpending(PassBudget.of_steps(64, 64))
    before = [spending.is_large(tokens) for tokens in range(100)]
    spending.take(40)
    assert [spending.is_large(tokens) for tokens in range(100)] == before
    assert before.index(True) == 49
