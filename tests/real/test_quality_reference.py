"""What serves and what evaluates are one thing: the same prompt and policy, the same answer."""

import pytest
import torch
from tests.real.driver import Driver, Prompt
from tests.real.texts import fact_document, question

from blend_engine.protocol import Policy
from blend_engine.quality.arms import parse_arm
from blend_engine.quality.evaluator import Evaluator
from blend_engine.quality.model import QualityModel
from blend_engine.segments import SegmentContext

TOLERANCE = 2e-3
"""Log-probabilities: two fp32 implementations over 30 layers. Full reuse is off by over 0.1."""


@pytest.fixture(scope="module")
def evaluator(driver: Driver) -> Evaluator:
    """The quality reference of the driver's model, on its device."""
    device = driver.worker._attached.device.type
    return Evaluator(QualityModel(driver.model, device=device), driver.tokenizer)


@pytest.fixture(scope="module")
def prompt(driver: Driver) -> Prompt:
    """Three compiled documents of different lengths."""
    documents = [driver.encode(fact_document(seed, 3 + seed % 3)) for seed in (41, 42, 43)]
    made = driver.prompt(documents, question(42))
    driver.compile(made)
    return made


@pytest.mark.parametrize(
    ("policy", "ratio", "select"),
    [
        (Policy.NONE, 0.0, "none"),
        (Policy.SINKS, 0.1, "sinks@0.1"),
        (Policy.SINKS, 0.5, "sinks@0.5"),
        # The engine's ratio is of recomputed tokens; an arm's includes the check layer.
        (Policy.HKVD, 0.15, f"hkvd@{0.15 + 1 / 30}"),
        (Policy.HKVD, 0.5, f"hkvd@{0.5 + 1 / 30}"),
    ],
)
def test_the_engine_answers_as_the_reference(
    driver: Driver,
    evaluator: Evaluator,
    prompt: Prompt,
    policy: Policy,
    ratio: float,
    select: str,
) -> None:
    served = driver.blend(prompt, policy, ratio)
    full = driver.full(prompt.ids)
    spans = [span for span in prompt.spans if span.context is SegmentContext.FREE]
    documents = [(span.start, span.end) for span in spans]
    arms = [parse_arm(f"ballast/{select}")]
    truth, found = evaluator.outcomes(prompt.ids, documents, arms, num_steps=1)
    off = _distance(served.logprobs_V, found.logits_SV[0])
    assert _distance(full.logprobs_V, truth.logits_SV[0]) < TOLERANCE
    assert off < TOLERANCE
    assert _distance(served.logprobs_V, truth.logits_SV[0]) > 10 * TOLERANCE
    assert served.report is not None
    assert served.report.charged_ratio == pytest.approx(found.charged_ratio, abs=0.01)


def _distance(logprobs_V: torch.Tensor, logits_V: object) -> float:
    other = torch.as_tensor(logits_V).log_softmax(-1)
    likely = other > -12  # of what is all but impossible, fp32 keeps fewer places
    return float((logprobs_V.cpu() - other)[likely].abs().max())
