"""Figures of groups of prompts, with paired bootstrap intervals.

Every mean is a ratio of sums over prompts, and gap recovery is 1 - (sum of the arm's KL) / (sum of
the gap's): a mean of ratios would be ruled by the prompts on which there was nothing to lose.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from blend_gateway.evaluation.bootstrap import CONFIDENCE, UNDEFINED, Estimate, estimate
from blend_gateway.evaluation.records import ArmSpec
from blend_gateway.evaluation.sums import ArmSums, Design, Group, Quantity

_P95 = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One arm over one group of prompts. KL and NLL in nats; an estimate's value may be undefined.

    Args:
        num_prompts: How many.
        num_cells: The cells that they are from.
        num_rankable: Prompts with candidates to rank.
        num_full_right: Of those, the ones that full prefill gets right.
        charged_ratio: Mean.
        mean_kl: Per step.
        first_kl: Of the first token alone.
        p95_kl: Of all steps.
        max_kl: Of all steps.
        noise_floor: What KL of nothing but noise is here, per step.
        mean_kl_in_floors: In units of it; None where it is 0, and so for the next two.
        p95_kl_in_floors: In units of it.
        max_kl_in_floors: In units of it.
        gap_recovery: 1 is full prefill, 0 the gap's arm; undefined where the gap itself is not over
            the noise floor.
        first_gap_recovery: The same of the first token alone.
        agreement: Share of steps with full prefill's greedy token.
        divergence: Mean number of steps before the first one that differs.
        reference_nll: Of the reference's tokens, per token, above full prefill's.
        answer_nll: Of the gold answer, per token, above full prefill's.
        ranking: Share of gold ranked first, of the prompts that full prefill gets right.
        ranking_all: Share of gold ranked first, of all rankable prompts.
        full_right_ratio: Share of rankable prompts that full prefill gets right.
        margin: Gold's log-likelihood over the best other candidate's, above full prefill's.
    """

    num_prompts: int
    num_cells: int
    num_rankable: int
    num_full_right: int
    charged_ratio: float
    mean_kl: Estimate
    first_kl: Estimate
    p95_kl: float
    max_kl: float
    noise_floor: float
    mean_kl_in_floors: float | None
    p95_kl_in_floors: float | None
    max_kl_in_floors: float | None
    gap_recovery: Estimate
    first_gap_recovery: Estimate
    agreement: Estimate
    divergence: Estimate
    reference_nll: Estimate
    answer_nll: Estimate
    ranking: Estimate
    ranking_all: Estimate
    full_right_ratio: Estimate
    margin: Estimate


def summarize(arm: ArmSums, design: Design) -> Summary:
    """Every figure of one arm over one group."""
    mean_kl_B = _ratio(arm, Quantity.KL, Quantity.STEPS)
    floor_B = np.maximum(_ratio(arm, Quantity.FLOOR_KL, Quantity.STEPS), design.floor_kl)
    floor = float(floor_B[0])
    sorted_kl = np.sort(arm.steps_kl)
    p95, top = float(sorted_kl[math.ceil(_P95 * len(sorted_kl)) - 1]), float(sorted_kl[-1])

    def mean(numerator: Quantity, denominator: Quantity) -> Estimate:
        return estimate(_ratio(arm, numerator, denominator))

    def in_floors(kl: float) -> float | None:
        return kl / floor if floor > 0 else None

    return Summary(
        num_prompts=int(arm[Quantity.PROMPTS][0]),
        num_cells=len(arm.cells),
        num_rankable=int(arm[Quantity.RANKABLE][0]),
        num_full_right=int(arm[Quantity.FULL_RIGHT][0]),
        charged_ratio=float(_ratio(arm, Quantity.CHARGED, Quantity.PROMPTS)[0]),
        mean_kl=estimate(mean_kl_B),
        first_kl=mean(Quantity.FIRST_KL, Quantity.PROMPTS),
        p95_kl=p95,
        max_kl=top,
        noise_floor=floor,
        mean_kl_in_floors=in_floors(float(mean_kl_B[0])),
        p95_kl_in_floors=in_floors(p95),
        max_kl_in_floors=in_floors(top),
        gap_recovery=_recovery(arm, Quantity.KL, Quantity.GAP_KL, Quantity.STEPS, floor_B),
        first_gap_recovery=_recovery(
            arm, Quantity.FIRST_KL, Quantity.GAP_FIRST_KL, Quantity.PROMPTS, floor_B
        ),
        agreement=mean(Quantity.AGREEING, Quantity.STEPS),
        divergence=mean(Quantity.DIVERGENCE, Quantity.PROMPTS),
        reference_nll=mean(Quantity.REFERENCE_NLL, Quantity.REFERENCE_TOKENS),
        answer_nll=mean(Quantity.ANSWER_NLL, Quantity.ANSWER_TOKENS),
        ranking=mean(Quantity.BOTH_RIGHT, Quantity.FULL_RIGHT),
        ranking_all=mean(Quantity.RIGHT, Quantity.RANKABLE),
        full_right_ratio=mean(Quantity.FULL_RIGHT, Quantity.RANKABLE),
        margin=mean(Quantity.MARGIN, Quantity.RANKABLE),
    )


