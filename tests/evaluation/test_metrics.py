"""What is measured of one prompt under one arm."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tests.evaluation.studies import measured, ranked

from blend_gateway.evaluation.metrics import (
    DamagedLogits,
    LayerDeviations,
    Likelihoods,
    Measured,
    ReferenceLogits,
    log_softmax,
)

_FINITE = st.floats(-80, 80, width=32)
_SHAPES = st.tuples(st.integers(1, 5), st.integers(2, 9))


def logits(*rows: list[float]) -> NDArray[np.float32]:
    return np.array(rows, dtype=np.float32)


def of_probabilities(*rows: list[float]) -> NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, dtype=np.float64)).astype(np.float32)


def kl_of(full: NDArray[np.float32], arm: NDArray[np.float32]) -> tuple[float, ...]:
    return ReferenceLogits(full).measure(arm, charged_ratio=0.0).kl


def closed_form(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.5], [0.9, 0.1]),
        ([0.9, 0.1], [0.5, 0.5]),
        ([0.7, 0.2, 0.1], [0.1, 0.2, 0.7]),
        ([0.25] * 4, [0.97, 0.01, 0.01, 0.01]),
    ],
)
def test_kl_is_of_full_prefill_against_the_arm(p: list[float], q: list[float]) -> None:
    """In this order: what full prefill finds likely must not be lost."""
    (kl,) = kl_of(of_probabilities(p), of_probabilities(q))
    assert kl == pytest.approx(closed_form(p, q), rel=1e-6)
    if sorted(p) != sorted(q):
        assert kl != pytest.approx(closed_form(q, p), rel=0.01)


def test_kl_has_the_digits_that_small_damage_needs() -> None:
    """For a small change d of the logits, KL is half the variance of d: here 3e-10."""
    rows = 3
    base = np.random.default_rng(0).normal(0, 4, (rows, 50_000)).astype(np.float32)
    base[:, 0] = 16.0
    arm = base.copy()
    arm[:, 0] += np.float32(2**-15)
    p_S = np.exp(log_softmax(base))[:, 0]
    expected = p_S * (1 - p_S) * (2**-15) ** 2 / 2
    assert kl_of(base, arm) == pytest.approx(expected.tolist(), rel=1e-3, abs=0)


def test_a_vocabulary_of_262_thousand_sums_up() -> None:
    """Uniform against one token at half: log(2) less the rest's share."""
    size = 262_144
    arm = np.zeros((1, size), dtype=np.float32)
    arm[0, 7] = math.log(size - 1)
    uniform = np.full((1, size), 1 / size).tolist()
    q = [0.5 / (size - 1)] * size
    q[7] = 0.5
    (kl,) = kl_of(np.zeros((1, size), dtype=np.float32), arm)
    assert kl == pytest.approx(closed_form(uniform[0], q), rel=1e-6)


def test_what_full_prefill_rules_out_costs_nothing() -> None:
    full = of_probabilities([0.5, 0.5, 0.0], [0.5, 0.5, 0.0])
    arm = of_probabilities([0.5, 0.5, 0.0], [0.25, 0.25, 0.5])
    assert kl_of(full, arm) == pytest.approx([0.0, math.log(2)], rel=1e-6)


def test_what_only_the_arm_rules_out_is_infinitely_wrong() -> None:
    assert kl_of(of_probabilities([0.9, 0.1]), of_probabilities([1.0, 0.0])) == (math.inf,)


@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]], ids=str)
def test_logits_that_are_no_distribution_are_refused(row: list[float]) -> None:
    """On either side, and never averaged away."""
    good = logits([0.0, 0.0], [0.0, 0.0])
    bad = logits([0.0, 0.0], row)
    with pytest.raises(DamagedLogits, match="step 1"):
        ReferenceLogits(bad)
    with pytest.raises(DamagedLogits, match="step 1"):
        ReferenceLogits(good).measure(bad, charged_ratio=0.0)


def test_other_steps_or_another_vocabulary_are_refused() -> None:
    reference = ReferenceLogits(logits([0.0, 0.0]))
    with pytest.raises(ValueError, match=r"\(1, 3\)"):
        reference.measure(logits([0.0, 0.0, 0.0]), charged_ratio=0.0)
    with pytest.raises(ValueError, match="2 tokens for 1 steps"):
        ReferenceLogits(logits([0.0, 0.0]), tokens=(0, 1))


@given(_SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=_FINITE)))
def test_full_prefill_against_itself_is_flawless(full: NDArray[np.float32]) -> None:
    """Ties among its logits included."""
    same = ReferenceLogits(full).measure(full, charged_ratio=1.0)
    assert set(same.kl) == {0.0}
    assert all(same.agrees)
    assert same.first_divergence == same.num_steps == len(full)


