"""Invariants of `make_plan`: what a pass covers, and which part of each hit it loads."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from blend_engine.plan import Plan, make_plan
from blend_engine.segments import SegmentContext, SegmentKey, SegmentSpan

RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Case:
    """One request as the scheduler role sees it."""

    spans: tuple[SegmentSpan, ...]
    keys: tuple[SegmentKey | None, ...]
    num_computed: int
    prompt_len: int

    def plan(self, covered_end: int | None = None) -> Plan:
        return make_plan(
            self.spans,
            self.keys,
            num_computed=self.num_computed,
            prompt_len=self.prompt_len,
            covered_end=covered_end,
        )

    def loadable(self, end: int) -> set[int]:
        """Positions below `end` that are resident and not computed yet."""
        return {
            position
            for span, key in zip(self.spans, self.keys, strict=True)
            if key is not None
            for position in range(max(span.start, self.num_computed), min(span.end, end))
        }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cuts = sorted(draw(st.lists(st.integers(0, 60), max_size=12)))
    spans = tuple(
        SegmentSpan(start=start, end=end, context=SegmentContext.FREE)
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    )
    keys = tuple(
        SegmentKey(f"key-{index}") if draw(st.booleans()) else None for index in range(len(spans))
    )
    prompt_len = draw(st.integers(max([1, *cuts]), 70))
    return Case(
        spans=spans,
        keys=keys,
        num_computed=draw(st.integers(0, prompt_len - 1)),
        prompt_len=prompt_len,
    )


@st.composite
def cases_with_fixed_end(draw: st.DrawFn) -> tuple[Case, int]:
    case = draw(cases())
    return case, draw(st.integers(case.num_computed, case.prompt_len - 1))


def one_document(
    start: int = 16, end: int = 48, *, num_computed: int = 0, prompt_len: int = 64
) -> Case:
    span = SegmentSpan(start=start, end=end, context=SegmentContext.FREE)
    return Case((span,), (SegmentKey("document"),), num_computed, prompt_len)


@RELAXED
@given(cases())
def test_hits_are_sorted_and_disjoint_inside_the_covered_range(case):
    """No slot is loaded twice, and none outside the range that was announced to vLLM."""
    plan = case.plan()
    previous_end = plan.num_computed
    for hit in plan.hits:
        assert previous_end <= hit.start < hit.end <= plan.covered_end
        previous_end = hit.end


@RELAXED
@given(cases())
def test_covered_range_starts_at_what_is_computed_and_ends_with_the_last_hit(case):
    """The count for vLLM is contiguous; misses behind the last hit are vLLM's own work."""
    plan = case.plan()
    assert plan.num_computed == case.num_computed
    assert plan.num_external_tokens == plan.covered_end - case.num_computed >= 0
    assert plan.covered_end == (plan.hits[-1].end if plan.hits else case.num_computed)


@RELAXED
@given(cases())
def test_a_token_is_left_for_vllm(case):
    """vLLM computes the prompt's last token itself, since it samples from it."""
    assert case.plan().covered_end <= case.prompt_len - 1


@RELAXED
@given(cases())
def test_every_resident_token_is_loaded_once(case):
    """First misses stop nothing: each hit counts on its own, at most up to the last token."""
    loaded = [position for hit in case.plan().hits for position in range(hit.start, hit.end)]
    assert len(loaded) == len(set(loaded))
    assert set(loaded) == case.loadable(case.prompt_len - 1)


@RELAXED
@given(cases())
def test_hit_names_its_segment_and_where_in_it_it_starts(case):
    """The worker finds the right rows of the right segment."""
    for hit in case.plan().hits:
        span = case.spans[hit.segment_index]
        assert hit.key == case.keys[hit.segment_index]
        assert hit.offset == hit.start - span.start
        assert hit.segment_tokens == span.num_tokens
        assert hit.num_tokens == hit.end - hit.start
        assert 0 <= hit.offset < hit.offset + hit.num_tokens <= hit.segment_tokens


@RELAXED
@given(cases_with_fixed_end())
def test_fixed_end_is_kept_and_cuts_hits(case_and_end):
    """Where vLLM has admitted a range, the plan covers that range and loads nothing behind it."""
    case, end = case_and_end
    plan = case.plan(covered_end=end)
    assert plan.covered_end == end
    loaded = {position for hit in plan.hits for position in range(hit.start, hit.end)}
    assert loaded == case.loadable(end)


@RELAXED
@given(cases())
def test_fixing_the_planned_end_changes_nothing(case):
    """A plan made again for the count that was announced is the same plan."""
    plan = case.plan()
    assert case.plan(covered_end=plan.covered_end) == plan


def test_local_hit_that_ends_inside_a_document_leaves_its_rest():
    """What is left of a hit is planned from where vLLM's own cache ends."""
    (hit,) = one_document(16, 48, num_computed=32).plan().hits
    assert (hit.start, hit.end, hit.offset, hit.segment_tokens) == (32, 48, 16, 32)


@pytest.mark.parametrize("num_computed", [48, 63])
def test_local_hit_past_a_document_leaves_nothing_to_do(num_computed):
    """Nothing that vLLM has already is loaded again."""
    plan = one_document(16, 48, num_computed=num_computed).plan()
    assert plan == Plan(num_computed=num_computed, covered_end=num_computed, hits=())


def test_document_at_the_very_end_loses_its_last_token():
    """A prompt that is known entirely still leaves its last token to vLLM."""
    plan = one_document(0, 64).plan()
    assert plan.covered_end == 63
    assert [(hit.start, hit.end) for hit in plan.hits] == [(0, 63)]


@pytest.mark.parametrize("position", [0, 20, 64])
def test_empty_span_is_no_hit(position):
    """A segment without tokens is ignored, wherever it stands."""
    assert one_document(position, position).plan() == Plan(num_computed=0, covered_end=0, hits=())


def test_miss_before_a_hit_is_covered_and_miss_behind_it_is_not():
    """The pass fills the gaps between hits; the tail goes through vLLM's own prefill."""
    spans = tuple(
        SegmentSpan(start=start, end=start + 10, context=SegmentContext.FREE)
        for start in (0, 20, 40)
    )
    plan = Case(spans, (None, SegmentKey("middle"), None), 0, 60).plan()
    assert [(hit.start, hit.end, hit.segment_index) for hit in plan.hits] == [(20, 30, 1)]
    assert (plan.num_computed, plan.covered_end) == (0, 30)


@pytest.mark.parametrize("context", list(SegmentContext))
def test_hit_keeps_its_context(context):
    """Exact and approximate hits stay apart on their way to the worker."""
    span = SegmentSpan(start=0, end=8, context=context)
    (hit,) = Case((span,), (SegmentKey("leading"),), 0, 16).plan().hits
    assert hit.context is context


def test_every_span_needs_a_verdict():
    """Spans and keys of different number are a mistake of ours, and loud."""
    span = SegmentSpan(start=0, end=8, context=SegmentContext.FREE)
    with pytest.raises(ValueError, match="zip"):
        Case((span,), (), 0, 16).plan()
