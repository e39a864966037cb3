"""Figures over prompts and cells, and what they refuse to say."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.evaluation.studies import FULL, GAP, correlated, measured, prompt, ranked, study

from blend_gateway.evaluation.bootstrap import UNDEFINED
from blend_gateway.evaluation.records import ArmSpec, InconsistentRecords, Record, merged
from blend_gateway.evaluation.statistics import Summary, curves, summarize
from blend_gateway.evaluation.sums import Design, added, cell_sums

_DESIGN = Design(num_resamples=200)


def summaries(records: list[Record], design: Design = _DESIGN) -> dict[str, Summary]:
    group = added(cell_sums(records, design).values())
    return {arm: summarize(sums, design) for arm, sums in group.items()}


def test_recovery_is_a_ratio_of_sums() -> None:
    """The mean of ratios would be -200%, by a prompt that has next to nothing to lose."""
    found = summaries(study({GAP: [0.9, 0.001], "arm": [0.09, 0.006]}))["arm"]
    assert found.gap_recovery.value == pytest.approx(1 - 0.096 / 0.901)
    assert pytest.approx(-2.05) == 1 - (0.09 / 0.9 + 0.006 / 0.001) / 2


def test_recovery_of_the_ends() -> None:
    found = summaries(study({GAP: [0.2, 0.4]}))
    assert found[FULL].gap_recovery.value == 1.0
    assert found[GAP].gap_recovery.value == 0.0
    worse = summaries(study({GAP: [0.2, 0.4], "worse": [0.4, 0.8]}))["worse"]
    assert worse.gap_recovery.value == pytest.approx(-1.0), "negative results are results"


def test_nothing_is_recovered_of_a_gap_that_is_noise() -> None:
    """Not a huge number: at or below the floor there is no gap."""
    records = study({GAP: [2e-6, 1e-6], "arm": [9e-6, 9e-6], "noise": [1e-6, 2e-6]})
    design = replace(_DESIGN, floor="noise")
    found = summaries(records, design)
    assert found["arm"].gap_recovery == UNDEFINED
    assert found["arm"].first_gap_recovery == UNDEFINED
    assert found["arm"].mean_kl_in_floors == pytest.approx(6.0)
    assert found["arm"].max_kl_in_floors == pytest.approx(6.0)
    assert summaries(records, replace(_DESIGN, floor_kl=1.5e-6))["arm"].gap_recovery == UNDEFINED
    assert summaries(records, replace(_DESIGN, floor_kl=1.4e-6))["arm"].gap_recovery.value


def test_a_gap_of_exactly_nothing_recovers_nothing() -> None:
    found = summaries(study({GAP: [0.0, 0.0], "arm": [0.0, 0.0]}))["arm"]
    assert found.gap_recovery == UNDEFINED
    assert found.mean_kl_in_floors is None, "no floor, no units of it"


def test_recovery_is_unbounded_where_resamples_lose_the_gap() -> None:
    """One prompt of three carries all of it: three in ten resamples leave that one out."""
    found = summaries(study({GAP: [0.9, 0.0, 0.0], "arm": [0.1, 0.1, 0.1]}))["arm"]
    assert found.gap_recovery.value == pytest.approx(1 - 0.3 / 0.9)
    assert (found.gap_recovery.low, found.gap_recovery.high) == (-math.inf, math.inf)


def test_without_the_gaps_arm_recovery_is_undefined() -> None:
    assert summaries(study({"arm": [0.1, 0.2]}))["arm"].gap_recovery == UNDEFINED


def test_infinite_kl_is_not_averaged_away() -> None:
    found = summaries(study({GAP: [0.5, 0.5], "arm": [math.inf, 0.0]}))["arm"]
    assert found.mean_kl.value == math.inf
    assert found.max_kl == math.inf
    assert found.gap_recovery.value == -math.inf


def test_kl_over_steps_and_of_the_first_token() -> None:
    """The mean is over steps; p95 is a KL that occurred."""
    of_arm = {0: [(7 * step % 100 + 1) / 100 for step in range(100)], 1: [0.5] * 100}
    of_gap = {0: [0.04] + [1.0] * 99, 1: [1.5] + [1.0] * 99}
    records = [
        Record(prompt=prompt(number), arm=arm, measured=measured(steps))
        for number in range(2)
        for arm, steps in (
            (FULL, [0.0] * 100),
            (GAP, of_gap[number]),
            ("arm", of_arm[number]),
        )
    ]
    found = summaries(records)["arm"]
    assert found.mean_kl.value == pytest.approx((50.5 + 50) / 200)
    assert found.first_kl.value == pytest.approx((0.01 + 0.5) / 2)
    assert found.gap_recovery.value == pytest.approx(1 - 100.5 / 199.54)
    assert found.first_gap_recovery.value == pytest.approx(1 - 0.51 / 1.54)
    assert (found.p95_kl, found.max_kl) == (0.9, 1.0)
    alone = summaries([record for record in records if record.prompt.number == 0])["arm"]
    assert (alone.p95_kl, alone.max_kl) == (0.95, 1.0)


def test_agreement_and_divergence() -> None:
    full = measured([0.0] * 4, agrees=[True] * 4)
    arms = [[True, False, True, True], [True, True, True, True]]
    records = [
        record
        for number, agrees in enumerate(arms)
        for record in (
            Record(prompt=prompt(number), arm=FULL, measured=full),
            Record(prompt=prompt(number), arm="arm", measured=measured([0.1] * 4, agrees=agrees)),
        )
    ]
    found = summaries(records)["arm"]
    assert found.agreement.value == pytest.approx(7 / 8)
    assert found.divergence.value == pytest.approx((1 + 4) / 2)


def test_ranking_counts_what_full_prefill_gets_right() -> None:
    """A tie is no win."""
    right, wrong, tie = ranked(-1.0, -3.0), ranked(-3.0, -2.0), ranked(-1.0, -1.0)
    full_side = [right, right, wrong, right, tie]
    arm_side = [right, tie, right, right, right]
    records = [
        Record(prompt=prompt(number), arm=arm, measured=measured(0.0, likelihoods=likelihoods))
        for arm, side in ((FULL, full_side), ("arm", arm_side))
        for number, likelihoods in enumerate(side)
    ]
    records += study({"arm": [0.0] * 3}, family="nothing_to_rank")
    found = summaries(records)["arm"]
    assert (found.num_prompts, found.num_rankable, found.num_full_right) == (8, 5, 3)
    assert found.ranking.value == pytest.approx(2 / 3)
    assert found.ranking_all.value == pytest.approx(4 / 5)
    assert found.full_right_ratio.value == pytest.approx(3 / 5)
    assert found.margin.value == pytest.approx((0 - 2 + 3 + 0 + 2) / 5)
    # Gold is more likely by 2 nats on one of the five prompts that have it, two tokens each.
    assert found.answer_nll.value == pytest.approx(-2 / 10)


def test_likelihoods_are_deltas_to_full_prefill_per_token() -> None:
    records = [
        Record(prompt=prompt(0), arm=FULL, measured=measured([0.0] * 4, nll=0.5)),
        Record(prompt=prompt(0), arm="arm", measured=measured([0.0] * 4, nll=0.75)),
    ]
    found = summaries(records)
    assert found["arm"].reference_nll.value == pytest.approx(0.25)
    assert found[FULL].reference_nll.value == 0.0
    assert found["arm"].answer_nll == found["arm"].ranking == UNDEFINED


@given(st.permutations(range(12)))
@settings(max_examples=20, deadline=None)
def test_the_order_of_records_changes_nothing(order: list[int]) -> None:
    gap, arm = correlated(np.random.default_rng(5), 4)
    records = study({GAP: gap, "arm": arm})
    assert summaries([records[index] for index in order]) == summaries(records)


def test_other_arms_and_cells_change_no_figure_of_a_cell() -> None:
    gap, arm = correlated(np.random.default_rng(6), 20)
    alone = cell_sums(study({GAP: gap, "arm": arm}), _DESIGN)
    more = study({GAP: gap, "arm": arm, "another": gap}) + study({GAP: gap}, family="musique")
    among = cell_sums(more, _DESIGN)
    (cell,) = alone
    assert summarize(among[cell]["arm"], _DESIGN) == summarize(alone[cell]["arm"], _DESIGN)


def test_cells_are_resampled_each_by_itself() -> None:
    """A resample of all cells has as many prompts of each: between cells is no noise."""
    records = study({GAP: [1.0] * 5, "arm": [0.5] * 5}) + study(
        {GAP: [0.01] * 5, "arm": [0.001] * 5}, family="musique"
    )
    found = summaries(records)["arm"].mean_kl
    assert (found.low, found.value, found.high) == pytest.approx((0.2505,) * 3)


def test_an_arm_counts_in_the_cells_that_it_was_run_in() -> None:
    """Against the gap of the same cells."""
    records = study({GAP: [1.0], "arm": [0.5]}) + study({GAP: [3.0]}, family="musique")
    found = summaries(records)
    assert (found["arm"].num_cells, found[GAP].num_cells) == (1, 2)
    assert found["arm"].gap_recovery.value == pytest.approx(0.5)


def test_arms_over_other_prompts_are_refused() -> None:
    records = study({GAP: [0.1, 0.2], "arm": [0.1, 0.2]})
    with pytest.raises(InconsistentRecords, match="'arm' has 1 prompts"):
        cell_sums(records[:-1], _DESIGN)
    with pytest.raises(InconsistentRecords, match="two results of arm 'arm'"):
        cell_sums([*records, records[-1]], _DESIGN)
    with pytest.raises(InconsistentRecords, match="no arm 'full'"):
        cell_sums([record for record in records if record.arm != FULL], _DESIGN)
    with pytest.raises(InconsistentRecords, match="no arm 'noise'"):
        cell_sums(records, replace(_DESIGN, floor="noise"))


def test_arms_over_other_steps_or_candidates_are_refused() -> None:
    full = Record(prompt=prompt(0), arm=FULL, measured=measured([0.0, 0.0]))
    for other in (measured([0.0]), measured([0.0, 0.0], likelihoods=ranked(-1.0, -2.0))):
        with pytest.raises(InconsistentRecords, match="of full prefill"):
            cell_sums([full, Record(prompt=prompt(0), arm="arm", measured=other)], _DESIGN)


def test_merging_drops_repetitions_and_refuses_contradictions() -> None:
    one, two = study({GAP: [0.1, 0.2]}), study({GAP: [0.1, 0.2], "arm": [0.0, 0.0]})
    assert merged([*two, *one]) == merged(two)
    assert len(merged([*one, *two])) == 6
    with pytest.raises(InconsistentRecords, match="'full_reuse_alone' has two results"):
        merged([*one, *study({GAP: [0.1, 0.3]})])


_CURVE = [ArmSpec(name=name, curve="hkvd") for name in ("r0", "r10", "r50")]
_RATIOS = {"r0": 0.0, "r10": 0.1, "r50": 0.5}


def verdict(arms: dict[str, list[float]], design: Design = _DESIGN) -> str:
    group = added(cell_sums(study(arms, ratios=_RATIOS), design).values())
    (curve,) = curves(group, _CURVE, design)
    assert curve.arms == ("r0", "r10", "r50")
    return curve.verdict


def test_a_curve_is_monotone_if_more_recomputation_never_hurts() -> None:
    gap = np.random.default_rng(8).lognormal(-2.0, 1.0, 60)
    falling = {"r50": gap / 4, "r0": gap, "r10": gap / 2}
    assert verdict({arm: kl.tolist() for arm, kl in falling.items()}) == "monotone"
    rising = {"r50": gap, "r0": gap, "r10": gap / 2}
    assert verdict({arm: kl.tolist() for arm, kl in rising.items()}) == "not monotone"


def test_a_rise_within_the_interval_or_the_floor_is_noise() -> None:
    source = np.random.default_rng(9)
    gap = source.lognormal(-2.0, 1.0, 60)
    wobble = gap / 2 * source.lognormal(0.0, 1.0, 60)
    wobble *= 1.01 * (gap / 2).sum() / wobble.sum()
    arms = {"r0": gap.tolist(), "r10": (gap / 2).tolist(), "r50": wobble.tolist()}
    assert verdict(arms) == "monotone within noise"
    tiny = {"r0": [1e-7] * 9, "r10": [1e-7] * 9, "r50": [3e-7] * 9}
    assert verdict(tiny) == "not monotone"
    assert verdict(tiny, replace(_DESIGN, floor_kl=1e-6)) == "monotone within noise"


def test_noise_alone_seldom_breaks_a_curve() -> None:
    """Six arms that are equally good have fifteen pairs: at 95% each, every third would break."""
    source = np.random.default_rng(12)
    names = [f"r{number}" for number in range(6)]
    specs = [ArmSpec(name=name, curve="hkvd") for name in names]
    ratios = {name: number / 10 for number, name in enumerate(names)}
    design = replace(_DESIGN, num_resamples=1000)
    broken = 0
    for _ in range(40):
        arms = {name: (0.1 + source.random(50) / 10).tolist() for name in names}
        group = added(cell_sums(study(arms, ratios=ratios), design).values())
        (curve,) = curves(group, specs, design)
        broken += curve.verdict == "not monotone"
    assert broken <= 3


def test_a_curve_over_other_cells_has_no_verdict() -> None:
    """Its points would differ in their prompts, too."""
    records = study({"r0": [0.1], "r10": [0.2]}, ratios=_RATIOS)
    records += study({"r0": [0.1]}, family="musique", ratios=_RATIOS)
    cells = cell_sums(records, _DESIGN)
    (curve,) = curves(added(cells.values()), _CURVE, _DESIGN)
    assert curve.verdict == "not comparable"
    assert [len(curves(cell, _CURVE, _DESIGN)) for cell in cells.values()] == [0, 1]


def test_a_slow_climb_is_seen_between_its_ends() -> None:
    """Every pair is looked at, not only neighbours."""
    gap = np.random.default_rng(10).lognormal(-2.0, 0.1, 60)
    noisy = np.random.default_rng(11).normal(0, 0.05, 60)
    arms = {
        "r0": gap.tolist(),
        "r10": (gap + 0.005 + noisy - noisy.mean()).tolist(),
        "r50": (gap + 0.01).tolist(),
    }
    group = added(cell_sums(study(arms, ratios=_RATIOS), _DESIGN).values())
    (curve,) = curves(group, _CURVE, _DESIGN)
    assert [(rise.lower, rise.higher) for rise in curve.proven] == [("r0", "r50")]
