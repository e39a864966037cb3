"""One real server for all of these tests: the demo model on vLLM, over loopback."""

from collections.abc import Iterator
from importlib.util import find_spec

import httpx
import pytest
from openai import OpenAI
from tests.serving import Server, serve

from blend_gateway import demo_model

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

MAX_MODEL_LEN = 2048
MIN_SEGMENT_TOKENS = 16
FLAGS = (
    *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)),
    *("--kv-cache-memory-bytes", "512M", "--max-num-seqs", "8"),
    *("--blend-min-segment-tokens", str(MIN_SEGMENT_TOKENS), "--blend-store-gib", "0.5"),
    *("--uvicorn-log-level", "debug"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    demo_model.prepare(progress=print)
    with serve(FLAGS, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def openai_client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=300)


@pytest.fixture(scope="session")
def model(openai_client: OpenAI) -> str:
    return openai_client.models.list().data[0].id
