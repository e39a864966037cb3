"""All figures of a run, computed once for the JSON, the Markdown and the plots."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import numpy as np

from blend_gateway.evaluation.bootstrap import Estimate
from blend_gateway.evaluation.metrics import LayerDeviations
from blend_gateway.evaluation.records import InconsistentRecords, PromptId, Record, merged
from blend_gateway.evaluation.runs import Run
from blend_gateway.evaluation.statistics import Curve, Summary, curves, difference, summarize
from blend_gateway.evaluation.sums import Group, added, cell_sums


class Grouping(StrEnum):
    """By what prompts are put together."""

    ALL = "all"
    FAMILY = "family"
    VARIANT = "variant"
    LENGTH = "length"
    CELL = "cell"
    POSITION = "position"
    """Thirds of the prompt, by where the first needed document stands."""
    ORDER = "order"
    """Permutations of the documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """Every arm over one group of prompts.

    Args:
        grouping: By what it was put together.
        name: Of the group.
        summaries: By arm, in the run's order.
        curves: Verdicts on more recomputation.
        baseline: The arm that all others are compared with, if any.
        against_baseline: Mean KL of each arm minus that one's, paired.
    """

    grouping: Grouping
    name: str
    summaries: Mapping[str, Summary]
    curves: tuple[Curve, ...]
    baseline: str | None
    against_baseline: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All of them.

    Args:
        run: What they were computed from.
        groups: In the order of `Grouping`, then by name.
        layers: Mean deviations per layer over all prompts that have them, by arm.
    """

    run: Run
    groups: tuple[GroupFigures, ...]
    layers: Mapping[str, LayerDeviations]

    def of(self, grouping: Grouping) -> tuple[GroupFigures, ...]:
        """The groups of one kind."""
        return tuple(group for group in self.groups if group.grouping is grouping)

    @property
    def all(self) -> GroupFigures:
        """Everything together."""
        (group,) = self.of(Grouping.ALL)
        return group


def compute_figures(run: Run, *, baseline: str | None = None) -> Figures:
    """Compute them.

    Args:
        run: With at least one record.
        baseline: An arm that all others are compared with, prompt by prompt.

    Raises:
        InconsistentRecords: See `cell_sums`; or there is nothing.
    """
    if not run.records:
        raise InconsistentRecords("a run without records has no figures")
    if baseline is not None and baseline not in {arm.name for arm in run.arms}:
        raise InconsistentRecords(f"the run has no arm {baseline!r} to compare with")
    run = replace(run, records=merged(run.records))
    groups: list[GroupFigures] = []
    for key, groupings in _PASSES:
        cells = cell_sums(run.records, run.design, cell_of=_joined(key))
        names = {_joined(key)(record.prompt): key(record.prompt) for record in run.records}
        for grouping, place in groupings:
            groups += [
                _figures(run, grouping, name, group, baseline)
                for name, group in _grouped(cells, names, place)
            ]
    return Figures(run=run, groups=tuple(groups), layers=_layers(run.records))


Key = tuple[str | int, ...]


def _cell(prompt: PromptId) -> Key:
    return (prompt.family, prompt.variant, prompt.length)


def _with_position(prompt: PromptId) -> Key:
    third = min(2, int(prompt.depth * 3))
    return (*_cell(prompt), ("first third", "second third", "third third")[third])


def _with_order(prompt: PromptId) -> Key:
    return (*_cell(prompt), prompt.order)


_EVERYTHING = slice(0, 0)
_PASSES: Sequence[tuple[Callable[[PromptId], Key], Sequence[tuple[Grouping, slice]]]] = (
    (
        _cell,
        (
            (Grouping.ALL, _EVERYTHING),
            (Grouping.FAMILY, slice(0, 1)),
            (Grouping.VARIANT, slice(1, 2)),
            (Grouping.LENGTH, slice(2, 3)),
            (Grouping.CELL, slice(0, 3)),
        ),
    ),
    (_with_position, ((Grouping.POSITION, slice(3, 4)),)),
    (_with_order, ((Grouping.ORDER, slice(3, 4)),)),
)
"""Within what prompts are resampled, and which part of that names the groups that it adds up to."""


def _joined(key: Callable[[PromptId], Key]) -> Callable[[PromptId], str]:
    return lambda prompt: "/".join(str(part) for part in key(prompt))


def _grouped(
    cells: Mapping[str, Group], keys: Mapping[str, Key], place: slice
) -> list[tuple[str, Group]]:
    members: dict[Key, list[Group]] = defaultdict(list)
    for name, cell in cells.items():
        members[keys[name][place]].append(cell)
    # Lengths and orders are numbers and sort as such; within one place all are of one type.
    return [
        ("/".join(str(part) for part in key) or "all", added(members[key]))
        for key in sorted(members)
    ]


def _figures(
    run: Run, grouping: Grouping, name: str, group: Group, baseline: str | None
) -> GroupFigures:
    present = [arm.name for arm in run.arms if arm.name in group]
    return GroupFigures(
        grouping=grouping,
        name=name,
        summaries={arm: summarize(group[arm], run.design) for arm in present},
        curves=curves(group, run.arms, run.design),
        baseline=baseline,
        against_baseline=_against(group, present, baseline),
    )


def _against(group: Group, arms: Sequence[str], baseline: str | None) -> dict[str, Estimate]:
    if baseline is None or baseline not in group:
        return {}
    cells = group[baseline].cells
    others = [arm for arm in arms if arm != baseline and group[arm].cells == cells]
    return {arm: difference(group, arm, baseline) for arm in others}


def _layers(records: Iterable[Record]) -> dict[str, LayerDeviations]:
    by_arm: dict[str, list[LayerDeviations]] = defaultdict(list)
    for record in records:
        by_arm[record.arm].append(record.measured.deviations)
    means = {
        arm: LayerDeviations(
            **{
                field.name: _mean([getattr(each, field.name) for each in deviations])
                for field in fields(LayerDeviations)
            }
        )
        for arm, deviations in by_arm.items()
    }
    return {arm: mean for arm, mean in means.items() if mean != LayerDeviations()}


def _mean(arrays: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    taken = [array for array in arrays if array is not None]
    if not taken:
        return None
    if len({len(array) for array in taken}) > 1:
        raise InconsistentRecords("deviations of one arm have different numbers of layers")
    return tuple(float(value) for value in np.mean(np.array(taken), axis=0))
