"""`blendgate serve` in a process of its own, on a free loopback port: to measure it, to test it."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

import httpx

_STOP_TIMEOUT_S = 60.0


class ServerDidNotStart(RuntimeError):
    """The process ended, or was not ready in time."""


@contextmanager
def local_server(
    flags: Sequence[str],
    log: IO[bytes],
    *,
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = 900.0,
) -> Iterator[str]:
    """Start a server, wait until it is ready, and stop it at the end.

    Args:
        flags: What follows `serve`, except the port.
        log: Takes everything that the server prints.
        environment: The process' own; inherited by default.
        start_timeout_s: Seconds until `/readyz` must answer 200.

    Yields:
        The server's URL.

    Raises:
        ServerDidNotStart: The process ended, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "blend_gateway.cli", "serve", "--port", str(port), *flags],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    try:
        _await_ready(url, process, start_timeout_s)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(url: str, process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerDidNotStart(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise ServerDidNotStart("the server did not become ready")
