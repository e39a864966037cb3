"""The files of a run."""

import gzip
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.evaluation.studies import FULL, GAP, correlated, measured, prompt, ranked, study

from blend_gateway.evaluation.figures import Figures, Grouping, compute_figures
from blend_gateway.evaluation.markdown import to_markdown
from blend_gateway.evaluation.metrics import LayerDeviations
from blend_gateway.evaluation.plots import PlotsUnavailable, to_plots
from blend_gateway.evaluation.records import ArmSpec, InconsistentRecords, Record
from blend_gateway.evaluation.report import read_run, read_runs, to_json, write_report
from blend_gateway.evaluation.runs import IncompatibleRuns, Run, merge_runs
from blend_gateway.evaluation.sums import Design
from blend_gateway.evaluation.yardsticks import LOSSES, rank_agreement

_ARMS = (
    ArmSpec(name=FULL),
    ArmSpec(name=GAP, description="compiled alone | rotated"),
    ArmSpec(name="hkvd 10%", curve="hkvd", ratio=0.1),
    ArmSpec(name="hkvd 50%", curve="hkvd", ratio=0.5),
    ArmSpec(name="harmful"),
    ArmSpec(name="_broken $x$"),
)


def a_run(*, seed: int = 7, num_prompts: int = 6) -> Run:
    """Two cells of every kind of result, good and bad."""
    source = np.random.default_rng(seed)
    records: list[Record] = []
    for family in ("needle_single", "musique"):
        gap, kept = correlated(source, num_prompts)
        arms = {
            GAP: gap,
            "hkvd 10%": kept,
            "hkvd 50%": (np.array(kept) / 2).tolist(),
            "harmful": (np.array(gap) * 4).tolist(),
            "_broken $x$": [math.inf, *gap[1:]],
        }
        ratios = {"hkvd 10%": 0.1, "hkvd 50%": 0.5}
        records += study(arms, family=family, ratios=ratios)
    first, *others = records
    likelihoods, layers = ranked(-1.0, -2.0), LayerDeviations(key=(0.1, 0.25), attention=(0.5,))
    first = replace(
        first, measured=replace(first.measured, likelihoods=likelihoods, deviations=layers)
    )
    same = [r for r in others if r.prompt == first.prompt]
    others = [r for r in others if r.prompt != first.prompt]
    likened = [
        replace(r, measured=replace(r.measured, likelihoods=ranked(-1.5, -1.25))) for r in same
    ]
    return Run(
        model="a/model",
        content_hash="0123abcd",
        design=Design(seed=seed, num_resamples=100),
        arms=_ARMS,
        versions={"numpy": "2", "blendgate": "1"},
        settings={"dtype": "float32"},
        records=(first, *likened, *others),
    )


@pytest.fixture(scope="module")
def run() -> Run:
    return a_run()


@pytest.fixture(scope="module")
def figures(run: Run) -> Figures:
    return compute_figures(run, baseline="hkvd 10%")


def parsed(figures: Figures) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(to_json(figures))
    return values


def test_figures_can_be_recomputed_from_the_report(figures: Figures, tmp_path: Path) -> None:
    written = write_report(figures, tmp_path / "new", has_plots=False)
    assert [path.name for path in written] == ["report.json.gz", "report.md"]
    again = read_run(written[0])
    assert again == figures.run
    assert to_json(compute_figures(again, baseline="hkvd 10%")) == to_json(figures)
    plain = tmp_path / "report.json"
    plain.write_bytes(gzip.decompress(written[0].read_bytes()))
    assert read_run(plain) == again


def test_a_report_says_what_it_is_of(figures: Figures) -> None:
    values = parsed(figures)
    assert (values["schema_version"], values["model"], values["content_hash"]) == (
        1,
        "a/model",
        "0123abcd",
    )
    assert (values["seed"], values["settings"]) == (7, {"dtype": "float32"})
    assert list(values["versions"]) == ["blendgate", "numpy"]
    assert [arm["name"] for arm in values["arms"]] == [arm.name for arm in _ARMS]
    assert len(values["records"]) == len(_ARMS) * 2 * 6


