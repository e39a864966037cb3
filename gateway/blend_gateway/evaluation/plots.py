"""Plots of a run as SVG, the same bytes for the same figures.

matplotlib is an extra: everything else of the evaluation works without it.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from blend_gateway.evaluation.bootstrap import Estimate
from blend_gateway.evaluation.figures import Figures, Grouping

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "blendgate",  # ids inside the file are random without one
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # an arm's name is no formula
    "font.size": 8,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
}
_MARKERS = "osD^v<>PX*"
_LOWEST = -1.0
"""Recovery below it is drawn at the edge, with its number."""


class PlotsUnavailable(RuntimeError):
    """matplotlib is not installed."""


def to_plots(figures: Figures) -> dict[str, str]:
    """SVG texts by file name: recovery over charged ratio, by family, deviation by layer.

    Raises:
        PlotsUnavailable: matplotlib is not installed.
    """
    with _style():
        plots = {"recovery.svg": _recovery(figures), "families.svg": _families(figures)}
        if figures.layers:
            plots["layers.svg"] = _layers(figures)
    return plots


@contextmanager
def _style() -> Iterator[None]:
    """Set matplotlib's own defaults and ours, whatever the user's configuration says."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsUnavailable(
            "plots need matplotlib: pip install 'blendgate[eval]', or leave them out"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _recovery(figures: Figures) -> str:
    """A line with intervals for every curve, a point for every arm without one."""
    figure = _figure(10.0, 6.0)
    axes = figure.add_subplot()
    curves: dict[str, list[str]] = {}
    for arm in figures.run.arms:
        if arm.name in figures.all.summaries:
            curves.setdefault(arm.curve or arm.name, []).append(arm.name)
    for number, (curve, arms) in enumerate(curves.items()):
        _draw_curve(axes, number, curve, figures, arms)
    axes.set_xlabel("charged ratio, %")
    axes.set_ylabel("KL gap recovered")
    axes.set_ylim(_LOWEST - 0.05, 1.05)
    # The interesting ratios are the small ones; 0 must be on the axis, too.
    axes.set_xscale("symlog", linthresh=5.0)
    axes.set_xlim(-0.3, 110.0)
    ticks = [0, 2, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    figure.legend(loc="outside right upper", fontsize=7)
    return _svg(figure)


def _draw_curve(axes: "Axes", number: int, curve: str, figures: Figures, arms: list[str]) -> None:
    summaries = [figures.all.summaries[arm] for arm in arms]
    defined = sorted(
        (summary.charged_ratio, summary.gap_recovery)
        for summary in summaries
        if summary.gap_recovery.value is not None
    )
    if not defined:
        axes.plot([], [], label=_label(f"{curve}: undefined"), color="none")
        return
    heights = [_clipped(recovery) for _, recovery in defined]
    axes.errorbar(
        [100 * charged for charged, _ in defined],
        [value for value, _, _ in heights],
        yerr=[
            [value - low for value, low, _ in heights],
            [high - value for value, _, high in heights],
        ],
        label=_label(curve),
        color=f"C{number % 10}",
        marker=_MARKERS[number // 10 % len(_MARKERS)],
        markersize=4,
        linewidth=1,
        capsize=2,
    )
    for charged, recovery in defined:
        if recovery.value is not None and recovery.value < _LOWEST:
            axes.annotate(_percent(recovery.value), (100 * charged, _LOWEST), fontsize=6)


def _families(figures: Figures) -> str:
    """One panel for each family, one bar for each arm."""
    groups = figures.of(Grouping.FAMILY)
    arms = [arm.name for arm in figures.run.arms]
    figure = _figure(2.0 + 1.8 * len(groups), 1.0 + 0.2 * len(arms))
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        axes.set_title(group.name)
        axes.set_xlim(_LOWEST, 1.05)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_yticks(range(len(arms)), arms)
        for row, arm in enumerate(arms):
            if arm in group.summaries:
                _draw_bar(axes, row, group.summaries[arm].gap_recovery)
    figure.supxlabel("KL gap recovered")
    return _svg(figure)


def _draw_bar(axes: "Axes", row: int, recovery: Estimate) -> None:
    if recovery.value is None:
        axes.text(0.02, row, "undefined", va="center", fontsize=6)
        return
    value, low, high = _clipped(recovery)
    color = "C0" if value >= 0 else "C3"
    axes.barh(row, value, color=color, alpha=0.6, xerr=[[value - low], [high - value]], capsize=2)
    axes.text(0.02, row, _percent(recovery.value), va="center", fontsize=6)


def _layers(figures: Figures) -> str:
    """A panel for keys, one for values, one for attention, where they were taken."""
    names = [
        name
        for name in ("key", "value", "attention")
        if any(getattr(each, name) is not None for each in figures.layers.values())
    ]
    figure = _figure(2.0 + 4.0 * len(names), 5.0)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    arms = [arm.name for arm in figures.run.arms if arm.name in figures.layers]
    for axes, name in zip(panels, names, strict=True):
        for number, arm in enumerate(arms):
            deviations = getattr(figures.layers[arm], name)
            if deviations is not None:
                axes.plot(
                    range(len(deviations)),
                    deviations,
                    color=f"C{number % 10}",
                    marker=_MARKERS[number // 10 % len(_MARKERS)],
                    markersize=3,
                    linewidth=1,
                    label=_label(arm),
                )
        axes.set_xlabel("layer")
        axes.set_title(f"{name} deviation")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)
    return _svg(figure)


def _figure(width_in: float, height_in: float) -> "Figure":
    # Not pyplot: that keeps figures in the module, and picks a backend by the environment.
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def _svg(figure: "Figure") -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _clipped(estimate: Estimate) -> tuple[float, float, float]:
    """Value, low and high as far as they are on the axis."""
    assert estimate.value is not None
    value, low, high = (
        min(1.05, max(_LOWEST, each)) for each in (estimate.value, estimate.low, estimate.high)
    )
    # A percentile interval need not hold the value itself.
    return value, min(low, value), max(high, value)


def _label(name: str) -> str:
    # matplotlib leaves out labels with an underscore in front.
    return f" {name}" if name.startswith("_") else name


def _percent(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else f"{value}"
