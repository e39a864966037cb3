"""Laws of the selection policies: which hit tokens are recomputed."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from blend_engine.plan import Hit
from blend_engine.segments import SegmentContext, SegmentKey
from blend_engine.selection import blended_hits, hit_positions, select_hkvd, select_sinks

RELAXED = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
RATIOS = st.floats(0.0, 1.0)


def hit(
    start: int, end: int, *, offset: int = 0, segment_tokens: int | None = None, exact: bool = False
) -> Hit:
    return Hit(
        start=start,
        end=end,
        offset=offset,
        segment_tokens=offset + end - start if segment_tokens is None else segment_tokens,
        key=SegmentKey(f"{start}-{end}"),
        context=SegmentContext.PREFIX if exact else SegmentContext.FREE,
        segment_index=0,
    )


@st.composite
def hit_lists(draw: st.DrawFn) -> list[Hit]:
    """Sorted, disjoint hits, the first perhaps exact, each perhaps cut on either side."""
    hits: list[Hit] = []
    position = 0
    for index in range(draw(st.integers(0, 4))):
        start = position + draw(st.integers(0, 5))
        end = start + draw(st.integers(1, 20))
        offset = draw(st.integers(0, 10))
        cut = draw(st.integers(0, 5))
        exact = index == 0 and draw(st.booleans())
        segment_tokens = offset + end - start + cut
        hits.append(hit(start, end, offset=offset, segment_tokens=segment_tokens, exact=exact))
        position = end
    return hits


def scores_of(hits: list[Hit]) -> torch.Tensor:
    """Deviations in which every value occurs about twice."""
    count = sum(hit.num_tokens for hit in blended_hits(hits))
    return (torch.arange(count) * 7919 % max(1, count // 2)).float()


def positions_in(hits: list[Hit]) -> list[int]:
    return [position for hit in hits for position in range(hit.start, hit.end)]


@RELAXED
@given(hit_lists())
def test_positions_are_those_of_the_hits_in_order(hits):
    """Positions are int64 and follow the hits."""
    got = hit_positions(hits)
    assert got.dtype == torch.int64
    assert got.tolist() == positions_in(hits)


@RELAXED
@given(hit_lists(), RATIOS)
def test_sinks_are_the_first_tokens_of_each_segment_that_are_left(hits, ratio):
    """A hit that starts inside its segment has lost that many of the segment's first tokens."""
    want = [
        position
        for each in hits
        if each.context is SegmentContext.FREE
        for position in range(each.start, each.end)
        if position - each.start + each.offset < math.ceil(ratio * each.segment_tokens)
    ]
    got = select_sinks(hits, ratio)
    assert got.dtype == torch.int64
    assert got.tolist() == want


@pytest.mark.parametrize(
    ("offset", "want"), [(0, [100, 101, 102, 103]), (3, [100]), (4, []), (30, [])]
)
def test_sinks_already_in_vllms_cache_are_not_selected(offset, want):
    """A local prefix hit that ends inside a document takes from its sinks, never below none."""
    cut = hit(100, 110, offset=offset, segment_tokens=40)
    assert select_sinks([cut], 0.10).tolist() == want


@RELAXED
@given(hit_lists(), RATIOS)
def test_hkvd_selects_its_budget_by_deviation(hits, ratio):
    """The budget is ceil(ratio * n) of all blended hit tokens; those left deviate no more."""
    score_T = scores_of(hits)
    candidates = positions_in(blended_hits(hits))
    got = select_hkvd(hits, ratio, score_T)
    assert got.dtype == torch.int64
    assert len(got) == math.ceil(ratio * len(candidates))
    assert got.tolist() == sorted(set(got.tolist()))
    score = dict(zip(candidates, score_T.tolist(), strict=True))
    left = [score[position] for position in candidates if position not in set(got.tolist())]
    assert all(score[position] >= max(left, default=0.0) for position in got.tolist())


def test_hkvd_spends_one_budget_over_all_documents():
    """A document that deviates more gets more of the budget."""
    hits = [hit(0, 10), hit(20, 30)]
    score_T = torch.cat([torch.zeros(10), torch.ones(10)])
    assert select_hkvd(hits, 0.5, score_T).tolist() == list(range(20, 30))


@RELAXED
@given(hit_lists(), RATIOS)
def test_exact_hits_are_never_selected(hits, ratio):
    """KV that full prefill would compute as well is not computed again."""
    exact = set(positions_in([each for each in hits if each not in blended_hits(hits)]))
    assert exact.isdisjoint(select_sinks(hits, ratio).tolist())
    assert exact.isdisjoint(select_hkvd(hits, ratio, scores_of(hits)).tolist())


def test_blended_hits_are_those_out_of_first_place():
    """Only the `prefix` context is exact."""
    leading, document = hit(0, 10, exact=True), hit(10, 20)
    assert blended_hits([leading, document]) == [document]


@RELAXED
@given(hit_lists(), RATIOS, RATIOS)
def test_more_recompute_only_adds_tokens(hits, one, other):
    """A higher ratio recomputes everything that a lower one does."""
    low, high = sorted((one, other))
    score_T = scores_of(hits)
    assert set(select_sinks(hits, low).tolist()) <= set(select_sinks(hits, high).tolist())
    assert set(select_hkvd(hits, low, score_T).tolist()) <= set(
        select_hkvd(hits, high, score_T).tolist()
    )


@RELAXED
@given(hit_lists())
def test_ratio_one_selects_every_blended_token_and_ratio_zero_none(hits):
    """The ends of the range are full recompute and full reuse."""
    everything = positions_in(blended_hits(hits))
    assert select_sinks(hits, 1.0).tolist() == everything
    assert select_hkvd(hits, 1.0, scores_of(hits)).tolist() == everything
    assert select_sinks(hits, 0.0).tolist() == []
    assert select_hkvd(hits, 0.0, scores_of(hits)).tolist() == []


@pytest.mark.parametrize("select", [select_sinks, lambda h, r: select_hkvd(h, r, scores_of(h))])
def test_small_ratio_of_a_short_segment_is_one_token(select):
    """A ratio above zero never rounds down to nothing."""
    assert len(select([hit(5, 8)], 0.01)) == 1


def test_no_hits_select_nothing():
    """A pass without hits has nothing to recompute."""
    assert select_sinks([], 0.5).tolist() == []
    assert select_hkvd([], 0.5, torch.empty(0)).tolist() == []
    assert hit_positions([]).dtype == torch.int64