def test_two_runs_with_one_seed_are_equal_byte_for_byte(tmp_path: Path) -> None:
    """In processes of their own, with other hashes, records in another order."""
    script = (
        "import sys; from pathlib import Path; from dataclasses import replace;"
        "from tests.evaluation.test_report import a_run;"
        "from blend_gateway.evaluation.figures import compute_figures;"
        "from blend_gateway.evaluation.report import write_report;"
        "run = a_run(); order = int(sys.argv[2]);"
        "run = replace(run, records=run.records[::order]);"
        "write_report(compute_figures(run), Path(sys.argv[1]))"
    )
    contents = []
    for name, order, threads in (("one", "1", "1"), ("two", "-1", "2")):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": threads,
            "OMP_NUM_THREADS": threads,
        }
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / name), order],
            env=environment,
            check=True,
        )
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == [
        "families.svg",
        "layers.svg",
        "recovery.svg",
        "report.json.gz",
        "report.md",
    ]


def test_no_result_is_dropped(figures: Figures) -> None:
    """Harmful and broken arms are in every table and every plot."""
    text = to_markdown(figures)
    values = parsed(figures)
    everything = next(group for group in values["groups"] if group["grouping"] == "all")
    assert list(everything["arms"]) == [arm.name for arm in _ARMS]
    assert everything["arms"]["harmful"]["gap_recovery"]["value"] == pytest.approx(-3.0)
    assert everything["arms"]["_broken $x$"]["mean_kl"]["value"] == "inf"
    assert "| harmful | 12 | 0.0% | -300.0% [-300.0%, -300.0%] |" in text
    assert "| _broken $x$ | 12 | 0.0% | -inf [-inf, " in text
    assert r"compiled alone \| rotated" in text
    plots = to_plots(figures)
    for name in ("recovery.svg", "families.svg"):
        assert "harmful" in plots[name]
        assert "-300%" in plots[name]
        assert "_broken $x$" in plots[name]


def test_every_grouping_holds_all_prompts(figures: Figures) -> None:
    for grouping in Grouping:
        groups = figures.of(grouping)
        assert sum(group.summaries[FULL].num_prompts for group in groups) == 12, grouping
    assert [group.name for group in figures.of(Grouping.FAMILY)] == ["musique", "needle_single"]
    assert [group.name for group in figures.of(Grouping.ORDER)] == ["0", "1", "2"]
    assert [group.name for group in figures.of(Grouping.POSITION)] == ["second third"]


def test_positions_are_thirds() -> None:
    run = a_run()
    depths = (0.0, 0.1, 0.33, 0.34, 0.66, 0.67, 1.0)
    records = tuple(
        Record(prompt=prompt(number, depth=depth), arm=FULL, measured=measured(0.0))
        for number, depth in enumerate(depths)
    )
    groups = compute_figures(replace(run, records=records)).of(Grouping.POSITION)
    assert {group.name: group.summaries[FULL].num_prompts for group in groups} == {
        "first third": 3,
        "second third": 2,
        "third third": 2,
    }


def test_lengths_are_in_order_of_size() -> None:
    records = tuple(
        Record(prompt=replace(prompt(0), length=length), arm=FULL, measured=measured(0.0))
        for length in (8192, 1024, 16384)
    )
    groups = compute_figures(replace(a_run(), records=records)).of(Grouping.LENGTH)
    assert [group.name for group in groups] == ["1024", "8192", "16384"]


def test_the_report_of_few_arms_says_undefined(run: Run) -> None:
    """Without the gap's arm nothing is recovered, and the report can still be made."""
    records = tuple(record for record in run.records if record.arm == FULL)
    few = compute_figures(replace(run, records=records))
    assert "| full | 12 | 0.0% | undefined | undefined | 0 [0, 0] |" in to_markdown(few)
    assert "undefined" in to_plots(few)["families.svg"]


def test_layers_are_averaged_where_they_were_taken(figures: Figures) -> None:
    assert figures.layers == {FULL: LayerDeviations(key=(0.1, 0.25), attention=(0.5,))}
    text = to_markdown(figures)
    assert "| key | layer 0 | layer 1 |" in text
    assert "| attention | layer 0 |" in text
    assert "| value | layer 0" not in text


def test_layers_of_two_models_are_refused(run: Run) -> None:
    last = run.records[-1]
    other = replace(
        last, arm=FULL, measured=replace(last.measured, deviations=LayerDeviations(key=(1.0,)))
    )
    with pytest.raises(InconsistentRecords, match="numbers of layers"):
        compute_figures(
            replace(
                run,
                records=tuple(
                    other if (r.arm, r.prompt) == (other.arm, other.prompt) else r
                    for r in run.records
                ),
            )
        )


