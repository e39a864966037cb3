"""Made-up measurements with known truth."""

from collections.abc import Mapping, Sequence

import numpy as np

from blend_gateway.evaluation.metrics import NO_LIKELIHOODS, Likelihoods, Measured
from blend_gateway.evaluation.records import PromptId, Record

FULL, GAP = "full", "full_reuse_alone"


def prompt(number: int, *, family: str = "needle_single", depth: float = 0.5) -> PromptId:
    return PromptId(
        family=family, variant="direct", length=1024, number=number, order=number % 3, depth=depth
    )


def measured(
    kl: float | Sequence[float],
    *,
    charged_ratio: float = 0.0,
    likelihoods: Likelihoods = NO_LIKELIHOODS,
    agrees: Sequence[bool] | None = None,
    nll: float = 1.0,
) -> Measured:
    steps = tuple(kl) if isinstance(kl, Sequence) else (kl,)
    return Measured(
        kl=steps,
        agrees=tuple(agrees) if agrees is not None else tuple(value < 0.1 for value in steps),
        reference_nll=tuple(nll for _ in steps),
        charged_ratio=charged_ratio,
        likelihoods=likelihoods,
    )


def ranked(*candidates: float) -> Likelihoods:
    """The candidates' log-likelihoods, gold first."""
    return Likelihoods(
        answer=candidates[0],
        num_answer_tokens=2,
        candidates=candidates,
        num_candidate_tokens=tuple(2 for _ in candidates),
    )


def study(
    arms: Mapping[str, Sequence[float]],
    *,
    family: str = "needle_single",
    ratios: Mapping[str, float] | None = None,
) -> list[Record]:
    """One cell of one-step prompts: each arm's KL by prompt; full prefill is added."""
    count = len(next(iter(arms.values())))
    everything = {FULL: [0.0] * count, **arms}
    return [
        Record(
            prompt=prompt(number, family=family),
            arm=arm,
            measured=measured(float(kl), charged_ratio=(ratios or {}).get(arm, 0.0)),
        )
        for arm, values in everything.items()
        for number, kl in enumerate(values)
    ]


def correlated(
    source: np.random.Generator, num_prompts: int, *, kept: float = 0.1
) -> tuple[list[float], list[float]]:
    """KL of a gap's arm and of one that keeps a share of it on average: true recovery 1 - kept.

    Both are heavy-tailed and correlated, as KL over prompts is.
    """
    gap = source.lognormal(-2.0, 1.0, num_prompts)
    arm = gap * kept * source.lognormal(-0.125, 0.5, num_prompts)  # of mean 1
    return gap.tolist(), arm.tolist()
