"""Laws that hold for any model: what is exact, what is caught, what a budget buys."""

import pytest
import torch
from torch import Tensor

from blend_engine.quality.arms import UnknownArm, parse_arm, run_arm
from blend_engine.quality.blending import Prompt, Reference, forced_logits, full_prefill
from blend_engine.quality.compiling import (
    CompiledDocument,
    averaged,
    compile_documents,
    prepare_preamble,
)
from blend_engine.quality.model import QualityModel

NUM_STEPS = 4
NOTHING = torch.empty(0, dtype=torch.int64)
EXACT = 2e-4


@pytest.fixture(scope="module")
def reference(model: QualityModel, prompt: Prompt) -> Reference:
    """Full prefill."""
    return full_prefill(model, prompt, NUM_STEPS)


@pytest.fixture(scope="module")
def alone(model: QualityModel, prompt: Prompt) -> list[CompiledDocument]:
    """The documents, compiled behind nothing."""
    return compile_documents(model, _documents(prompt), prepare_preamble(model, NOTHING))


def _documents(prompt: Prompt) -> list[Tensor]:
    return [prompt.ids_T[start:end] for start, end in prompt.documents]


def _logits(
    model: QualityModel,
    prompt: Prompt,
    reference: Reference,
    compiled: list[CompiledDocument],
    arm: str,
) -> tuple[Tensor, float]:
    num_slots = prompt.num_tokens + NUM_STEPS - 1
    blended = run_arm(model, prompt, parse_arm(arm), compiled, reference, num_slots=num_slots)
    logits = forced_logits(model, prompt, blended.state, blended.last, reference.continuation_S)
    return logits, blended.charged_ratio


def _error(reference: Reference, logits_SV: Tensor) -> float:
    return float((logits_SV - reference.logits_SV).abs().max())


def test_a_prompt_in_pieces_is_the_prompt_at_once(
    model: QualityModel, prompt: Prompt, reference: Reference
) -> None:
    state = model.state(torch.arange(prompt.num_tokens))
    for piece in torch.arange(prompt.num_tokens).split(37):
        hidden = model.run(prompt.ids_T[piece], state, piece)
    assert float((model.logits(hidden[:, -1:])[0] - reference.logits_SV[0]).abs().max()) < EXACT


@pytest.mark.parametrize("arm", ["alone/all@1", "alone/question@1", "alone/random@1"])
def test_recomputing_everything_is_full_prefill(
    model: QualityModel,
    prompt: Prompt,
    reference: Reference,
    alone: list[CompiledDocument],
    arm: str,
) -> None:
    logits, charged = _logits(model, prompt, reference, alone, arm)
    assert _error(reference, logits) < EXACT
    assert charged == 1.0


def test_full_reuse_of_moved_documents_is_not_full_prefill(
    model: QualityModel, prompt: Prompt, reference: Reference, alone: list[CompiledDocument]
) -> None:
    logits, charged = _logits(model, prompt, reference, alone, "alone/none")
    assert _error(reference, logits) > 50 * EXACT
    assert charged == 0.0


def test_what_is_compiled_where_it_stands_is_exact(
    model: QualityModel, prompt: Prompt, reference: Reference
) -> None:
    compiled = [
        compile_documents(model, [prompt.ids_T[start:end]], prepare_preamble(model, before))[0]
        for start, end in prompt.documents
        for before in [prompt.ids_T[:start]]
    ]
    logits, _ = _logits(model, prompt, reference, compiled, "anchored/none")
    assert _error(reference, logits) < EXACT


def test_a_move_is_another_preamble_of_other_positions(model: QualityModel, prompt: Prompt) -> None:
    ids_P, document = prompt.ids_T[:20], prompt.ids_T[20:80]
    near = compile_documents(model, [document], prepare_preamble(model, ids_P))[0]
    far = prepare_preamble(model, ids_P, positions_P=torch.arange(20) + 333)
    moved = compile_documents(model, [document], far)[0]
    assert moved.start == 353
    keys, values = near.at(model, 353)
    assert float((keys - moved.k_LHTD).abs().max()) < EXACT
    assert float((values - moved.v_LHTD).abs().max()) < EXACT


def test_documents_side_by_side_do_not_see_each_other(model: QualityModel, prompt: Prompt) -> None:
    preamble = prepare_preamble(model, prompt.ids_T[:30])
    together = compile_documents(model, _documents(prompt), preamble, side_by_side=3)
    for one, other in zip(
        compile_documents(model, _documents(prompt), preamble), together, strict=True
    ):
        assert float((one.k_LHTD - other.k_LHTD).abs().max()) < EXACT
        assert float((one.v_LHTD - other.v_LHTD).abs().max()) < EXACT


