"""Repairs: what they must do where the right answer is known."""

import torch
from torch import Tensor

from blend_engine.quality.blending import Prompt, Repair, blend, full_prefill, loaded
from blend_engine.quality.compiling import (
    CompiledDocument,
    averaged,
    compile_documents,
    prepare_preamble,
)
from blend_engine.quality.model import QualityModel
from blend_engine.quality.repairing import regressed, shifted
from blend_engine.quality.state import KvState


def _versions(model: QualityModel, prompt: Prompt, count: int) -> list[list[CompiledDocument]]:
    generator = torch.Generator().manual_seed(3)
    documents = [prompt.ids_T[start:end] for start, end in prompt.documents]
    return [
        compile_documents(
            model,
            documents,
            prepare_preamble(model, torch.randint(5, 500, (24,), generator=generator)),
        )
        for _ in range(count)
    ]


def _spread(prompt: Prompt) -> Tensor:
    return prompt.reusable[::4]


def _run(
    model: QualityModel, prompt: Prompt, compiled: list[CompiledDocument], repair: Repair | None
) -> KvState:
    state = loaded(model, prompt, compiled, prompt.num_tokens)
    blend(model, prompt, state, _spread(prompt), repair=repair)
    return state


def test_a_shift_carries_the_mean_residual_to_the_other_tokens(
    model: QualityModel, prompt: Prompt
) -> None:
    """Documents whose values are all off by one constant come back exactly."""
    truth = full_prefill(model, prompt, 1).state
    right = [
        CompiledDocument(
            k_LHTD=truth.k_LHND[:, :, start:end],
            v_LHTD=truth.v_LHND[:, :, start:end] + 0.25,
            start=start,
        )
        for start, end in prompt.documents
    ]
    state = _run(model, prompt, right, shifted(model, prompt, _spread(prompt), 1.0))
    # The first layer's fresh KV does not depend on attention, so there it is exact.
    assert float((state.v_LHND[0] - truth.v_LHND[0]).abs().max()) < 1e-4


def test_a_shift_of_keys_undoes_their_rotation(model: QualityModel, prompt: Prompt) -> None:
    truth = full_prefill(model, prompt, 1).state
    constant = torch.ones(1, 1, 1, model.head_dim) * 0.25
    spoilt = []
    for start, end in prompt.documents:
        positions = torch.arange(start, end)
        off = model.rotate(constant.expand(*truth.k_LHND.shape[:2], end - start, -1), positions)
        keys = truth.k_LHND[:, :, start:end] + off
        spoilt.append(
            CompiledDocument(k_LHTD=keys, v_LHTD=truth.v_LHND[:, :, start:end], start=start)
        )
    state = _run(model, prompt, spoilt, shifted(model, prompt, _spread(prompt), 1.0))
    assert float((state.k_LHND[0] - truth.k_LHND[0]).abs().max()) < 1e-4


def test_a_regression_finds_the_version_that_a_prompt_is_like(
    model: QualityModel, prompt: Prompt
) -> None:
    """Fresh KV that lies along the directions is reached, where the mean alone is off."""
    versions = _versions(model, prompt, 3)
    mean = averaged(model, versions)
    repair = regressed(model, prompt, _spread(prompt), versions, 1e-6)
    state = loaded(model, prompt, mean, prompt.num_tokens)
    target = loaded(model, prompt, versions[1], prompt.num_tokens)
    base = state.clone()
    hook = repair(state, prompt.fresh)
    rows = _spread(prompt)
    for layer in range(model.num_layers):
        keys, values = target.k_LHND[layer][:, rows], target.v_LHND[layer][:, rows]
        state.k_LHND[layer][:, rows], state.v_LHND[layer][:, rows] = keys, values
        hook(layer, keys, values)
    off = (state.v_LHND - target.v_LHND)[:, :, prompt.reusable].norm()
    assert float(off) < 0.02 * float((base.v_LHND - target.v_LHND)[:, :, prompt.reusable].norm())


def test_nothing_recomputed_leaves_a_document_as_it_was(
    model: QualityModel, prompt: Prompt
) -> None:
    versions = _versions(model, prompt, 2)
    nothing = prompt.reusable[:0]
    state = loaded(model, prompt, versions[0], prompt.num_tokens)
    before = state.clone()
    blend(model, prompt, state, nothing, repair=shifted(model, prompt, nothing, 1.0))
    rows = prompt.reusable
    assert torch.equal(state.k_LHND[:, :, rows], before.k_LHND[:, :, rows])
