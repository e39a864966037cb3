"""What the linters cannot see of the rules in `.github/CONTRIBUTING.md`."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    ROOT / "gateway" / "blend_gateway",
    ROOT / "engine" / "blend_engine",
    ROOT / "kernels" / "blend_kernels",
)
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob(".github/*.md")])
FRONT_DOOR = {
    "async_engine",
    "config",
    "device",
    "errors",
    "launch",
    "offline",
    "ports",
    "preamble",
    "protocol",
    "segments",
}
"""The modules of the engine that the gateway may import."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=named)
def test_files_stay_short(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= 400


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_sources_are_ascii(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()


def test_every_module_of_the_engine_is_a_front_door_or_behind_it() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = configuration["tool"]["importlinter"]["contracts"]
    (contract,) = (c for c in contracts if c["id"] == "front-door")
    protected = {name.removeprefix("blend_engine.") for name in contract["protected_modules"]}
    modules = {path.stem for path in PACKAGES[1].iterdir() if path.suffix == ".py"} - {"__init__"}
    assert protected | FRONT_DOOR == modules
    assert not protected & FRONT_DOOR


def test_the_application_imports_without_a_tensor_library() -> None:
    """Routes, assembler and planning stay testable where neither torch nor vLLM is installed."""
    script = (
        "import sys, blend_gateway.app, blend_gateway.assembler, blend_gateway.planning;"
        "print({'torch', 'triton', 'vllm'} & sys.modules.keys())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("set()\n", "")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
