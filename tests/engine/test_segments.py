"""Laws of `segment_key`: what tells two segments' KV apart."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from blend_engine.segments import (
    WRAPPER_VERSION,
    SegmentContext,
    SegmentSpan,
    segment_key,
)

RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TENANTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
SEGMENTS = st.tuples(TENANTS, st.sampled_from(SegmentContext), TOKENS)


@RELAXED
@given(SEGMENTS, SEGMENTS)
def test_key_separates_tenant_context_and_tokens(one, other):
    """Another owner, another text before it or another text: another key."""
    assume(one != other)
    assert segment_key(*one) != segment_key(*other)


@RELAXED
@given(SEGMENTS)
def test_each_field_counts_alone(segment):
    """A key changes with a single field, the others being equal."""
    tenant, context, token_ids = segment
    key = segment_key(tenant, context, token_ids)
    other = next(each for each in SegmentContext if each is not context)
    assert key != segment_key(tenant + "x", context, token_ids)
    assert key != segment_key(tenant, other, token_ids)
    assert key != segment_key(tenant, context, [*token_ids, 0])


def test_order_of_tokens_counts():
    """The same tokens in another order are another text."""
    assert segment_key("t", SegmentContext.FREE, [1, 2]) != segment_key(
        "t", SegmentContext.FREE, [2, 1]
    )


def test_tenant_name_cannot_imitate_another_tenants_segment():
    """Fields are length-prefixed: equal bytes end to end are still two keys."""
    tail = "free" + WRAPPER_VERSION
    filler = "x" * (-len(tail) % 8)
    imitated = np.frombuffer((filler + tail).encode(), dtype=np.int64)
    victim = segment_key("acme", SegmentContext.FREE, [*imitated, 5, 6])
    attacker = segment_key("acme" + tail + filler, SegmentContext.FREE, [5, 6])
    assert victim != attacker


def test_split_between_tenants_cannot_move():
    """What ends one field cannot begin the next."""
    assert segment_key("a", SegmentContext.FREE, []) != segment_key(
        "afree", SegmentContext.FREE, []
    )
    assert segment_key("", SegmentContext.PREFIX, []) != segment_key(
        "prefix", SegmentContext.PREFIX, []
    )


@RELAXED
@given(SEGMENTS)
def test_key_is_the_same_whatever_holds_the_tokens(segment):
    """A front end with lists and a scheduler with int32 arrays look under one key."""
    tenant, context, token_ids = segment
    key = segment_key(tenant, context, token_ids)
    assert segment_key(tenant, context, tuple(token_ids)) == key
    for dtype in (np.int32, np.int64):
        padded = np.asarray([7, *token_ids, 7], dtype=dtype)
        assert segment_key(tenant, context, padded[1:-1]) == key
    every_other = np.repeat(np.asarray(token_ids, dtype=np.int32), 2)[::2]
    assert segment_key(tenant, context, every_other) == key


def test_key_is_the_same_in_every_process():
    """No hash seed, no address: a key written down yesterday is found today."""
    assert segment_key("acme", SegmentContext.FREE, [1, 2, 3]) == (
        "f2ea84ebb5a1f23865691294e4a36068b61f3f9c0dd246cbd6cb3a4f917a650c"
    )


@pytest.mark.parametrize(("start", "end", "length"), [(0, 0, 0), (3, 3, 0), (3, 10, 7)])
def test_span_knows_its_length(start, end, length):
    """A span is half open."""
    assert SegmentSpan(start=start, end=end, context=SegmentContext.FREE).num_tokens == length
