"""The files of a run: JSON with every record and every figure, Markdown, plots."""

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blend_gateway.evaluation.figures import Figures, GroupFigures
from blend_gateway.evaluation.markdown import to_markdown
from blend_gateway.evaluation.plots import to_plots
from blend_gateway.evaluation.runs import (
    IncompatibleRuns,
    Run,
    merge_runs,
    run_fields,
    run_of,
    to_text,
)


def to_json(figures: Figures) -> str:
    """The run and what was computed from it; the same figures give the same text."""
    run = run_fields(figures.run)
    records = {name: run.pop(name) for name in ("prompts", "records")}
    computed = {
        "groups": [_group_fields(group) for group in figures.groups],
        "layers": {arm: asdict(layers) for arm, layers in figures.layers.items()},
    }
    return to_text(run | computed | records)


def write_report(figures: Figures, folder: Path, *, has_plots: bool = True) -> tuple[Path, ...]:
    """Write ``report.json.gz``, ``report.md`` and, unless not wanted, plots as SVG.

    Returns:
        What was written.

    Raises:
        PlotsUnavailable: matplotlib is not installed; nothing is written then.
    """
    plots = to_plots(figures) if has_plots else {}
    contents = {
        # Neither the time nor the name goes into the archive.
        "report.json.gz": gzip.compress(to_json(figures).encode(), compresslevel=6, mtime=0),
        "report.md": to_markdown(figures, plots=tuple(plots)).encode(),
        **{name: text.encode() for name, text in plots.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return tuple(folder / name for name in contents)


def read_run(path: Path) -> Run:
    """Read the run back from a report, compressed or not.

    Raises:
        IncompatibleRuns: The file is no report, or of another schema.
    """
    content = path.read_bytes()
    try:
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        return run_of(json.loads(text))
    except (ValueError, EOFError, OSError) as error:
        raise IncompatibleRuns(f"{path}: {error}") from error


def read_runs(paths: Iterable[Path]) -> Run:
    """Read several reports as one run; see `merge_runs`."""
    return merge_runs(read_run(path) for path in paths)


def _group_fields(group: GroupFigures) -> dict[str, Any]:
    return {
        "grouping": group.grouping.value,
        "name": group.name,
        "arms": {arm: asdict(summary) for arm, summary in group.summaries.items()},
        "curves": [asdict(curve) | {"verdict": curve.verdict} for curve in group.curves],
        "against_baseline": {
            arm: asdict(difference) for arm, difference in group.against_baseline.items()
        },
    }
