import pytest
from hypothesis import settings

# A busy machine is not a failing test.
settings.register_profile("gateway", deadline=None)
settings.load_profile("gateway")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
