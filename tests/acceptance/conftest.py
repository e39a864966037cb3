"""Two servers, one after the other: without vLLM's prefix caching and blocks of 32, with it and
128."""

from collections.abc import Iterator

import pytest
from tests.serving import Server, serve

from blend_gateway import demo_model

COMMON = (
    *("--dtype", "float32", "--max-model-len", "6144", "--max-num-batched-tokens", "8192"),
    *("--kv-cache-memory-bytes", "1G", "--blend-min-segment-tokens", "8"),
)
VARIANTS = {
    "no-prefix-caching-block-32": ("--no-enable-prefix-caching", "--block-size", "32"),
    "prefix-caching-block-128": ("--enable-prefix-caching", "--block-size", "128"),
}


@pytest.fixture(scope="package", params=list(VARIANTS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of one variant."""
    demo_model.prepare(progress=print)
    log = tmp_path_factory.mktemp("server") / "log"
    with serve((*COMMON, *VARIANTS[request.param]), log) as started:
        yield started


@pytest.fixture
def prefix_caching(request: pytest.FixtureRequest) -> bool:
    """Whether vLLM's own prefix cache is on in the server of this test."""
    return "no-prefix-caching" not in request.node.callspec.params["server"]
