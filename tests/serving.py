"""A real server in a process of its own: the demo model on vLLM, over loopback."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from blend_gateway.local_server import ServerDidNotStart, local_server

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
    """A ready server; where it does not start, its log is the failure."""
    packages = os.pathsep.join(str(ROOT / name) for name in ("gateway", "engine", "kernels"))
    environment = {
        **os.environ,
        "PYTHONPATH": packages,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with log.open("wb") as output:
        try:
            with local_server(
                flags, output, environment=environment, start_timeout_s=START_TIMEOUT_S
            ) as url:
                yield Server(url, log)
        except ServerDidNotStart as error:
            raise AssertionError(log.read_text(errors="replace")[-8000:]) from error
