"""A real server in a process of its own: the demo model on vLLM, over loopback."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 600


@dataclass(frozen=True)
class Server:
    """Where a server listens, and where it logs."""

    url: str
    log: Path

    def client(self, **kwargs: float) -> httpx.Client:
        """A plain HTTP client; the caller closes it."""
        return httpx.Client(base_url=self.url, timeout=300, **kwargs)

    def metric(self, name: str) -> float:
        """Sum of a series over its labels; 0 where it has none yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def await_metric(self, name: str, value: float, timeout_s: float = 240) -> None:
        """Wait until a series has a value."""
        deadline = time.monotonic() + timeout_s
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.2)


@contextmanager
def serve(flags: tuple[str, ...], log: Path) -> Iterator[Server]:
    """Start `blendgate serve` on a free port, wait until it is ready, stop it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    packages = os.pathsep.join(str(ROOT / name) for name in ("gateway", "engine", "kernels"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "blend_gateway.cli", "serve", "--port", str(port), *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": packages, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        _await_ready(server, process)
        yield server
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
