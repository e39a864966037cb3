"""A run's figures as Markdown. Every arm is in every table that it was run for, good or bad."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from blend_gateway.evaluation.bootstrap import Estimate
from blend_gateway.evaluation.figures import Figures, GroupFigures, Grouping
from blend_gateway.evaluation.statistics import Curve, Summary
from blend_gateway.evaluation.yardsticks import LOSSES, rank_agreement

_UNDEFINED = "undefined"
_HOW_TO_READ = """\
KL is KL(full || arm) per teacher-forced step of full prefill's own greedy continuation, in nats
over the full vocabulary. *Recovered* is 1 - (sum of KL) / (sum of `{gap}`'s KL) over the same
prompts. *Charged* is fresh token-layers on document tokens over all of them. In brackets: 95%
intervals of a bootstrap that draws the same prompts for every arm, {resamples} times, within each
cell. *Floors* is mean KL in units of the noise floor. NLLs are the arm's minus full prefill's, per
token. *Ranked* is how often the gold answer is the likeliest candidate, of the prompts on which it
is for full prefill."""


def to_markdown(figures: Figures, *, plots: Sequence[str] = ()) -> str:
    """The report. Plots are files beside it."""
    everything = figures.all
    parts = [
        *_head(figures),
        "## All prompts",
        _kl_table(everything),
        _task_table(everything),
        *(f"![{name}]({name})" for name in plots),
        *_baseline(everything),
        "## Curves",
        *_curve_parts(everything),
    ]
    for grouping, title in _GROUPINGS:
        parts += [f"## Recovered, by {title}", _recovery_table(figures, grouping)]
    if figures.layers:
        parts += ["## Deviation by layer", *_layer_parts(figures)]
    parts += ["## Do the metrics agree?", _yardstick_table(everything)]
    for group in figures.of(Grouping.CELL):
        parts += [f"## Cell {group.name}", _kl_table(group), _task_table(group)]
        parts += _curve_parts(group)
    return "\n\n".join(parts) + "\n"


_GROUPINGS = (
    (Grouping.FAMILY, "family"),
    (Grouping.VARIANT, "variant"),
    (Grouping.LENGTH, "length"),
    (Grouping.POSITION, "position of the first needed document"),
    (Grouping.ORDER, "order of the documents"),
)


def _head(figures: Figures) -> Iterator[str]:
    run = figures.run
    yield f"# Quality of {run.model}"
    facts = {"content": run.content_hash, "seed": str(run.design.seed)}
    facts |= dict(sorted(run.settings.items())) | dict(sorted(run.versions.items()))
    yield _table(("", ""), ((_escaped(name), _escaped(value)) for name, value in facts.items()))
    full = figures.all.summaries[run.design.full]
    yield f"{full.num_prompts} prompts in {full.num_cells} cells, {len(run.arms)} arms. " + (
        f"Noise floor: {_number(full.noise_floor)} nats a step."
        if full.noise_floor > 0
        else "No noise floor was given."
    )
    yield _HOW_TO_READ.format(gap=run.design.gap, resamples=run.design.num_resamples)
    described = [arm for arm in run.arms if arm.description]
    if described:
        yield _table(
            ("arm", "what it is"),
            ((_escaped(arm.name), _escaped(arm.description)) for arm in described),
        )


def _kl_table(group: GroupFigures) -> str:
    return _table(
        (
            "arm",
            "prompts",
            "charged",
            "recovered",
            "first token",
            "mean KL",
            "p95",
            "max",
            "floors",
        ),
        (
            (
                _escaped(arm),
                _prompts(group, summary),
                _percent(summary.charged_ratio),
                _estimate(summary.gap_recovery, _percent),
                _estimate(summary.first_gap_recovery, _percent),
                _estimate(summary.mean_kl),
                _number(summary.p95_kl),
                _number(summary.max_kl),
                _number(summary.mean_kl_in_floors),
            )
            for arm, summary in group.summaries.items()
        ),
    )


def _prompts(group: GroupFigures, summary: Summary) -> str:
    most = max(other.num_cells for other in group.summaries.values())
    cells = "" if summary.num_cells == most else f" ({summary.num_cells} of {most} cells)"
    return f"{summary.num_prompts}{cells}"


def _task_table(group: GroupFigures) -> str:
    return _table(
        ("arm", "top-1", "diverges at", "ref. NLL", "answer NLL", "ranked", "of", "all ranked"),
        (
            (
                _escaped(arm),
                _estimate(summary.agreement, _percent),
                _number(summary.divergence.value),
                _estimate(summary.reference_nll, _signed),
                _estimate(summary.answer_nll, _signed),
                _estimate(summary.ranking, _percent),
                f"{summary.num_full_right} of {summary.num_rankable}",
                _percent(summary.ranking_all.value),
            )
            for arm, summary in group.summaries.items()
        ),
    )


def _baseline(group: GroupFigures) -> Iterator[str]:
    if group.against_baseline:
        yield f"## Mean KL minus that of {_escaped(group.baseline or '')}, prompt by prompt"
        yield _table(
            ("arm", "difference"),
            (
                (_escaped(arm), _estimate(difference, _signed))
                for arm, difference in group.against_baseline.items()
            ),
        )


def _curve_parts(group: GroupFigures) -> Iterator[str]:
    for curve in group.curves:
        yield f"Curve {_escaped(curve.name)}: **{curve.verdict}**{_rises(curve)}"
        yield _table(
            ("arm", "charged", "recovered", "mean KL", "top-1"),
            (
                (
                    _escaped(arm),
                    _percent(summary.charged_ratio),
                    _estimate(summary.gap_recovery, _percent),
                    _estimate(summary.mean_kl),
                    _percent(summary.agreement.value),
                )
                for arm, summary in ((arm, group.summaries[arm]) for arm in curve.arms)
            ),
        )


def _rises(curve: Curve) -> str:
    shown = curve.proven or curve.rises
    return "".join(
        f"; from {_escaped(rise.lower)} to {_escaped(rise.higher)} mean KL rises by "
        f"{_estimate(rise.rise, _number)}"
        for rise in shown
    )


def _recovery_table(figures: Figures, grouping: Grouping) -> str:
    groups = figures.of(grouping)
    rows = (
        (
            _escaped(arm.name),
            *(
                _estimate(group.summaries[arm.name].gap_recovery, _percent)
                if arm.name in group.summaries
                else "not run"
                for group in groups
            ),
        )
        for arm in figures.run.arms
    )
    return _table(("arm", *(_escaped(group.name) for group in groups)), rows)


def _layer_parts(figures: Figures) -> Iterator[str]:
    for name in ("key", "value", "attention"):
        arrays = {
            arm: layers
            for arm, each in figures.layers.items()
            if (layers := getattr(each, name)) is not None
        }
        if arrays:
            deepest = max(len(layers) for layers in arrays.values())
            yield _table(
                (name, *(f"layer {layer}" for layer in range(deepest))),
                (
                    (_escaped(arm), *(_number(value) for value in layers))
                    for arm, layers in arrays.items()
                ),
            )


def _yardstick_table(group: GroupFigures) -> str:
    rows = rank_agreement(group.summaries)
    return "Spearman's rank correlation of what two metrics say of all arms.\n\n" + _table(
        ("", *LOSSES),
        (
            (name, *("-" if value is None else f"{value:.2f}" for value in row))
            for name, row in zip(LOSSES, rows, strict=True)
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _estimate(estimate: Estimate, spelled: Callable[[float], str] | None = None) -> str:
    spell = spelled or _number
    if estimate.value is None:
        return _UNDEFINED
    return f"{spell(estimate.value)} [{spell(estimate.low)}, {spell(estimate.high)}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.3g}"


def _signed(value: float) -> str:
    return f"{value + 0.0:+.3g}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    if math.isinf(value):
        return _number(value)
    return f"{round(value, 3) + 0.0:.1%}"
