"""Intervals: they cover the truth as often as they say, and pairing makes them narrow."""

import math

import numpy as np
import pytest
from tests.evaluation.studies import GAP, correlated, study

from blend_gateway.evaluation.bootstrap import (
    UNDEFINED,
    Estimate,
    draw_counts,
    estimate,
    resampled_sums,
)
from blend_gateway.evaluation.statistics import difference, summarize
from blend_gateway.evaluation.sums import Design, Group, cell_sums


def one_cell(arms: dict[str, list[float]], design: Design) -> Group:
    (group,) = cell_sums(study(arms), design).values()
    return group


def recovery(gap: list[float], arm: list[float], *, seed: int = 0) -> Estimate:
    design = Design(seed=seed, num_resamples=600)
    return summarize(one_cell({GAP: gap, "arm": arm}, design)["arm"], design).gap_recovery


def width(of: Estimate) -> float:
    return of.high - of.low


def test_a_resample_is_as_large_as_the_sample() -> None:
    counts = draw_counts(17, seed=3, name="cell", num_resamples=50)
    assert counts.shape == (51, 17)
    assert counts[0].tolist() == [1.0] * 17, "the sample itself comes first"
    assert counts.sum(axis=1).tolist() == [17.0] * 51
    assert len({tuple(row) for row in counts.tolist()}) == 51
    # Every prompt is as likely as any other: 50 draws of 17 within four standard errors.
    assert abs(counts[1:].mean(axis=0) - 1).max() < 4 * math.sqrt(1 / 50)


def test_draws_hang_on_seed_and_cell_alone() -> None:
    def draws(seed: int, name: str) -> list[list[float]]:
        counts: list[list[float]] = draw_counts(9, seed=seed, name=name, num_resamples=20).tolist()
        return counts

    assert draws(1, "a") == draws(1, "a")
    assert draws(1, "a") != draws(2, "a")
    assert draws(1, "a") != draws(1, "b")


def test_resampled_sums_count_what_was_drawn() -> None:
    counts = np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    columns = np.array([[1.0, 10.0], [2.0, math.inf], [4.0, 30.0]])
    expected = [[7.0, math.inf], [6.0, 50.0], [6.0, math.inf]]
    assert resampled_sums(counts, columns).tolist() == expected


def test_an_interval_leaves_out_as_much_on_either_side() -> None:
    values = np.array([0.5, *(np.arange(1000) / 1000)])
    assert estimate(values, confidence=0.9) == Estimate(value=0.5, low=0.05, high=0.949)


def test_an_interval_is_unbounded_once_too_many_resamples_are_undefined() -> None:
    values = np.arange(1001) / 1000.0
    values[1:26] = math.nan
    assert estimate(values).low == 0.026
    values[26] = math.nan
    assert (estimate(values).low, estimate(values).high) == (-math.inf, math.inf)
    values[0] = math.nan
    assert estimate(values) == UNDEFINED


def test_intervals_cover_the_truth() -> None:
    """300 studies of 60 prompts whose true recovery is 0.9: 95% intervals cover it in about 95%.

    With heavy tails and few prompts a percentile interval falls a little short of its name.
    """
    source = np.random.default_rng(11)
    hits = 0
    for number in range(300):
        found = recovery(*correlated(source, 60), seed=number)
        hits += found.low <= 0.9 <= found.high
    assert 0.88 <= hits / 300 <= 0.99


def test_intervals_narrow_with_the_root_of_the_prompts() -> None:
    source = np.random.default_rng(12)

    def mean_width(num_prompts: int) -> float:
        return float(
            np.mean([width(recovery(*correlated(source, num_prompts))) for _ in range(30)])
        )

    assert mean_width(50) / mean_width(450) == pytest.approx(3.0, rel=0.25)


def test_pairing_tells_arms_apart_that_unpaired_samples_do_not() -> None:
    """Prompts differ far more than arms do; an arm 5% worse on every prompt must be seen."""
    source = np.random.default_rng(13)
    gap = source.lognormal(-2.0, 1.0, 200)
    design = Design()
    worse, better = gap * 0.21 * source.normal(1, 0.05, 200), gap * 0.20
    arms = {GAP: gap.tolist(), "worse": worse.tolist(), "better": better.tolist()}
    paired = difference(one_cell(arms, design), "worse", "better")
    assert paired.low > 0
    counts = [draw_counts(200, seed=0, name=name) for name in ("one", "two")]
    unpaired = estimate(counts[0] @ worse / 200 - counts[1] @ better / 200)
    assert unpaired.low < 0 < unpaired.high
    assert width(paired) < width(unpaired) / 5


def test_an_arm_that_keeps_a_quarter_of_every_prompts_gap_leaves_no_doubt() -> None:
    """Exactly: with draws of its own for either arm, this interval would be wide."""
    gap = np.random.default_rng(14).lognormal(-2.0, 1.0, 50)
    found = recovery(gap.tolist(), (gap / 4).tolist())
    assert (found.low, found.value, found.high) == pytest.approx((0.75, 0.75, 0.75), abs=1e-12)
    assert width(recovery(gap.tolist(), np.roll(gap / 4, 1).tolist())) > 0.05
