"""Tiny random models, one after another on a real engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.models.engine import Served, serving
from tests.models.families import Family


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The engine of one family; the test module says which, by its parameters."""
    family = request.param
    assert isinstance(family, Family)
    folder: Path = tmp_path_factory.mktemp("model")
    with serving(family, folder) as started:
        yield started
