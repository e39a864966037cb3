"""HKVD with gradual filtering: CacheBlend's own form (arXiv:2405.16444, section 4.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blend_engine.quality.blending import Prompt
from blend_engine.quality.model import QualityModel
from blend_engine.quality.state import KvState


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One filtering step.

    Args:
        layer: Where fresh KV is compared with cached KV; the layer itself runs on all that came in.
        ratio: Share of the documents' tokens that go on to the next layer.
    """

    layer: int
    ratio: float


def blend_gradually(
    model: QualityModel, prompt: Prompt, state: KvState, checks: Sequence[Check]
) -> tuple[Tensor, float]:
    """Start with every token; after each check, only those that deviate most go on.

    A token that is dropped keeps its fresh KV in the layers it has been through, and its cached KV
    above them.

    Args:
        model: The model.
        prompt: The prompt.
        state: As loaded; changed.
        checks: In order of their layers, with falling ratios.

    Returns:
        What leaves the last layer at the prompt's last token, and the charged ratio.
    """
    is_reusable = torch.zeros(prompt.num_tokens, dtype=torch.bool)
    is_reusable[prompt.reusable] = True
    slots = torch.arange(prompt.num_tokens)
    hidden, first, charged = model.embed(prompt.ids_T), 0, 0
    for check in [*checks, None]:
        last = model.num_layers if check is None else check.layer + 1
        charged += int(is_reusable[slots].sum()) * (last - first)
        scores: list[Tensor] = []
        watch = None if check is None else _Watch(state, slots, check.layer, scores)
        hidden = model.layers(hidden, state, slots, first=first, last=last, on_write=watch)
        if check is not None:
            kept = _kept(scores[0].cpu(), is_reusable[slots], check.ratio, len(prompt.reusable))
            slots, hidden = slots[kept], hidden[:, kept.to(hidden.device)]
        first = last
    return hidden[:, -1:], charged / (model.num_layers * len(prompt.reusable))


class _Watch:
    """Scores the tokens of one layer: how far their fresh KV is from what was cached.

    The cache is written before it can be compared, so the layer's is copied beforehand.
    """

    def __init__(self, state: KvState, slots: Tensor, layer: int, scores: list[Tensor]) -> None:
        rows = slots.to(state.k_LHND.device)
        self._old = state.k_LHND[layer][:, rows].float(), state.v_LHND[layer][:, rows].float()
        self._layer, self._scores = layer, scores

    def __call__(self, layer: int, k_HQD: Tensor, v_HQD: Tensor) -> None:
        if layer != self._layer:
            return
        pairs = zip((k_HQD, v_HQD), self._old, strict=True)
        distances = [(new.float() - old).square().sum((0, 2)) for new, old in pairs]
        self._scores.append(torch.stack(distances).sum(0))


def _kept(score_Q: Tensor, is_reusable_Q: Tensor, ratio: float, num_reusable: int) -> Tensor:
    budget = min(math.ceil(ratio * num_reusable), int(is_reusable_Q.sum()))
    ranked = score_Q.masked_fill(~is_reusable_Q, -torch.inf).topk(budget).indices
    kept = ~is_reusable_Q
    kept[ranked] = True
    return kept.nonzero().flatten()
