"""One real server for all of these tests: the demo model on vLLM, over loopback."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from blend_gateway import demo_model

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 600
MAX_MODEL_LEN = 2048
MIN_SEGMENT_TOKENS = 16
FLAGS = (
    *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)),
    *("--kv-cache-memory-bytes", "512M", "--max-num-seqs", "8"),
    *("--blend-min-segment-tokens", str(MIN_SEGMENT_TOKENS), "--blend-store-gib", "0.5"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def client(self, **kwargs: float) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **kwargs)

    def metric(self, name: str) -> float:
        """Sum of a series over its labels; 0 where it has none yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def await_metric(self, name: str, value: float, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    demo_model.prepare(progress=print)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    packages = os.pathsep.join(str(ROOT / name) for name in ("gateway", "engine", "kernels"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "blend_gateway.cli", "serve", "--port", str(port), *FLAGS],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": packages},
        )
    started = Server(f"http://127.0.0.1:{port}", log)
    try:
        _await_ready(started, process)
        yield started
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(server: Server, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log.read_text(errors="replace")[-8000:]
        try:
            if httpx.get(f"{server.url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(server.log.read_text(errors="replace")[-8000:])


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def openai_client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def model(openai_client: OpenAI) -> str:
    return openai_client.models.list().data[0].id
