"""`blendgate bench`: its table from a server of its own, and when it prints none."""

import json
from pathlib import Path

import pytest
from tests.gateway.e2e.conftest import FLAGS
from tests.serving import Server

from blend_gateway import bench

_SMALL = ["--documents", "2", "--sentences", "3", "--rounds", "1"]
_MACHINE = "any machine"


@pytest.mark.slow
def test_every_arm_has_its_row_and_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "samples.json"
    arguments = [*_SMALL, "--json", str(samples), "--", *FLAGS]
    assert bench.main(arguments, machine=_MACHINE) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "x |" in line]
    assert [row[1].strip() for row in rows] == [arm.name for arm in bench.ARMS]
    arms = json.loads(samples.read_text())
    reused = {name: arm[0]["blend"]["reused_tokens"] for name, arm in arms.items()}
    assert reused["full prefill"] == 0
    assert reused["full reuse"] > reused["HKVD 0.15"] > 0
    assert reused["full reuse"] > reused["sinks 0.08"] > 0


def test_a_server_with_vllm_prefix_caching_is_refused_and_prints_no_figure(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--url", server.url, *_SMALL], machine=_MACHINE) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--no-enable-prefix-caching" in printed.err


def test_an_arm_whose_documents_were_not_reused_prints_no_figure(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arm = bench.Arm(name="full reuse", blend={"mode": "off", "policy": "none"})
    monkeypatch.setattr(bench.Arm, "reuses", True)
    monkeypatch.setattr(bench, "ARMS", (arm,))
    assert bench.main(["--url", server.url, *_SMALL], machine=_MACHINE) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "documents were ['off']" in printed.err
