"""Selection policies: which hit tokens a pass recomputes. Small pure functions over positions.

Exact hits (the `prefix` context) are never selected: their KV is full prefill's own.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blend_engine.plan import Hit
from blend_kernels import top_deviation_indices


def blended_hits(hits: Sequence[Hit]) -> list[Hit]:
    """The hits whose KV is approximate where it stands."""
    return [hit for hit in hits if hit.is_blended]


def hit_positions(hits: Sequence[Hit]) -> Tensor:
    """Prompt positions of the hits' tokens, int64, in order."""
    ranges = [torch.arange(hit.start, hit.end) for hit in hits]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def select_sinks(hits: Sequence[Hit], ratio: float) -> Tensor:
    """The first ``ceil(ratio * length)`` tokens of each segment that are still to be loaded.

    When it was compiled, a segment's first tokens attended to nothing or to the ballast, and they
    collect the attention that a prompt's first tokens do (EPIC, arXiv:2410.15332, LegoLink).

    Returns:
        Sorted int64 prompt positions.
    """
    ranges = [
        torch.arange(hit.start, hit.start + hit.num_sinks(ratio)) for hit in blended_hits(hits)
    ]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def select_hkvd(hits: Sequence[Hit], ratio: float, score_T: Tensor) -> Tensor:
    """The ``ceil(ratio * n)`` of all n blended hit tokens with the highest KV deviation.

    CacheBlend (arXiv:2405.16444) section 4.3 with one check layer.

    Args:
        hits: All hits of the plan.
        ratio: Recompute ratio in [0, 1].
        score_T: Deviation per token of `blended_hits(hits)`, in order.

    Returns:
        Sorted int64 prompt positions.
    """
    positions_T = hit_positions(blended_hits(hits))
    budget = math.ceil(ratio * len(positions_T))
    return positions_T[top_deviation_indices(score_T, budget).cpu()]
