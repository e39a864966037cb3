"""The scheduler role: what is not blended although it could be found, so that nothing is wrong."""

import pytest

pytest.importorskip("vllm")

from tests.engine.vllm_steps import (
    NUM_LAYERS,
    Steps,
    blend_request,
    compile_request,
    document,
)

from blend_engine import tracking
from blend_engine.protocol import Policy, SegmentStatus
from blend_engine.segments import SegmentContext, SegmentKey

pytestmark = pytest.mark.vllm

DOC, OTHER = document(0), document(1)
HIT, MISS = SegmentStatus.HIT, SegmentStatus.MISS


@pytest.fixture
def steps() -> Steps:
    """An engine whose store holds `DOC`."""
    steps = Steps()
    steps.store(DOC)
    return steps


def test_other_tenants_equal_text_under_an_equal_key_is_a_miss(monkeypatch):
    """Whose it is is compared like the ids: no hash stands between two tenants."""
    monkeypatch.setattr(tracking, "segment_key", lambda *_arguments: SegmentKey("0"))
    steps = Steps()
    steps.store(DOC)
    rival = steps.serve(blend_request(DOC, tenant="rival"))
    assert (rival.segments, rival.loaded_tokens) == ((MISS,), 0)
    assert steps.serve(blend_request(DOC)).segments == (HIT,)


def test_a_check_layer_that_the_model_lacks_means_a_plain_request(steps):
    """Ranking by another layer than the one asked for would be an answer unlike its plan."""
    last = {"policy": Policy.HKVD, "check_layer": NUM_LAYERS - 1}
    assert steps.serve(blend_request(DOC, **last)).segments == (HIT,)
    assert steps.serve(blend_request(DOC, **{**last, "check_layer": NUM_LAYERS})) is None


@pytest.mark.parametrize("salt", [None, ""])
def test_without_a_salt_nothing_is_blended(steps, salt):
    """Its blocks would be found by every request without one; a leading segment's are exact."""
    request = blend_request(DOC)
    request.cache_salt = salt
    assert steps.ask(request) == 0
    assert steps.serve(request) is None
    steps.serve(compile_request(OTHER, SegmentContext.PREFIX))
    leading = blend_request(leading=OTHER)
    leading.cache_salt = salt
    assert steps.serve(leading).segments == (HIT,)
