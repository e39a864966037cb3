"""Families that are blended: reuse in place, moves, and full recompute, on tiny random models."""

from typing import Any

import pytest
import torch
from tests.machines import CUDA_BF16, CUDA_FP16, CUDA_FP32, on_machines
from tests.models.engine import Served
from tests.models.families import BLENDED
from tests.models.moved_keys import moved_key_error, placed
from tests.real.driver import Prompt, max_logprob_difference, same_text
from tests.real.mutations import rotated_by_one_more, without_rotation

from blend_engine import model_pass
from blend_engine.protocol import Policy
from blend_engine.segments import SegmentContext, SegmentSpan

pytestmark = pytest.mark.parametrize(
    "served",
    on_machines(BLENDED, CUDA_FP32, CUDA_BF16, CUDA_FP16),
    indirect=True,
    scope="module",
)
SEGMENT = 96
VISIBLE = 1e-2


def test_it_is_blended(served: Served) -> None:
    """Nothing is refused."""
    assert served.refusal is None


def test_a_leading_segment_comes_back_as_it_was(served: Served) -> None:
    """Logits within noise of full compute, the same greedy text, and a load that is counted."""
    driver = served.driver
    ids = served.ids(1, SEGMENT + 20)
    prompt = Prompt(ids, (SegmentSpan(start=0, end=SEGMENT, context=SegmentContext.PREFIX),))
    driver.compile(prompt)
    before = driver.scheduler.store_stats().loaded_tokens
    full = driver.full(ids, max_tokens=8)
    reused = driver.blend(prompt, Policy.NONE, 0.0, max_tokens=8)
    assert driver.scheduler.store_stats().loaded_tokens - before == SEGMENT
    assert same_text(full, reused, served.noise)
    assert max_logprob_difference(full, reused) < served.noise
    assert reused.report is not None
    assert (reused.report.prefix_tokens, reused.report.approximate) == (SEGMENT, False)


@pytest.mark.parametrize("policy", [Policy.SINKS, Policy.HKVD])
def test_a_moved_segment_recomputed_equals_full_prefill(served: Served, policy: Policy) -> None:
    """Ratio 1.0 gives full prefill's distribution; full reuse visibly does not."""
    driver = served.driver
    prompt = _moved(served)
    full = driver.full(prompt.ids)
    blended = driver.blend(prompt, policy, 1.0)
    assert blended.report is not None
    assert blended.report.recomputed_tokens == blended.report.loaded_tokens == 2 * SEGMENT
    difference = max_logprob_difference(full, blended)
    assert difference < served.noise
    reused = driver.blend(prompt, Policy.NONE, 0.0)
    assert max_logprob_difference(full, reused) > max(VISIBLE, 2 * difference)


def test_selected_tokens_alone_are_recomputed(served: Served) -> None:
    """With a check layer: a peek, a selection and a pass, each on this family's own layers."""
    report = served.driver.blend(_moved(served), Policy.HKVD, 0.25, check_layer=1).report
    assert report is not None
    assert (report.recomputed_tokens, report.reused_tokens) == (SEGMENT // 2, 3 * SEGMENT // 2)


def test_moved_keys_equal_those_computed_there(served: Served) -> None:
    """At layer 0, where a key depends on its token and its position alone."""
    driver = served.driver
    ids = served.ids(2, SEGMENT)
    driver.compile_ids(SegmentContext.FREE, ids)
    driver.compile_ids(SegmentContext.PREFIX, ids)
    far = driver.stored(SegmentContext.FREE, ids)
    near = driver.stored(SegmentContext.PREFIX, ids)
    assert far.start > 200
    back, forth = placed(served, far, 0), placed(served, near, far.start)
    noise = served.machine.key_noise
    for moved, there in ((back[0], near.k_LTHD[0]), (forth[0], far.k_LTHD[0])):
        torch.testing.assert_close(moved.cpu(), there, atol=noise, rtol=0)
    torch.testing.assert_close(far.v_LTHD[0], near.v_LTHD[0], atol=noise, rtol=0)


def test_keys_of_every_layer_move(served: Served) -> None:
    """Each layer is moved by its own RoPE."""
    attached = served.driver.worker._attached
    assert attached is not None
    assert len(set(attached.table_of_layer)) == served.family.num_ropes
    assert moved_key_error(served) < served.machine.key_noise


@pytest.mark.parametrize("mutation", [without_rotation, rotated_by_one_more])
def test_wrong_rotation_is_caught(
    served: Served, mutation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys left where they were, or moved one position too far, are told from right ones."""
    monkeypatch.setattr(model_pass, "rotate_keys", mutation)
    assert moved_key_error(served) > served.machine.wrong_key


def _moved(served: Served) -> Prompt:
    """Two documents, compiled, behind text that was never seen and with more between them."""
    ids = served.ids(3, 2 * SEGMENT + 70)
    first, second = 30, 50 + SEGMENT
    spans = tuple(
        SegmentSpan(start=start, end=start + SEGMENT, context=SegmentContext.FREE)
        for start in (first, second)
    )
    prompt = Prompt(ids, spans)
    served.driver.compile(prompt)
    return prompt
