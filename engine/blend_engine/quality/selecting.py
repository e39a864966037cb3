"""Scores over documents' tokens, and sets of tokens out of scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from blend_engine.quality.blending import Prompt
from blend_engine.quality.model import QualityModel, attention_from, causal_allowed
from blend_engine.quality.state import KvState

_REDUCED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda weights_QR: weights_QR.square().sum(0).sqrt(),
    "sum": lambda weights_QR: weights_QR.sum(0),
    "max": lambda weights_QR: weights_QR.amax(0),
}


class _Enough(Exception):
    """Ends a partial run."""


def top_tokens(prompt: Prompt, score_R: Tensor, ratio: float) -> Tensor:
    """The ``ceil(ratio * R)`` of all documents' tokens that score highest, sorted."""
    budget = math.ceil(ratio * len(prompt.reusable))
    picked = score_R.float().topk(budget).indices.sort().values.cpu()
    return prompt.reusable[picked]


def top_blocks(prompt: Prompt, score_R: Tensor, ratio: float, size: int = 16) -> Tensor:
    """As `top_tokens`, in runs of `size` tokens of one document."""
    budget = math.ceil(ratio * len(prompt.reusable))
    blocks: list[tuple[float, Tensor]] = []
    at = 0
    for start, end in prompt.documents:
        for first in range(start, end, size):
            last = min(first + size, end)
            rows = slice(at + first - start, at + last - start)
            blocks.append((float(score_R[rows].float().mean()), torch.arange(first, last)))
        at += end - start
    blocks.sort(key=lambda each: -each[0])
    kept, count = [], 0
    for _, positions in blocks:
        if count >= budget:
            break
        kept.append(positions[: budget - count])
        count += len(kept[-1])
    return torch.cat(kept).sort().values if kept else torch.empty(0, dtype=torch.int64)


def first_tokens(prompt: Prompt, count: int) -> Tensor:
    """The first `count` tokens of every document (EPIC, arXiv:2410.15332, LegoLink)."""
    ranges = [torch.arange(start, min(start + count, end)) for start, end in prompt.documents]
    return torch.cat(ranges)


def first_shares(prompt: Prompt, ratio: float) -> Tensor:
    """The first ``ceil(ratio * length)`` tokens of every document, as the engine's `sinks`."""
    ranges = [
        torch.arange(start, start + math.ceil(ratio * (end - start)))
        for start, end in prompt.documents
    ]
    return torch.cat(ranges)


def check_layer_deviation(
    model: QualityModel, prompt: Prompt, state: KvState, layer: int
) -> tuple[Tensor, Tensor]:
    """Squared distance of fresh keys, and of fresh values, at one layer: CacheBlend's peek.

    Layers below run on all tokens, with fresh keys and values everywhere.

    Returns:
        Two fp32 ``[R]``, over `Prompt.reusable`.
    """
    scratch = model.state(state.positions_N[: prompt.num_tokens])
    seen: list[tuple[Tensor, Tensor]] = []

    def stop(index: int, k_HQD: Tensor, v_HQD: Tensor) -> None:
        if index == layer:
            seen.append((k_HQD, v_HQD))
            raise _Enough

    with suppress(_Enough):
        model.layers(
            model.embed(prompt.ids_T), scratch, torch.arange(prompt.num_tokens), on_write=stop
        )
    rows = prompt.reusable.to(model.device)
    k, v = seen[0]
    old_k, old_v = state.k_LHND[layer][:, rows], state.v_LHND[layer][:, rows]
    return (
        (k[:, rows].float() - old_k.float()).square().sum((0, 2)),
        (v[:, rows].float() - old_v.float()).square().sum((0, 2)),
    )


def question_attention(
    model: QualityModel,
    prompt: Prompt,
    state: KvState,
    layers: Sequence[int],
    *,
    rows: Tensor | None = None,
    over_queries: str = "norm",
) -> Tensor:
    """Attention of the question's tokens to the documents', through the cache as it is.

    Args:
        model: The model.
        prompt: The prompt.
        state: Not changed.
        layers: Which layers' attention; none past the largest is run.
        rows: Slots that ask; everything behind the last document by default.
        over_queries: "norm" (InfoFlow, arXiv:2603.05353), "sum" or "max".

    Returns:
        fp32 ``[L', R]``: for each of the layers, over `Prompt.reusable`; heads averaged.
    """
    scratch = state.clone()
    slots = prompt.fresh.to(model.device)
    asking = torch.arange(prompt.question_start, prompt.num_tokens) if rows is None else rows
    asking = asking.to(model.device)
    among = torch.searchsorted(slots, asking)
    reusable = prompt.reusable.to(model.device)
    wanted, found = set(layers), []

    def observe(index: int, query: Tensor, key: Tensor, scale: float) -> None:
        if index not in wanted:
            return
        allowed = causal_allowed(scratch, asking)[:, : key.shape[1]]
        weights = attention_from(query[:, among], key, allowed, scale)[:, :, reusable].mean(0)
        found.append(_REDUCED[over_queries](weights))

    with model.observing(observe):
        model.layers(model.embed(prompt.ids_T[slots.cpu()]), scratch, slots, last=max(wanted) + 1)
    return torch.stack(found)


def deviation(state: KvState, other: KvState, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Distance of keys, and of values, per layer and token over all heads: two fp32 ``[L, R]``."""
    rows = prompt.reusable.to(state.k_LHND.device)
    k = (state.k_LHND[:, :, rows].float() - other.k_LHND[:, :, rows].float()).square()
    v = (state.v_LHND[:, :, rows].float() - other.v_LHND[:, :, rows].float()).square()
    return k.sum((1, 3)).sqrt(), v.sum((1, 3)).sqrt()