@given(
    _SHAPES.flatmap(
        lambda shape: st.tuples(
            arrays(np.float32, shape, elements=_FINITE | st.just(-math.inf)),
            arrays(np.float32, shape, elements=_FINITE),
        )
    ),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_kl_is_never_negative_and_knows_no_order_of_tokens(
    sides: tuple[NDArray[np.float32], NDArray[np.float32]], seed: int
) -> None:
    full, arm = sides
    full[:, 0] = 0.0  # something finite in every step
    kl = kl_of(full, arm)
    assert min(kl) >= 0
    order = np.random.default_rng(seed).permutation(full.shape[1])
    assert kl_of(full[:, order], arm[:, order]) == pytest.approx(kl, rel=1e-6, abs=1e-12)


def test_rounding_makes_no_kl_negative() -> None:
    """Of logits one unit in the last place apart: what is summed is below 0 for some of them."""
    full = np.random.default_rng(0).normal(0, 3, (2000, 4)).astype(np.float32)
    arm = np.nextafter(full, np.float32(9))
    logp, logq = log_softmax(full), log_softmax(arm)
    assert (np.exp(logp) * (logp - logq)).sum(axis=1).min() < 0
    assert min(kl_of(full, arm)) == 0


def test_a_constant_added_to_a_steps_logits_changes_nothing() -> None:
    source = np.random.default_rng(1)
    full, arm = source.integers(-64, 64, (2, 4, 9)).astype(np.float32) / 8
    assert kl_of(full, arm + np.float32(1024.0)) == kl_of(full, arm)


def test_the_greedy_token_of_equal_logits_is_the_lowest() -> None:
    """So bf16's many ties do not make agreement a matter of luck."""
    full = logits([1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0])
    arm = logits([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1.0])
    found = ReferenceLogits(full).measure(arm, charged_ratio=0.0)
    assert found.agrees == (True, False, True)
    assert found.first_divergence == 1


def test_likelihood_is_of_the_references_tokens() -> None:
    full = of_probabilities([0.6, 0.4], [0.3, 0.7], [0.5, 0.5])
    arm = of_probabilities([0.2, 0.8], [0.9, 0.1], [0.5, 0.5])
    greedy = ReferenceLogits(full)
    assert greedy.tokens == (0, 1, 0)
    nll = greedy.measure(arm, charged_ratio=0.0).reference_nll
    assert nll == pytest.approx([-math.log(0.2), -math.log(0.1), -math.log(0.5)], rel=1e-6)
    given_tokens = ReferenceLogits(full, tokens=(1, 1))
    nll = given_tokens.measure(arm, charged_ratio=0.0).reference_nll
    assert nll == pytest.approx([-math.log(0.8), -math.log(0.1)], rel=1e-6)


def test_margin_is_to_the_best_other_candidate() -> None:
    assert measured(0.0, likelihoods=ranked(-1.0, -2.5, -9.0)).margin == 1.5
    assert measured(0.0, likelihoods=ranked(-1.0, -9.0, -0.5)).margin == -0.5
    assert measured(0.0, likelihoods=ranked(-1.0)).margin is None, "nothing to rank"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_likelihoods_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(DamagedLogits):
        Likelihoods(answer=value, num_answer_tokens=1)
    with pytest.raises(DamagedLogits):
        ranked(-1.0, value)


def test_measured_figures_keep_nine_digits() -> None:
    """What a report writes is what it computes with, so it can be recomputed from its file."""
    source = np.random.default_rng(2)
    full, arm = source.normal(0, 3, (2, 5, 40)).astype(np.float32)
    found = ReferenceLogits(full).measure(
        arm,
        charged_ratio=1 / 3,
        likelihoods=replace(ranked(-1 / 3, -2 / 3), answer=-1 / 7),
        deviations=LayerDeviations(key=(1 / 3, 2 / 3), attention=(1 / 7,)),
    )

    def nine(values: tuple[float, ...]) -> bool:
        return all(value == float(f"{value:.9g}") for value in values)

    assert nine((*found.kl, *found.reference_nll, found.charged_ratio))
    assert found.charged_ratio == 0.333333333
    assert found.likelihoods.answer == -0.142857143
    assert found.likelihoods.candidates == (-0.333333333, -0.666666667)
    assert found.deviations.key == (0.333333333, 0.666666667)
    assert found.deviations.value is None
    assert found.deviations.attention == (0.142857143,)


def test_measuring_twice_gives_the_same() -> None:
    source = np.random.default_rng(3)
    full, arm = source.normal(0, 3, (2, 33, 999)).astype(np.float32)

    def once() -> Measured:
        return ReferenceLogits(full).measure(arm, charged_ratio=0.1)

    assert once() == once()
