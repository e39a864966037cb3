"""The whole gateway over a tiny model, in the test process, with tenants named by a header."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from tests.gateway.asgi import Client, Exchange, running, until
from tests.models.engine import CONFIG, start_async_engine
from tests.models.families import BLENDED

from blend_engine.async_engine import BlendAsyncLLM
from blend_gateway.app import create_app
from blend_gateway.documents import DocumentRegistry
from blend_gateway.routes import chat, documents
from blend_gateway.salts import Tenant
from blend_gateway.settings import Settings

CHAT, DOCUMENTS = "/v1/chat/completions", "/v1/documents"
BLOCK_SIZE = 32
TENANT_HEADER = "x-the-tenant"
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SETTINGS = Settings(salt_secret=b"secret")


def text(topic: str) -> str:
    return " ".join(f"The {topic} of number {number} is a long one." for number in range(4))


def body(question: str, *documents: Any, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": question}
    fields = {"messages": [message], "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
    return {**fields, "documents": list(documents)} if documents else fields


@dataclass
class Gateway:
    """A running application and its engine.

    Args:
        app: The application.
        engine: Its engine.
    """

    app: Any
    engine: BlendAsyncLLM

    @property
    def documents(self) -> DocumentRegistry:
        registry: DocumentRegistry = self.app.state.runtime.service.documents
        return registry

    def client(self, tenant: str) -> Client:
        return Client(self.app, {TENANT_HEADER: tenant})

    async def metric(self, name: str) -> float:
        lines = (await self.client("nobody").get("/metrics")).body.decode().splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert found, name
        return sum(float(line.rpartition(" ")[2]) for line in found)

    async def check_at_rest(self) -> None:
        """No lease, no block, no request; the engine tells what it holds as it takes a step."""
        await until(lambda: not any(entry.is_pending for entry in self.documents._all()))
        await until(lambda: not self.engine.compile_queue_depth)
        await until(lambda: not self.engine.get_num_unfinished_requests())
        answer = await self.client("nobody").post(CHAT, body("Is all well?"))
        assert answer.status == 200
        assert self.engine.store_stats().num_leases == 0
        assert self.engine._unanswered == []
        for name in ("running", "waiting"):
            assert await self.metric(f"vllm:num_requests_{name}") == 0
        assert await self.metric("vllm:kv_cache_usage_perc") == 0
        # The request for the metrics is itself in flight.
        assert await self.metric("gateway_inflight") == 1


@asynccontextmanager
async def serving_gateway(folder: Path) -> AsyncIterator[Gateway]:
    """Write the model, serve it, shut it down."""
    from blend_gateway.serving import VllmBackend
    from blend_gateway.serving.options import ServingOptions

    config = replace(CONFIG, min_segment_tokens=16)
    engine = await start_async_engine(BLENDED[0], folder, config, block_size=BLOCK_SIZE)
    options = ServingOptions(
        model=str(folder), served_model_names=("tiny",), chat_template=TEMPLATE
    )

    async def start(_metrics: object) -> VllmBackend:
        return VllmBackend(engine, engine, options, SETTINGS)

    app = create_app(SETTINGS, start)
    with pytest.MonkeyPatch.context() as patch:
        # Nothing else names tenants until there are keys.
        for routes in (chat, documents):
            patch.setattr(routes, "tenant_of", _tenant_of)
        async with running(app):
            await app.state.runtime.started.wait()
            assert app.state.runtime.failure is None
            yield Gateway(app, engine)


def _tenant_of(request: Request) -> Tenant:
    return Tenant(name=request.headers[TENANT_HEADER])


async def chat_of(client: Client, *arguments: Any, **more: Any) -> Any:
    answer = await client.post(CHAT, body(*arguments, **more))
    assert answer.status == 200, answer.body
    return answer.json()


async def registered(client: Client, **fields: Any) -> Any:
    answer = await client.post(f"{DOCUMENTS}?wait=60", fields)
    assert answer.json()["status"] == "ready", answer.body
    return answer.json()


def opened(client: Client, method: str, path: str, content: Any = None) -> Exchange:
    headers = {**client.headers, "content-type": "application/json"}
    return client.open(method, path, json.dumps(content).encode(), headers)