def test_curves_and_the_baseline_are_shown(figures: Figures) -> None:
    text = to_markdown(figures)
    assert "Curve hkvd: **monotone**" in text
    assert "## Mean KL minus that of hkvd 10%, prompt by prompt" in text
    difference = figures.all.against_baseline["hkvd 50%"]
    assert difference.value is not None
    assert difference.high < 0
    assert "hkvd 10%" not in figures.all.against_baseline
    with pytest.raises(InconsistentRecords, match="no arm 'nothing'"):
        compute_figures(figures.run, baseline="nothing")


def test_a_run_without_records_has_no_figures(run: Run) -> None:
    with pytest.raises(InconsistentRecords, match="without records"):
        compute_figures(replace(run, records=()))


def test_parts_of_a_run_are_merged(run: Run, tmp_path: Path) -> None:
    def part(*arms: str) -> Run:
        return replace(
            run,
            arms=tuple(arm for arm in run.arms if arm.name in arms),
            records=tuple(record for record in run.records if record.arm in arms),
        )

    names = [arm.name for arm in _ARMS]
    parts = [part(FULL, GAP, names[2]), part(FULL, *names[3:])]
    assert merge_runs(parts).arms == run.arms
    paths = []
    for number, each in enumerate(parts):
        paths.append(
            write_report(compute_figures(each), tmp_path / str(number), has_plots=False)[0]
        )
    merged = compute_figures(read_runs(paths), baseline="hkvd 10%")
    assert to_json(merged) == to_json(compute_figures(run, baseline="hkvd 10%"))


def test_runs_that_are_not_of_one_kind_are_not_merged(run: Run) -> None:
    others = {
        "model": replace(run, model="another"),
        "content_hash": replace(run, content_hash="4567"),
        "design": replace(run, design=replace(run.design, seed=8)),
        "versions": replace(run, versions={}),
        "settings": replace(run, settings={"dtype": "bfloat16"}),
        "arm 'full'": replace(run, arms=(replace(run.arms[0], ratio=1.0), *run.arms[1:])),
    }
    for field, other in others.items():
        with pytest.raises(IncompatibleRuns, match=field):
            merge_runs([run, other])
    damaged = replace(run.records[-1], measured=measured(9.0))
    with pytest.raises(InconsistentRecords, match="two results"):
        merge_runs([run, replace(run, records=(damaged,))])


def test_records_of_unknown_arms_are_refused(run: Run) -> None:
    with pytest.raises(InconsistentRecords, match="hkvd 10%"):
        replace(run, arms=tuple(arm for arm in run.arms if arm.name != "hkvd 10%"))
    with pytest.raises(InconsistentRecords, match="one name"):
        replace(run, arms=(*run.arms, run.arms[0]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schema_version": 2}',
        b'{"schema_version": 1, "prompts": []}',
        b"\x1f\x8bdamaged",
        gzip.compress(b'{"schema_version": 1}')[:-4],
    ],
)
def test_files_that_are_no_report_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(IncompatibleRuns, match=r"report\.json"):
        read_run(path)


def test_plots_name_the_extra_where_matplotlib_is_missing(
    figures: Figures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotsUnavailable, match=r"blendgate\[eval\]"):
        write_report(figures, tmp_path / "report")
    assert not (tmp_path / "report").exists()
    assert write_report(figures, tmp_path / "report", has_plots=False)


def test_plots_do_not_hang_on_the_users_configuration(figures: Figures) -> None:
    import matplotlib

    plain = to_plots(figures)
    with matplotlib.rc_context({"font.size": 20.0, "lines.linewidth": 9.0}):
        assert to_plots(figures) == plain
        assert matplotlib.rcParams["font.size"] == 20.0, "and leave it as it was"


def test_metrics_that_order_arms_alike_agree() -> None:
    arms = {GAP: [0.4, 0.4], "good": [0.1, 0.1], "better": [0.05, 0.05]}
    figures = compute_figures(replace(a_run(), arms=_arms(arms), records=tuple(study(arms))))
    rows = dict(zip(LOSSES, rank_agreement(figures.all.summaries), strict=True))
    first, mean, disagreement = (
        LOSSES.index(name) for name in ("first-token KL", "mean KL", "disagreement")
    )
    assert rows["mean KL"][first] == pytest.approx(1.0)
    assert rows["mean KL"][mean] == pytest.approx(1.0)
    # Ranks 3, 2, 1, 0 against 2.5, 2.5, 0.5, 0.5: the two worst disagree on every step.
    assert rows["mean KL"][disagreement] == pytest.approx(4 / math.sqrt(20))
    assert rows["ranking errors"] == [None] * len(LOSSES)


def _arms(arms: dict[str, list[float]]) -> tuple[ArmSpec, ...]:
    return tuple(ArmSpec(name=name) for name in (FULL, *arms))
