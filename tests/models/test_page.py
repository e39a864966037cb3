"""`docs/models.md` names only tests and parameters that exist, and every family that is tested."""

import importlib
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from tests.machines import CPU
from tests.models.families import BLENDED, REFUSED, Family

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
_NAMED = re.compile(
    r"`(?P<path>test_\w+\.py|tests/[\w/]+(?:\.py)?)(?:::(?P<test>\w+))?(?:\[(?P<id>[^\]`]+)\])?`"
)
NAMED = [found.groups(default="") for found in _NAMED.finditer(PAGE)]


def section(title: str) -> str:
    """What stands between a heading and the next."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Cells of a section's rows, of those tables that have a column of tests."""
    tables = [lines.splitlines() for lines in section(title).split("\n\n")]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for table in tables
        if table[0].endswith("| test |")
        for line in table[2:]
    ]


@cache
def module_of(path: str) -> ModuleType:
    return importlib.import_module(f"tests.models.{path.removesuffix('.py')}")


def ids_in(path: str, test: str) -> set[str]:
    """Ids that a file's parameters are given by hand, those of the named test where one is."""
    module = module_of(path)
    marks = [mark for holder in _holders(module, test) for mark in _marks(holder)]
    return {
        str(parameter.id)
        for mark in marks
        if mark.name == "parametrize"
        for parameter in mark.args[1]
        if hasattr(parameter, "id")
    }


def _holders(module: ModuleType, test: str) -> list[object]:
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    return [module, *([getattr(module, test)] if test else tests)]


def _marks(holder: object) -> list[pytest.Mark]:
    marks = getattr(holder, "pytestmark", [])
    return [getattr(mark, "mark", mark) for mark in (marks if isinstance(marks, list) else [marks])]


@pytest.mark.parametrize(("path", "test", "id_"), NAMED)
def test_what_is_named_exists(path: str, test: str, id_: str) -> None:
    is_near = (HERE / path).exists()
    assert is_near or (ROOT / path).exists()
    assert not test or hasattr(module_of(path), test)
    assert not id_ or id_ in ids_in(path, test)


def test_nothing_is_named_in_another_way() -> None:
    """What looks like a test and is read by no other test here could be wrong unnoticed."""
    quoted = re.findall(r"`([^`]*\btests?[_/][^`]*)`", PAGE)
    understood = [found.group().strip("`") for found in _NAMED.finditer(PAGE)]
    assert [name for name in quoted if name not in understood and " -k " not in name] == []


@pytest.mark.parametrize("title", ["Blended", "Refused"])
def test_every_row_names_a_test(title: str) -> None:
    assert len(rows(title)) > 10
    assert [row[0] for row in rows(title) if not _NAMED.search(row[-1])] == []


@pytest.mark.parametrize(
    ("title", "path", "families"),
    [("Blended", "test_blended.py", BLENDED), ("Refused", "test_refused.py", REFUSED)],
)
def test_every_family_has_a_row(title: str, path: str, families: tuple[Family, ...]) -> None:
    """One that no machine here runs stands among those that were not run."""
    for family in families:
        if CPU.name in family.machines:
            assert [row for row in rows(title) if f"`{path}[{family.name}]`" in row[-1]]
        else:
            assert f"`{path}[{family.name}-" in section("Not run")


def test_gemma_3s_rows_name_the_test_of_its_weights() -> None:
    (row,) = [row for row in rows("Blended") if "Gemma 3" in row[0]]
    assert "`test_gemma3_weights.py`" in row[-1]
    assert "`test_gemma3_weights.py::test_divergence_falls_to_nothing_with_the_ratio`" in PAGE
