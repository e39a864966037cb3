"""A tiny model under one configuration after another."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gpu.configurations import CONTROL, ON_CUDA, Configuration
from tests.models.engine import Served, serving


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(CONTROL, id=CONTROL.name),
        *(pytest.param(each, id=each.name, marks=pytest.mark.gpu) for each in ON_CUDA),
    ],
)
def configuration(request: pytest.FixtureRequest) -> Configuration:
    """What the engine is started with; on the CPU it is a control of the tests themselves."""
    chosen = request.param
    assert isinstance(chosen, Configuration)
    return chosen


@pytest.fixture(scope="module")
def started(
    configuration: Configuration, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The engine of one configuration."""
    folder: Path = tmp_path_factory.mktemp("model")
    with serving(configuration.family(), folder) as served:
        yield served


@pytest.fixture
def served(started: Served) -> Iterator[Served]:
    """The engine, held to have given everything back after each test."""
    yield started
    assert not started.driver.llm.llm_engine.has_unfinished_requests()
    assert started.driver.scheduler.store_stats().num_leases == 0
