"""What is not recomputed, mended by what the recomputed tokens show."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blend_engine.quality.blending import Prompt, Repair
from blend_engine.quality.compiling import CompiledDocument
from blend_engine.quality.model import QualityModel
from blend_engine.quality.state import KvState, Written


def shifted(model: QualityModel, prompt: Prompt, selected: Tensor, share: float) -> Repair:
    """Add a document's mean residual to its other tokens (AgentKVShift, arXiv:2607.21604).

    The residual of a recomputed token is its fresh KV less its cached KV; that of keys is taken
    with the rotation undone.

    Args:
        model: The model.
        prompt: The prompt.
        selected: Recomputed positions.
        share: How much of the mean is added.
    """
    chosen = set(selected.tolist())

    def prepare(state: KvState, _: Tensor) -> Written:
        parts = [_split(range(start, end), chosen, model) for start, end in prompt.documents]
        old_k, old_v = state.k_LHND.clone(), state.v_LHND.clone()

        def mend(layer: int, k: Tensor, v: Tensor) -> None:
            del k, v
            for new, rest in parts:
                if not len(new) or not len(rest):
                    continue
                residual = state.k_LHND[layer][:, new] - old_k[layer][:, new]
                plain = _turn(model, layer, residual, -new).mean(1, keepdim=True)
                plain = plain.expand(-1, len(rest), -1)
                state.k_LHND[layer][:, rest] += share * _turn(model, layer, plain, rest)
                mean = (state.v_LHND[layer][:, new] - old_v[layer][:, new]).mean(1, keepdim=True)
                state.v_LHND[layer][:, rest] += share * mean

        return mend

    return prepare


def regressed(
    model: QualityModel,
    prompt: Prompt,
    selected: Tensor,
    versions: Sequence[Sequence[CompiledDocument]],
    ridge: float,
) -> Repair:
    """Move along the directions in which a document's KV varied between compiles.

    Behind each of several preambles a token's KV differs from their mean by some direction. How
    far a prompt has gone along each is fitted on the recomputed tokens, per document, layer and
    head, and applied to the others.

    Args:
        model: The model.
        prompt: The prompt.
        selected: Recomputed positions.
        versions: Compiles of the documents; what was loaded is their mean.
        ridge: Of the fit, as a share of the directions' mean energy.
    """
    chosen = set(selected.tolist())

    def prepare(state: KvState, _: Tensor) -> Written:
        parts = [_split(range(start, end), chosen, model) for start, end in prompt.documents]
        base = {"k": state.k_LHND.clone(), "v": state.v_LHND.clone()}
        moved = []
        for number, (start, end) in enumerate(prompt.documents):
            keys, values = zip(*(each[number].at(model, start) for each in versions), strict=True)
            directions = {
                "k": torch.stack(keys) - base["k"][:, :, start:end],
                "v": torch.stack(values) - base["v"][:, :, start:end],
            }
            moved.append((start, directions))

        def mend(layer: int, k: Tensor, v: Tensor) -> None:
            del k, v
            caches = {"k": state.k_LHND[layer], "v": state.v_LHND[layer]}
            for (new, rest), (start, directions) in zip(parts, moved, strict=True):
                if not len(new) or not len(rest):
                    continue
                for name, cache in caches.items():
                    residual = cache[:, new] - base[name][layer][:, new]
                    along = directions[name][:, layer]
                    step = _fit(along[:, :, new - start], residual, ridge)
                    cache[:, rest] += torch.einsum("hj,jhtd->htd", step, along[:, :, rest - start])

        return mend

    return prepare


def _fit(along_JHTD: Tensor, residual_HTD: Tensor, ridge: float) -> Tensor:
    """Least squares coefficients ``[H, J]`` of the residual on the directions, per head."""
    basis = along_JHTD.permute(1, 0, 2, 3).flatten(2).float()  # [H, J, T*D]
    gram = basis @ basis.mT
    size = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    identity = torch.eye(gram.shape[1], device=gram.device)
    right = basis @ residual_HTD.flatten(1).float()[:, :, None]
    step: Tensor = torch.linalg.solve(gram + (ridge * size + 1e-12) * identity, right)
    return step[..., 0]


def _split(positions: range, chosen: set[int], model: QualityModel) -> tuple[Tensor, Tensor]:
    new = [position for position in positions if position in chosen]
    rest = [position for position in positions if position not in chosen]
    as_tensor = [torch.tensor(each, dtype=torch.int64, device=model.device) for each in (new, rest)]
    return as_tensor[0], as_tensor[1]


def _turn(model: QualityModel, layer: int, k_HTD: Tensor, delta_T: Tensor) -> Tensor:
    return model.rotate_layer(layer, k_HTD, delta_T)