def difference(group: Group, arm: str, other: str, *, confidence: float = CONFIDENCE) -> Estimate:
    """Mean KL of one arm minus another's, paired by prompt; above 0 where the other is better."""
    return estimate(_mean_kl(group[arm]) - _mean_kl(group[other]), confidence=confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """Two points of a curve of which the one with the higher ratio has the higher KL."""

    lower: str
    higher: str
    rise: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Arms that differ in their ratio only, in order of what they charge.

    Args:
        name: Of the curve.
        arms: By rising charged ratio.
        rises: Every pair of them that is out of order at all.
        proven: Of those, the ones that noise does not explain, at the confidence for all pairs of
            the curve together.
        is_comparable: Whether the arms were run in the same cells; there are no rises if not.
    """

    name: str
    arms: tuple[str, ...]
    rises: tuple[Rise, ...]
    proven: tuple[Rise, ...]
    is_comparable: bool = True

    @property
    def verdict(self) -> str:
        """``monotone``, ``monotone within noise``, ``not monotone`` or ``not comparable``."""
        if not self.is_comparable:
            return "not comparable"
        if self.proven:
            return "not monotone"
        return "monotone within noise" if self.rises else "monotone"


def curves(group: Group, arms: Iterable[ArmSpec], design: Design) -> tuple[Curve, ...]:
    """Whether more recomputation ever hurts, for every curve with at least two points here."""
    names: dict[str, list[str]] = {}
    for spec in arms:
        if spec.curve and spec.name in group:
            names.setdefault(spec.curve, []).append(spec.name)
    return tuple(
        _curve(curve, group, names[curve], design)
        for curve in sorted(names)
        if len(names[curve]) > 1
    )


def _curve(name: str, group: Group, arms: Sequence[str], design: Design) -> Curve:
    def charged(arm: str) -> float:
        return float(_ratio(group[arm], Quantity.CHARGED, Quantity.PROMPTS)[0])

    ordered = sorted(arms, key=lambda arm: (charged(arm), arm))
    pairs = [pair for pair in combinations(ordered, 2) if charged(pair[0]) < charged(pair[1])]
    confidence = 1.0 - (1.0 - CONFIDENCE) / max(1, len(pairs))  # Bonferroni's
    rises, proven = [], []
    if len({group[arm].cells for arm in ordered}) > 1:
        return Curve(name=name, arms=tuple(ordered), rises=(), proven=(), is_comparable=False)
    for lower, higher in pairs:
        rise = difference(group, higher, lower, confidence=confidence)
        if rise.value is None or rise.value <= 0:
            continue
        found = Rise(lower=lower, higher=higher, rise=rise)
        rises.append(found)
        # Between two arms that are both nothing but noise, every difference is noise.
        if rise.low > 0 and rise.value > _floor(group[higher], design):
            proven.append(found)
    return Curve(name=name, arms=tuple(ordered), rises=tuple(rises), proven=tuple(proven))


def _floor(arm: ArmSums, design: Design) -> float:
    return max(float(_ratio(arm, Quantity.FLOOR_KL, Quantity.STEPS)[0]), design.floor_kl)


def _mean_kl(arm: ArmSums) -> NDArray[np.float64]:
    return _ratio(arm, Quantity.KL, Quantity.STEPS)


def _ratio(arm: ArmSums, numerator: Quantity, denominator: Quantity) -> NDArray[np.float64]:
    """NaN where the denominator is 0."""
    below_B = arm[denominator]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below_B == 0, np.nan, arm[numerator] / below_B)


def _recovery(
    arm: ArmSums,
    kl: Quantity,
    gap_kl: Quantity,
    per: Quantity,
    floor_B: NDArray[np.float64],
) -> Estimate:
    gap_B = _ratio(arm, gap_kl, per)
    with np.errstate(invalid="ignore", divide="ignore"):
        recovered_B = 1.0 - arm[kl] / arm[gap_kl]
    is_defined_B = np.isfinite(gap_B) & (gap_B > floor_B)
    if not is_defined_B[0]:
        return UNDEFINED
    return estimate(np.where(is_defined_B, recovered_B, np.nan))
