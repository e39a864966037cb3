"""The soak in small. In full: ``python -m tests.soak``."""

from pathlib import Path

import pytest
from tests.soak.__main__ import table
from tests.soak.soak import soak

NUM_REQUESTS, SEED = 500, 2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.slow
@pytest.mark.anyio
async def test_every_answer_under_faults_is_the_one_of_its_plan(tmp_path: Path) -> None:
    """And no request is lost, nothing leaks, every failure was injected and is reported."""
    outcome = await soak(tmp_path, num_requests=NUM_REQUESTS, seed=SEED)
    print(table(outcome))
    assert outcome.findings.counts["requests"] == NUM_REQUESTS
    assert outcome.findings.problems == []
