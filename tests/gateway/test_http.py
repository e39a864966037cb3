"""Routes, errors and probes over a stand-in backend; the real engine's part is in `e2e`."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.gateway.asgi import Answer, Client, running, until
from tests.gateway.fakes import FakeBackend

from blend_gateway.app import create_app
from blend_gateway.errors import EngineDown, Overloaded
from blend_gateway.ports import ChatBackend
from blend_gateway.settings import Limits, Settings
from blend_gateway.telemetry import Metrics

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = "one two three four five"


@dataclass
class Server:
    client: Client
    backend: FakeBackend
    app: Any


def make_app(backend: FakeBackend, limits: Limits | None = None) -> Any:
    async def start(_metrics: Metrics) -> ChatBackend:
        return backend

    return create_app(Settings(limits=limits or Limits()), start)


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    backend = FakeBackend()
    backend.engine.gate.set()
    app = make_app(backend, Limits(body_bytes=2000, wait_s=60))
    async with running(app) as client:
        await app.state.runtime.started.wait()
        yield Server(client, backend, app)


def assert_openai_error(answer: Answer, status: int, code: str, param: str | None = None) -> None:
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] in ("invalid_request_error", "server_error")
    assert error["message"]
    if param is not None:
        assert error["param"] == param


async def test_a_chat_is_answered(server: Server) -> None:
    answer = await server.client.post(CHAT, HELLO)
    assert answer.status == 200
    assert answer.json()["object"] == "chat.completion"


async def test_unknown_paths_are_404(server: Server) -> None:
    for path in ("/", "/docs", "/v1/completions", "/v1/models/", "/v1/chat/completions/"):
        assert (await server.client.get(path)).status == 404
    assert_openai_error(await server.client.get("/nowhere"), 404, "route_not_found")


async def test_wrong_methods_are_405_and_name_the_right_ones(server: Server) -> None:
    answer = await server.client.get(CHAT)
    assert_openai_error(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    answer = await server.client.delete("/v1/documents")
    assert answer.headers["allow"] == "GET, POST"


@pytest.mark.parametrize("path", [CHAT, "/v1/documents"])
async def test_bodies_that_are_not_json_objects_are_400(server: Server, path: str) -> None:
    for raw in (b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b'{"a": "\\ud800"}', b"[" * 1500):
        assert_openai_error(await server.client.post(path, raw=raw), 400, "invalid_json")
    headers = {"content-type": "text/plain"}
    answer = await server.client.post(path, raw=b"{}", headers=headers)
    assert_openai_error(answer, 400, "invalid_content_type")
    assert server.backend.calls == []


@pytest.mark.parametrize("path", [CHAT, "/v1/documents"])
async def test_large_bodies_are_413(server: Server, path: str) -> None:
    answer = await server.client.post(path, {"messages": "x" * 3000})
    assert_openai_error(answer, 413, "body_too_large")
    headers = {"content-length": "9" * 30}
    answer = await server.client.post(path, raw=b"{}", headers=headers)
    assert_openai_error(answer, 413, "body_too_large")


async def test_warnings_are_a_header(server: Server) -> None:
    answer = await server.client.post(CHAT, {**HELLO, "cache_salt": "x", "surprise": 1})
    assert answer.headers["x-blendgate-warning"] == (
        "internal fields removed: cache_salt; fields ignored: surprise"
    )
    answer = await server.client.post(CHAT, HELLO)
    assert "x-blendgate-warning" not in answer.headers


async def test_request_ids_are_echoed_if_they_are_decent(server: Server) -> None:
    async def echoed(sent: str) -> str:
        answer = await server.client.get("/livez", headers={"x-request-id": sent})
        return answer.headers["x-request-id"]

    assert await echoed("abc-123") == "abc-123"
    for sent in ("", "a b", "x" * 129, "\u00fc", "a\nb"):
        made = await echoed(sent)
        assert made.startswith("req_")
        assert len(made) == 36


async def test_errors_carry_request_ids(server: Server) -> None:
    answer = await server.client.post(CHAT, raw=b"", headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


async def test_a_dead_engine_is_503(server: Server) -> None:
    server.backend.error = EngineDown("gone")
    server.backend.engine.is_dead = True
    answer = await server.client.post(CHAT, HELLO)
    assert_openai_error(answer, 503, "engine_unavailable")
    assert answer.headers["retry-after"] == "10"
    for path in ("/health", "/readyz", "/livez"):
        answer = await server.client.get(path)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "10"


async def test_a_full_queue_is_503(server: Server) -> None:
    server.backend.error = Overloaded("full")
    answer = await server.client.post(CHAT, HELLO)
    assert_openai_error(answer, 503, "overloaded")
    assert answer.headers["retry-after"] == "1"


async def test_a_bug_is_500_and_tells_nothing(server: Server) -> None:
    server.backend.error = RuntimeError("/etc/secret")
    answer = await server.client.post(CHAT, HELLO)
    assert_openai_error(answer, 500, "internal_error")
    assert b"secret" not in answer.body


async def test_nothing_but_probes_is_served_while_the_engine_starts() -> None:
    never = asyncio.Event()

    async def start(_metrics: Metrics) -> ChatBackend:
        await never.wait()
        raise AssertionError

    async with running(create_app(Settings(), start)) as client:
        assert (await client.get("/livez")).status == 200
        assert (await client.get("/metrics")).status == 200
        for path in ("/readyz", "/health"):
            answer = await client.get(path)
            assert answer.status == 503
            assert answer.json()["error"]["code"] == "engine_not_ready"
        for path in ("/v1/models", "/v1/documents"):
            answer = await client.get(path)
            assert_openai_error(answer, 503, "engine_not_ready")
            assert answer.headers["retry-after"] == "5"
        assert_openai_error(await client.post(CHAT, HELLO), 503, "engine_not_ready")


async def test_an_engine_that_does_not_start_is_fatal() -> None:
    fatal = asyncio.Event()

    async def start(_metrics: Metrics) -> ChatBackend:
        raise RuntimeError("no memory")

    async with running(create_app(Settings(), start, on_fatal=fatal.set)) as client:
        await fatal.wait()
        assert (await client.get("/livez")).status == 503
        assert_openai_error(await client.post(CHAT, HELLO), 503, "engine_unavailable")


async def test_stopping_the_server_stops_the_engine() -> None:
    backend = FakeBackend()
    app = make_app(backend)
    async with running(app):
        await app.state.runtime.started.wait()
    assert backend.is_closed


async def test_hanging_up_aborts_a_request(server: Server) -> None:
    server.backend.is_stuck = True
    exchange = server.client.open(
        "POST",
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}]}',
        {"content-type": "application/json"},
    )
    await until(lambda: server.backend.calls)
    await exchange.hang_up()
    await exchange.task
    assert server.backend.num_aborted == 1


async def test_hanging_up_aborts_a_stream(server: Server) -> None:
    server.backend.is_stuck = True
    exchange = server.client.open(
        "POST",
        CHAT,
        b'{"stream": true, "messages": [{"role": "user", "content": "x"}]}',
        {"content-type": "application/json"},
    )
    assert (await exchange.next_message())["status"] == 200
    assert (await exchange.next_message())["body"] == b"data: first\n\n"
    await exchange.hang_up()
    await exchange.task
    assert server.backend.num_aborted == 1


async def test_models_say_how_they_are_blended(server: Server) -> None:
    (card,) = (await server.client.get("/v1/models")).json()["data"]
    assert card["blend"] == {
        "supported": True,
        "reason": None,
        "policies": ["none", "sinks", "hkvd"],
        "default": {"policy": "sinks", "recompute_ratio": 0.1},
        "min_segment_tokens": 4,
    }
    assert (await server.client.get("/v1/models/demo")).json() == card
    assert_openai_error(await server.client.get("/v1/models/other"), 404, "model_not_found")


async def test_an_unsupported_model_says_why(server: Server) -> None:
    server.backend.engine.unsupported_reason = "it has no keys"
    (card,) = (await server.client.get("/v1/models")).json()["data"]
    assert card["blend"]["supported"] is False
    assert card["blend"]["reason"] == "it has no keys"
    assert (await server.client.get("/readyz")).json()["blend"]["supported"] is False


async def test_metrics_count_requests_by_route(server: Server) -> None:
    await server.client.post(CHAT, HELLO)
    await server.client.get("/secret-path")
    await server.client.get("/v1/documents/doc_unknown")
    text = (await server.client.get("/metrics")).body.decode()
    assert 'gateway_requests_total{code="200",route="/v1/chat/completions"} 1.0' in text
    assert 'gateway_requests_total{code="404",route="unrouted"} 1.0' in text
    assert 'gateway_requests_total{code="404",route="/v1/documents/{document_id}"} 1.0' in text
    assert 'gateway_rejections_total{reason="document_not_found"} 1.0' in text
    assert "secret" not in text
    for name in (
        "blend_requests_total",
        "blend_prompt_tokens_total",
        "blend_assemble_seconds",
        "blend_fallback_total",
        "blend_documents",
        "blend_store_bytes",
        "blend_warm_queue_depth",
        "blend_warm_seconds",
        "blend_evictions_total",
        "gateway_inflight",
        "# vllm",
    ):
        assert name in text


async def test_the_openapi_document_lists_the_routes(server: Server) -> None:
    paths = (await server.client.get("/openapi.json")).json()["paths"]
    assert {CHAT, "/v1/documents", "/v1/documents/{document_id}", "/v1/models"} <= set(paths)


async def test_a_document_is_registered_waited_for_and_removed(server: Server) -> None:
    answer = await server.client.post("/v1/documents?wait=5", {"text": TEXT, "title": "T"})
    assert answer.status == 200
    shown = answer.json()
    assert shown["status"] == "ready"
    assert (shown["object"], shown["title"], shown["tokens"]) == ("document", "T", 5)
    assert TEXT not in answer.body.decode()

    path = f"/v1/documents/{shown['id']}"
    assert (await server.client.get(path)).json() == shown
    assert (await server.client.post(f"{path}/warm")).status == 200
    answer = await server.client.delete(path)
    assert answer.json() == {"id": shown["id"], "object": "document.deleted", "deleted": True}
    for answer in (
        await server.client.get(path),
        await server.client.delete(path),
        await server.client.post(f"{path}/warm"),
    ):
        assert_openai_error(answer, 404, "document_not_found", "document_id")


async def test_without_waiting_a_document_is_accepted(server: Server) -> None:
    server.backend.engine.gate.clear()
    answer = await server.client.post("/v1/documents", {"text": TEXT})
    assert answer.status == 202
    assert answer.json()["status"] in ("queued", "warming")
    path = f"/v1/documents/{answer.json()['id']}"
    assert (await server.client.post(f"{path}/warm?wait=0.01")).status == 202


async def test_a_batch_is_registered_in_order(server: Server) -> None:
    batch = {"documents": [f"{TEXT} {number}" for number in range(3)]}
    answer = await server.client.post("/v1/documents?wait=5", batch)
    assert answer.status == 200
    ids = [document["id"] for document in answer.json()["data"]]
    listed = (await server.client.get("/v1/documents?order=asc&limit=2")).json()
    assert [document["id"] for document in listed["data"]] == ids[:2]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (ids[0], ids[1], True)
    rest = (await server.client.get(f"/v1/documents?order=asc&after={ids[1]}")).json()
    assert [document["id"] for document in rest["data"]] == ids[2:]
    assert rest["has_more"] is False


async def test_an_empty_list_is_a_list(server: Server) -> None:
    assert (await server.client.get("/v1/documents")).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("wait=-1", "wait"),
        ("wait=61", "wait"),
        ("wait=nan", "wait"),
        ("wait=inf", "wait"),
        ("wait=soon", "wait"),
        ("wait=", "wait"),
    ],
)
async def test_bad_waits_are_400(server: Server, query: str, param: str) -> None:
    answer = await server.client.post(f"/v1/documents?{query}", {"text": TEXT})
    assert_openai_error(answer, 400, "invalid_value", param)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=%D9%A1", "limit"),
        ("order=up", "order"),
        ("status=warm", "status"),
    ],
)
async def test_bad_pages_are_400(server: Server, query: str, param: str) -> None:
    answer = await server.client.get(f"/v1/documents?{query}")
    assert_openai_error(answer, 400, "invalid_value", param)


async def test_a_cursor_that_names_nothing_is_404(server: Server) -> None:
    answer = await server.client.get("/v1/documents?after=doc_x")
    assert_openai_error(answer, 404, "document_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": " \n"}, "text"),
        ({"text": 5}, "text"),
        ({"text": TEXT, "title": 5}, "title"),
        ({"text": TEXT, "title": "x" * 513}, "title"),
        ({"text": TEXT, "colour": "red"}, "colour"),
        ({"text": TEXT, "metadata": [1]}, "metadata"),
        ({"text": TEXT, "metadata": {"a": {"b": 1}}}, "metadata"),
        ({"text": TEXT, "metadata": {str(i): 1 for i in range(17)}}, "metadata"),
        ({"document_id": "doc_1"}, "text"),
        ({"documents": []}, "documents"),
        ({"documents": {}}, "documents"),
        ({"documents": ["x"] * 65}, "documents"),
        ({"documents": [TEXT, ""]}, "documents[1]"),
        ({"documents": [{"text": TEXT, "id": 7}]}, "documents[0].id"),
        ({"documents": [TEXT], "text": TEXT}, "text"),
    ],
)
async def test_malformed_registrations_are_400(server: Server, body: Any, param: str) -> None:
    answer = await server.client.post("/v1/documents", body)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param
    assert (await server.client.get("/v1/documents")).json()["data"] == []
