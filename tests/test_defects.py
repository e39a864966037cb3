"""`docs/defects.md` names every defect once, and only tests and files that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "defects.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| *\d", line)
]


@cache
def names_in(path: str) -> frozenset[str]:
    """Names of a file's tests, also of those that are assigned or stand in a class."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(name for name in found if name.startswith(("test_", "Test")))


def test_every_defect_has_one_row() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 61))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_names_exists(row: list[str]) -> None:
    _, _, _, verdict, held_by = row
    named = [name.partition("::") for name in re.findall(r"`([^`]+)`", held_by)]
    for path, _, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or test in names_in(path), f"{path}::{test}"
    names_test, names_file = any(test for *_, test in named), any(not test for *_, test in named)
    assert {"test": names_test, "excluded": names_file, "open": bool(held_by)}[verdict]
