"""Drives an ASGI application message by message.

httpx's ASGI transport collects a whole body before it returns, so it can neither see a first event
nor hang up in the middle.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


async def until(condition: Callable[[], Any]) -> None:
    """Let others run until something is so."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0)


@dataclass
class Exchange:
    """One request in flight."""

    task: asyncio.Task[None]
    to_app: asyncio.Queue[dict[str, Any]]
    from_app: asyncio.Queue[dict[str, Any]]

    async def next_message(self) -> dict[str, Any]:
        message = asyncio.create_task(self.from_app.get())
        await asyncio.wait((message, self.task), return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            message.cancel()
            self.task.result()
            raise EOFError("the application ended without another message")
        return message.result()

    async def hang_up(self) -> None:
        await self.to_app.put({"type": "http.disconnect"})


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    app: Any
    headers: Mapping[str, str] = field(default_factory=dict)

    def open(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Exchange:
        path, _, query = path.partition("?")
        sent = {**self.headers, **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(n.lower().encode(), v.encode("latin-1")) for n, v in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        from_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        to_app.put_nowait({"type": "http.request", "body": body, "more_body": False})
        task = asyncio.create_task(self.app(scope, to_app.get, from_app.put))
        return Exchange(task, to_app, from_app)

    async def request(
        self,
        method: str,
        path: str,
        content: Any = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        sent = dict(headers or {})
        body = b"" if raw is None else raw
        if content is not None:
            body = json.dumps(content).encode()
        if content is not None or raw is not None:
            sent.setdefault("content-type", "application/json")
        exchange = self.open(method, path, body, sent)
        async with asyncio.timeout(20):
            start = await exchange.next_message()
            received = b""
            while True:
                message = await exchange.next_message()
                received += message.get("body", b"")
                if not message.get("more_body"):
                    break
            await exchange.task
        return Answer(
            status=start["status"],
            headers={n.decode(): v.decode() for n, v in start["headers"]},
            body=received,
        )

    async def get(self, path: str, **kwargs: Any) -> Answer:
        return await self.request("GET", path, **kwargs)

    async def post(self, path: str, content: Any = None, **kwargs: Any) -> Answer:
        return await self.request("POST", path, content, **kwargs)

    async def delete(self, path: str) -> Answer:
        return await self.request("DELETE", path)


@asynccontextmanager
async def running(app: Any) -> AsyncGenerator[Client]:
    """Run an application's lifespan around a client."""
    to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    from_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    task = asyncio.create_task(app(scope, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    try:
        yield Client(app)
    finally:
        await to_app.put({"type": "lifespan.shutdown"})
        assert (await from_app.get())["type"] == "lifespan.shutdown.complete"
        await task