def test_a_weight_counts_a_preamble_several_times(model: QualityModel, prompt: Prompt) -> None:
    """Two equal tokens at one position are one token of weight 2."""
    ids_P, document = prompt.ids_T[:9], prompt.ids_T[20:60]
    twice = prepare_preamble(model, ids_P)
    heavy = prepare_preamble(model, ids_P, weight=2.0)
    doubled = model.state(twice.state.positions_N.repeat(2))
    doubled.k_LHND[:] = twice.state.k_LHND.repeat(1, 1, 2, 1)
    doubled.v_LHND[:] = twice.state.v_LHND.repeat(1, 1, 2, 1)
    twice = type(twice)(state=doubled, next_position=9)
    (expected,), (found,) = (compile_documents(model, [document], each) for each in (twice, heavy))
    assert float((expected.k_LHTD - found.k_LHTD).abs().max()) < EXACT


def test_the_mean_of_equal_compiles_is_each(model: QualityModel, prompt: Prompt) -> None:
    preamble = prepare_preamble(model, prompt.ids_T[:30])
    far = prepare_preamble(model, prompt.ids_T[:30], positions_P=torch.arange(30) + 100)
    versions = [compile_documents(model, _documents(prompt), each) for each in (preamble, far)]
    for one, mean in zip(versions[0], averaged(model, versions), strict=True):
        assert float((one.k_LHTD - mean.k_LHTD).abs().max()) < EXACT


@pytest.mark.parametrize("policy", ["random", "hkvd", "oracle", "question", "gradual"])
def test_a_budget_is_kept(
    model: QualityModel,
    prompt: Prompt,
    reference: Reference,
    alone: list[CompiledDocument],
    policy: str,
) -> None:
    for ratio in (0.6, 0.8):
        _, charged = _logits(model, prompt, reference, alone, f"alone/{policy}@{ratio}")
        assert charged == pytest.approx(ratio, abs=2 / len(prompt.reusable))


def test_a_budget_below_the_check_layers_recomputes_nothing_or_is_refused(
    model: QualityModel, prompt: Prompt, reference: Reference, alone: list[CompiledDocument]
) -> None:
    _, charged = _logits(model, prompt, reference, alone, "alone/hkvd@0.01")
    assert charged == pytest.approx(1 / model.num_layers)
    with pytest.raises(UnknownArm, match="does not pay"):
        _logits(model, prompt, reference, alone, "alone/gradual@0.01")


@pytest.mark.parametrize("extra", ["unrotated", "plus_one", "wrong_delta", "swapped"])
def test_a_wrong_build_moves_the_answer_where_a_right_one_does_not(
    model: QualityModel, prompt: Prompt, reference: Reference, extra: str
) -> None:
    """Documents compiled where they stand: right KV, so any error is the mutation's."""
    compiled = [
        compile_documents(model, [prompt.ids_T[start:end]], prepare_preamble(model, before))[0]
        for start, end in prompt.documents
        for before in [prompt.ids_T[:start]]
    ]
    moved = [
        CompiledDocument(k_LHTD=each.at(model, 3)[0], v_LHTD=each.v_LHTD, start=3)
        for each in compiled
    ]
    right, _ = _logits(model, prompt, reference, moved, "anchored/none")
    wrong, _ = _logits(model, prompt, reference, moved, f"anchored/none/{extra}")
    assert _error(reference, right) < EXACT
    assert _error(reference, wrong) > 20 * EXACT


def test_a_token_that_sees_what_comes_after_it_moves_the_answer(
    model: QualityModel, prompt: Prompt, reference: Reference, alone: list[CompiledDocument]
) -> None:
    exact, _ = _logits(model, prompt, reference, alone, "alone/sinks@0.5")
    leaky, _ = _logits(model, prompt, reference, alone, "alone/sinks@0.5/leaky")
    assert float((exact - leaky).abs().max()) > 50 * EXACT


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alone", "COMPILE/SELECT"),
        ("alone/best@0.1", "no policy 'best'"),
        ("alone/hkvd@much", "no number"),
        ("alone/hkvd@2", "between 0 and 1"),
        ("alone/hkvd@nan", "between 0 and 1"),
        ("alone/hkvd@0.1/broken", "no extra 'broken'"),
    ],
)
def test_what_is_no_arm_is_refused_with_what_there_is(name: str, words: str) -> None:
    with pytest.raises(UnknownArm, match=words):
        parse_arm(name)
