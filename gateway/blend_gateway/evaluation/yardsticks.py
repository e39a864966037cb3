"""Whether one metric orders arms as another does."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from blend_gateway.evaluation.statistics import Summary

LOSSES = (
    "first-token KL",
    "mean KL",
    "p95 KL",
    "disagreement",
    "reference NLL",
    "answer NLL",
    "ranking errors",
)
"""Larger is worse, in all of them."""


def rank_agreement(summaries: Mapping[str, Summary]) -> list[list[float | None]]:
    """Spearman's rank correlation over arms of every metric of `LOSSES` with every other.

    None where a metric is undefined for an arm, or the same for all.
    """
    columns = list(zip(*(_losses(summary) for summary in summaries.values()), strict=True))
    return [[_spearman(first, second) for second in columns] for first in columns]


def _losses(summary: Summary) -> tuple[float | None, ...]:
    agreement, ranking = summary.agreement.value, summary.ranking.value
    return (
        summary.first_kl.value,
        summary.mean_kl.value,
        summary.p95_kl,
        None if agreement is None else 1 - agreement,
        summary.reference_nll.value,
        summary.answer_nll.value,
        None if ranking is None else 1 - ranking,
    )


def _spearman(first: Sequence[float | None], second: Sequence[float | None]) -> float | None:
    if None in first or None in second or len(first) < 2:
        return None
    a, b = _ranks(np.array(first, dtype=float)), _ranks(np.array(second, dtype=float))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return None if scale == 0 else float(a @ b) / scale


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share their mean."""
    below = (values[:, None] > values).sum(axis=1)
    equal = (values[:, None] == values).sum(axis=1)
    ranks: NDArray[np.float64] = below + (equal - 1) / 2
    return ranks
