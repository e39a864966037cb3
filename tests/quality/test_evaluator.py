"""The evaluator: the same prompt under several arms."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blend_engine.quality.arms import parse_arm
from blend_engine.quality.blending import Prompt
from blend_engine.quality.contexts import UnknownContext
from blend_engine.quality.evaluator import Evaluator, Outcome
from blend_engine.quality.model import QualityModel


def _outcomes(
    model: QualityModel, tokenizer: Any, prompt: Prompt, *arms: str
) -> dict[str, Outcome]:
    found = Evaluator(model, tokenizer).outcomes(
        prompt.ids_T.tolist(),
        prompt.documents,
        [parse_arm(arm) for arm in arms],
        num_steps=5,
        candidates=[(7, 8), (9,)],
    )
    return {outcome.arm: outcome for outcome in found}


def test_candidates_are_rated_as_the_model_itself_does(
    model: QualityModel, tokenizer: Any, prompt: Prompt
) -> None:
    full = _outcomes(model, tokenizer, prompt)["full"]
    ids = torch.cat([prompt.ids_T, torch.tensor([7, 8])])
    state = model.state(torch.arange(len(ids)))
    hidden = model.run(ids, state, torch.arange(len(ids)))
    logprobs = model.logits(hidden).log_softmax(-1)
    start = prompt.num_tokens - 1
    expected = logprobs[start, 7] + logprobs[start + 1, 8]
    assert full.candidate_logprobs[0] == pytest.approx(float(expected), abs=1e-3)
    assert full.candidate_logprobs[1] == pytest.approx(float(logprobs[start, 9]), abs=1e-3)
    assert full.continuation == tuple(full.logits_SV.argmax(-1))


def test_recomputing_all_gives_what_full_prefill_gives(
    model: QualityModel, tokenizer: Any, prompt: Prompt
) -> None:
    found = _outcomes(model, tokenizer, prompt, "alone/all@1", "alone/none")
    full, everything, nothing = found["full"], found["alone/all@1"], found["alone/none"]
    np.testing.assert_allclose(everything.logits_SV, full.logits_SV, atol=2e-4)
    assert everything.candidate_logprobs == pytest.approx(full.candidate_logprobs, abs=1e-3)
    assert max(everything.attention_deviation_L) < 1e-4
    assert max(nothing.value_deviation_L[1:]) > 0.05
    assert max(nothing.attention_deviation_L) > 1e-3
    # Layer 0 knows no context: a moved key is a computed one.
    assert nothing.key_deviation_L[0] < 1e-5


def test_the_order_of_arms_does_not_matter(
    model: QualityModel, tokenizer: Any, prompt: Prompt
) -> None:
    arms = ("ballast/sinks@0.2", "alone/question@0.2", "ballast/none", "alone/random@0.2/shift:1")
    one, other = (_outcomes(model, tokenizer, prompt, *each) for each in (arms, arms[::-1]))
    for arm in arms:
        np.testing.assert_array_equal(one[arm].logits_SV, other[arm].logits_SV)
        assert one[arm] is not other[arm]


@pytest.mark.parametrize(
    "context",
    [
        "text:pydoc:40",
        "framed:own:60:3:1",
        "framed:tokens:32:2",
        "anchored",
        "pairs",
        "mean:framed+tokens+32+2,framed+tokens+32+2+1",
    ],
)
def test_every_context_compiles(
    model: QualityModel, tokenizer: Any, prompt: Prompt, context: str
) -> None:
    found = _outcomes(model, tokenizer, prompt, f"{context}/none", "alone/none")
    assert not np.array_equal(found[f"{context}/none"].logits_SV, found["alone/none"].logits_SV)


@pytest.mark.parametrize("context", ["nowhere", "text:pydoc", "framed:nothing:10:2", "text:own:x"])
def test_an_unknown_context_is_refused(
    model: QualityModel, tokenizer: Any, prompt: Prompt, context: str
) -> None:
    with pytest.raises(UnknownContext, match="no context"):
        _outcomes(model, tokenizer, prompt, f"{context}/none")


def test_a_model_whose_layers_are_called_otherwise_is_refused(tmp_path: Path) -> None:
    from tests.models.families import COMMON
    from tests.models.weights import write_model

    from blend_engine.quality.model import UnlikeModel

    write_model(tmp_path, "granite", {**COMMON, "embedding_multiplier": 12.0})
    with pytest.raises(UnlikeModel, match="off by"):
        QualityModel(tmp_path)
