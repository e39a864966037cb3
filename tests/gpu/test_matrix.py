"""Every configuration gives the answers of full prefill where it must, and says what it did."""

from dataclasses import replace

import pytest
import torch
from tests.gpu.configurations import Configuration
from tests.gpu.prompts import DOCUMENT, blend_together, moved, with_leading_segment
from tests.models.engine import Served
from tests.real.driver import max_logprob_difference, same_text

from blend_engine import flights
from blend_engine.attached import cache_of
from blend_engine.protocol import FallbackReason, Policy, SegmentStatus

VISIBLE = 1e-2
POLICIES = [Policy.SINKS, Policy.HKVD]


def test_it_runs_as_configured(served: Served, configuration: Configuration) -> None:
    """Blending is on, on the backend, runner, graphs, scheduling and layout that the id names."""
    assert served.refusal is None
    driver = served.driver
    attached = driver.worker._attached
    assert attached is not None
    layer = attached.layers[attached.layer_names[0]]
    assert layer.get_attn_backend().get_name() == configuration.backend
    settings = driver.llm.llm_engine.vllm_config
    assert bool(settings.scheduler_config.async_scheduling) == configuration.is_async
    mode = settings.compilation_config.cudagraph_mode
    assert mode.has_full_cudagraphs() == configuration.has_graphs
    (runner,) = driver.llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)
    assert runner == configuration.runner_module or not configuration.runner_module
    if configuration.backend == "FLASH_ATTN":
        assert cache_of(layer).shape[-1] == 2 * layer.head_size, "keys and values are packed"
    if "kv_cache_dtype" in configuration.engine:
        assert cache_of(layer).element_size() == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_ratio_one_equals_full_prefill(served: Served, policy: Policy) -> None:
    """Two moved documents, recomputed; full reuse of the same two visibly differs."""
    driver = served.driver
    prompt = moved(served, 1)
    full = driver.full(prompt.ids, max_tokens=8)
    loaded = driver.scheduler.store_stats().loaded_tokens
    blended = driver.blend(prompt, policy, 1.0, max_tokens=8)
    assert driver.scheduler.store_stats().loaded_tokens - loaded == 2 * DOCUMENT
    assert blended.report is not None
    assert blended.report.recomputed_tokens == 2 * DOCUMENT
    difference = max_logprob_difference(full, blended)
    assert difference < served.noise
    assert same_text(full, blended, served.noise)
    reused = driver.blend(prompt, Policy.NONE, 0.0)
    assert max_logprob_difference(full, reused) > max(VISIBLE, 2 * difference)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_recomputed_is_nearer(served: Served, policy: Policy) -> None:
    """Half of the tokens recomputed: what was asked for, and nearer to full prefill than none."""
    driver = served.driver
    differences = {0.0: 0.0, 0.5: 0.0}
    for seed in range(5):
        prompt = moved(served, 10 + seed)
        full = driver.full(prompt.ids)
        for ratio in differences:
            blended = driver.blend(prompt, policy, ratio)
            assert blended.report is not None
            assert blended.report.recomputed_tokens == 2 * DOCUMENT * ratio
            differences[ratio] += max_logprob_difference(full, blended)
    assert differences[0.5] < differences[0.0]


def test_a_leading_segment_comes_back_as_it_was(served: Served) -> None:
    """In place, behind what it was computed behind: the same greedy text, nothing approximate."""
    driver = served.driver
    prompt = with_leading_segment(served)
    full = driver.full(prompt.ids, max_tokens=32)
    driver.compile(prompt)
    loaded = driver.scheduler.store_stats().loaded_tokens
    reused = driver.blend(prompt, Policy.SINKS, 0.1, max_tokens=32)
    assert driver.scheduler.store_stats().loaded_tokens - loaded == prompt.spans[0].num_tokens
    assert same_text(full, reused, served.noise)
    assert max_logprob_difference(full, reused) < served.noise
    assert reused.report is not None
    assert reused.report.prefix_tokens == prompt.spans[0].num_tokens
    assert not reused.report.approximate


@pytest.mark.parametrize("policy", POLICIES)
def test_damaged_kv_is_computed(served: Served, policy: Policy) -> None:
    """The answer is that of a plan in which the damaged document is a miss."""
    driver = served.driver
    prompt = moved(served, 2)
    first, second = prompt.spans
    oracle = driver.blend(replace(prompt, spans=(first,)), policy, 0.25, max_tokens=4)
    with torch.inference_mode():
        driver.stored(second.context, prompt.segment(1)).k_LTHD[1, 5, 0, 0] += 1.0
    answer = driver.blend(prompt, policy, 0.25, max_tokens=4)
    assert answer.report is not None
    assert answer.report.segments == (SegmentStatus.HIT, SegmentStatus.FAILED)
    assert answer.report.fallback_reason is FallbackReason.LOAD_FAILED
    assert max_logprob_difference(oracle, answer) < served.noise
    assert same_text(oracle, answer, served.noise)


def test_blocks_that_the_forward_has_yet_to_write(served: Served) -> None:
    """A blended request hits blocks of a plain one that is admitted in the same step."""
    together, alone = blend_together(served)
    assert together.report is not None
    assert together.report.reused_tokens > 0
    assert max_logprob_difference(alone, together) < served.noise


def test_without_the_rule_the_answer_is_wrong(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pair, trusting those blocks: so the test above can fail."""
    monkeypatch.setattr(flights, "fresh_ranges", lambda *_args, **_kwargs: ())
    together, alone = blend_together(served)
    assert max_logprob_difference(alone, together) > max(VISIBLE, served.noise)
