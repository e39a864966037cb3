"""Per-prompt quantities of every arm, summed over groups of prompts and over their resamples.

Every figure of a report is a ratio of two such sums. Sums add up over cells, so what is reported
over many cells is resampled within each: the cells are fixed by design, their prompts are not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
from numpy.typing import NDArray

from blend_gateway.evaluation.bootstrap import NUM_RESAMPLES, draw_counts, resampled_sums
from blend_gateway.evaluation.metrics import Measured
from blend_gateway.evaluation.records import InconsistentRecords, PromptId, Record


class Quantity(IntEnum):
    """What is summed over prompts. All deltas are the arm minus full prefill."""

    PROMPTS = 0
    STEPS = auto()
    KL = auto()
    FIRST_KL = auto()
    AGREEING = auto()
    DIVERGENCE = auto()
    """Steps before the first one that differs."""
    REFERENCE_TOKENS = auto()
    REFERENCE_NLL = auto()
    """A delta."""
    ANSWER_TOKENS = auto()
    ANSWER_NLL = auto()
    """A delta."""
    RANKABLE = auto()
    """Prompts with candidates to rank."""
    FULL_RIGHT = auto()
    """Of those, the ones that full prefill gets right."""
    BOTH_RIGHT = auto()
    """Of those, the ones that the arm gets right, too."""
    RIGHT = auto()
    """Rankable prompts that the arm gets right."""
    MARGIN = auto()
    """A delta, over rankable prompts."""
    CHARGED = auto()
    GAP_KL = auto()
    """KL of the gap's arm on the same prompts."""
    GAP_FIRST_KL = auto()
    FLOOR_KL = auto()
    """KL of the noise floor's arm on the same prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Which arms the others are held against.

    Args:
        full: Full prefill, the reference itself; must be there for every prompt.
        gap: What 0% recovered means: documents compiled alone, rotated, nothing recomputed.
        floor: An arm whose KL is numerical noise alone, e.g. full prefill batched differently.
        floor_kl: Mean KL a step, nats, below which nothing counts, whatever the floor's arm says.
        seed: Of the resampling.
        num_resamples: Of each cell.
    """

    full: str = "full"
    gap: str = "full_reuse_alone"
    floor: str | None = None
    floor_kl: float = 0.0
    seed: int = 0
    num_resamples: int = NUM_RESAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSums:
    """Sums of one arm over one group.

    Args:
        sums_QB: ``[Quantity, B + 1]``; the first column is the sample itself.
        steps_kl: KL of every step of every prompt.
        cells: The cells that the arm was run in.
    """

    sums_QB: NDArray[np.float64]
    steps_kl: NDArray[np.float64]
    cells: tuple[str, ...]

    def __getitem__(self, quantity: Quantity) -> NDArray[np.float64]:
        row_B: NDArray[np.float64] = self.sums_QB[quantity]
        return row_B

    def plus(self, other: "ArmSums") -> "ArmSums":
        """Both groups as one."""
        return ArmSums(
            sums_QB=self.sums_QB + other.sums_QB,
            steps_kl=np.concatenate([self.steps_kl, other.steps_kl]),
            cells=self.cells + other.cells,
        )


Group = Mapping[str, ArmSums]
"""Arms by name, over the same prompts."""


