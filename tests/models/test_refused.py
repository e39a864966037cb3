"""Families and configurations that are not blended: named at attach, then served exactly."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.machines import CUDA_BF16, on_machines
from tests.models.engine import Served
from tests.models.families import REFUSED
from tests.real.driver import Prompt, max_logprob_difference, same_text

from blend_engine.protocol import FallbackReason, Policy
from blend_engine.segments import SegmentContext, SegmentSpan

SEGMENT = 96
refused = pytest.mark.parametrize(
    "served", on_machines(REFUSED, CUDA_BF16), indirect=True, scope="module"
)


@refused
def test_the_reason_names_the_cause(served: Served) -> None:
    """What an operator reads in the log."""
    assert served.refusal is not None
    assert served.family.reason in served.refusal


@refused
def test_requests_are_served_exactly(served: Served) -> None:
    """Blend parameters change nothing but the report, which says why."""
    driver = served.driver
    ids = served.ids(1, SEGMENT + 40)
    span = SegmentSpan(start=20, end=20 + SEGMENT, context=SegmentContext.FREE)
    prompt = Prompt(ids, (span,))
    driver.compile(prompt)
    assert driver.stored(SegmentContext.FREE, prompt.segment(0)) is None
    full = driver.full(ids, max_tokens=8)
    answer = driver.blend(prompt, Policy.SINKS, 0.1, max_tokens=8)
    assert same_text(full, answer, served.noise)
    assert max_logprob_difference(full, answer) < served.noise
    assert answer.report is not None
    assert answer.report.fallback_reason is FallbackReason.UNSUPPORTED_MODEL
    assert (answer.report.loaded_tokens, answer.report.computed_tokens) == (0, len(ids))
    assert not answer.report.approximate


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline parallel"),
        ({"parallel_config.tensor_parallel_size": 2}, "tensor parallel"),
        ({"parallel_config.data_parallel_size": 2}, "data parallel"),
        ({"model_config.use_mla": True}, "MLA"),
        ({"model_config.is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config.is_multimodal_model": True}, "multimodal"),
        ({"model_config.is_hybrid": True}, "recurrent state"),
        ({"model_config.is_attention_free": True}, "no attention"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_configurations_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    """By the configuration alone, before any layer is looked at."""
    from blend_engine.attached import UnsupportedModel, attach

    config = SimpleNamespace(
        model_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, data_parallel_size=1
        ),
        lora_config=None,
        speculative_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split(".")
        holder = getattr(config, parents[0]) if parents else config
        setattr(holder, name, value)
    model: Any = None
    with pytest.raises(UnsupportedModel, match=reason):
        attach(model, config, SimpleNamespace(kv_cache_groups=[object()]), {})