def cell_sums(
    records: Iterable[Record],
    design: Design,
    *,
    cell_of: Callable[[PromptId], str] = lambda prompt: prompt.cell,
) -> dict[str, Group]:
    """Sums of every cell, by its name.

    Raises:
        InconsistentRecords: Full prefill or a prompt of an arm is missing, or there are two.
    """
    cells: dict[str, dict[str, dict[PromptId, Measured]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        arm = cells[cell_of(record.prompt)][record.arm]
        if record.prompt in arm:
            raise InconsistentRecords(f"two results of arm {record.arm!r} for {record.prompt!r}")
        arm[record.prompt] = record.measured
    return {name: _cell(name, cells[name], design) for name in sorted(cells)}


def added(groups: Iterable[Group]) -> Group:
    """Several cells as one group; an arm counts in the cells that it was run in."""
    total: dict[str, ArmSums] = {}
    for group in groups:
        for arm, sums in group.items():
            total[arm] = total[arm].plus(sums) if arm in total else sums
    return total


def _cell(name: str, arms: Mapping[str, Mapping[PromptId, Measured]], design: Design) -> Group:
    for needed in (design.full, design.floor):
        if needed is not None and needed not in arms:
            raise InconsistentRecords(f"no arm {needed!r} in {name}")
    prompts = sorted(arms[design.full])
    for arm, measured in arms.items():
        if sorted(measured) != prompts:
            raise InconsistentRecords(
                f"arm {arm!r} has {len(measured)} prompts in {name}, arm {design.full!r} has "
                f"{len(prompts)}, or they are others; every arm needs the same ones"
            )
    counts_BN = draw_counts(
        len(prompts), seed=design.seed, name=name, num_resamples=design.num_resamples
    )
    against = {
        role: [arms[arm][prompt] for prompt in prompts] if arm in arms else None
        for role, arm in (("full", design.full), ("gap", design.gap), ("floor", design.floor or ""))
    }
    return {
        arm: _arm(name, counts_BN, [arms[arm][prompt] for prompt in prompts], against)
        for arm in sorted(arms)
    }


def _arm(
    name: str,
    counts_BN: NDArray[np.float64],
    measured: Sequence[Measured],
    against: Mapping[str, Sequence[Measured] | None],
) -> ArmSums:
    full, gap, floor = against["full"], against["gap"], against["floor"]
    assert full is not None
    columns_NQ = np.array(
        [
            _quantities(
                one,
                full=full[index],
                gap=None if gap is None else gap[index],
                floor=None if floor is None else floor[index],
            )
            for index, one in enumerate(measured)
        ]
    )
    return ArmSums(
        sums_QB=resampled_sums(counts_BN, columns_NQ).T.copy(),
        steps_kl=np.array([kl for one in measured for kl in one.kl]),
        cells=(name,),
    )


def _quantities(
    arm: Measured, *, full: Measured, gap: Measured | None, floor: Measured | None
) -> list[float]:
    _check_alike(arm, full)
    row = [0.0] * len(Quantity)
    row[Quantity.PROMPTS] = 1.0
    row[Quantity.STEPS] = arm.num_steps
    row[Quantity.KL] = sum(arm.kl)
    row[Quantity.FIRST_KL] = arm.kl[0]
    row[Quantity.AGREEING] = sum(arm.agrees)
    row[Quantity.DIVERGENCE] = arm.first_divergence
    row[Quantity.REFERENCE_TOKENS] = len(arm.reference_nll)
    row[Quantity.REFERENCE_NLL] = sum(arm.reference_nll) - sum(full.reference_nll)
    row[Quantity.CHARGED] = arm.charged_ratio
    if arm.likelihoods.answer is not None and full.likelihoods.answer is not None:
        row[Quantity.ANSWER_TOKENS] = arm.likelihoods.num_answer_tokens
        row[Quantity.ANSWER_NLL] = full.likelihoods.answer - arm.likelihoods.answer
    margin, full_margin = arm.margin, full.margin
    if margin is not None and full_margin is not None:
        row[Quantity.RANKABLE] = 1.0
        row[Quantity.RIGHT] = margin > 0
        row[Quantity.FULL_RIGHT] = full_margin > 0
        row[Quantity.BOTH_RIGHT] = min(margin, full_margin) > 0
        row[Quantity.MARGIN] = margin - full_margin
    row[Quantity.GAP_KL] = np.nan if gap is None else sum(gap.kl)
    row[Quantity.GAP_FIRST_KL] = np.nan if gap is None else gap.kl[0]
    row[Quantity.FLOOR_KL] = 0.0 if floor is None else sum(floor.kl)
    return row


def _check_alike(arm: Measured, full: Measured) -> None:
    """Raise where the two were not measured on the same steps, answer and candidates."""

    def measured_on(one: Measured) -> tuple[object, ...]:
        answers = one.likelihoods
        return (
            one.num_steps,
            len(one.reference_nll),
            answers.answer is None,
            answers.num_answer_tokens,
            answers.num_candidate_tokens,
        )

    if measured_on(arm) != measured_on(full):
        raise InconsistentRecords(
            f"steps, reference tokens, no answer, answer's and candidates' tokens are "
            f"{measured_on(arm)}, those of full prefill {measured_on(full)}"
        )
