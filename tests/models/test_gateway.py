"""The whole gateway: tenants apart, internals closed, nothing left of those who hang up."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.gateway.asgi import Exchange, until
from tests.models.gateway import (
    BLOCK_SIZE,
    CHAT,
    DOCUMENTS,
    SETTINGS,
    Gateway,
    body,
    chat_of,
    opened,
    registered,
    serving_gateway,
    text,
)

from blend_engine.async_engine import BlendAsyncLLM
from blend_engine.protocol import BlendParams, parse_request_params
from blend_engine.segments import SegmentContext, SegmentSpan
from blend_gateway.salts import Tenant, derive_salt

pytestmark = pytest.mark.anyio

ALICE, BOB = "alice", "bob"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[Gateway]:
    async with serving_gateway(tmp_path_factory.mktemp("model")) as started:
        yield started


async def test_one_tenant_learns_nothing_of_anothers_documents(gateway: Gateway) -> None:
    """What she has is to him as what nobody has: in chats, registrations, lists and by name."""
    alice, bob = gateway.client(ALICE), gateway.client(BOB)
    hers = await registered(alice, text=text("harbour"), title="Hers", metadata={"a": "b"})
    path = f"{DOCUMENTS}/{hers['id']}"
    for answer in (
        await bob.get(path),
        await bob.post(f"{path}/warm"),
        await bob.delete(path),
        await bob.get(f"{DOCUMENTS}?after={hers['id']}"),
        await bob.post(CHAT, body("What is said?", {"document_id": hers["id"]})),
    ):
        assert answer.status == 404
        assert answer.json()["error"]["code"] == "document_not_found"
    assert (await bob.get(DOCUMENTS)).json()["data"] == []

    seen = []
    for known in (text("harbour"), text("glacier")):
        strict = await bob.post(CHAT, body("Is it?", known, blend={"mode": "strict"}))
        refused = {**strict.json()["error"], "message": ""}
        told = await chat_of(bob, "What is said?", known)
        await until(lambda: not gateway.engine.compile_queue_depth)
        counts = {**told["blend"], "computed_tokens": 0}
        statuses = [each["status"] for each in counts.pop("documents")]
        seen.append((strict.status, refused, counts, statuses, told["usage"]["completion_tokens"]))
    assert seen[0] == seen[1]
    assert seen[0][0] == 409
    assert seen[0][2]["reused_tokens"] == seen[0][2]["prefix_tokens"] == 0

    his = await registered(bob, text=text("harbour"), title="Hers")
    assert his["id"] != hers["id"]
    assert his["metadata"] == {}
    assert (await bob.delete(f"{DOCUMENTS}/{his['id']}")).status == 200
    again = await chat_of(alice, "What is said?", {"document_id": hers["id"]})
    assert again["blend"]["documents"][0]["status"] == "hit"
    await gateway.check_at_rest()


async def test_one_tenants_chats_are_not_found_by_another(gateway: Gateway) -> None:
    """In vLLM's own cache; the same chat again is."""
    question = "Which harbour was built in this town, and by whom, and in which year was it? " * 2
    prefixes = []
    for tenant in (ALICE, ALICE, BOB, BOB):
        told = await chat_of(gateway.client(tenant), question)
        prefixes.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert prefixes[0] == prefixes[2] == 0
    assert prefixes[1] == prefixes[3] > 0


async def test_a_chat_finds_its_own_turns_and_no_other_settings(gateway: Gateway) -> None:
    """Exact and blended in two ways: each setting computes its first turn, and only that anew."""
    alice = gateway.client(ALICE)
    known = await registered(alice, text=text("viaduct"))
    asked = [
        {"type": "document", "document": {"document_id": known["id"]}},
        {"type": "text", "text": "What is said of it?"},
    ]
    for blend in ({"mode": "off"}, {"policy": "none"}, {"recompute_ratio": 0.5}):
        told = await chat_of(alice, asked, blend=blend)
        assert told["blend"]["prefix_tokens"] == 0
        assert told["blend"]["applied"] is ("mode" not in blend)
        turns = body(asked)["messages"]
        for question in ("And then?", "And in the end?"):
            # The last token, and what its block lacks, are computed again.
            kept = (told["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
            turns.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
            turns.append({"role": "user", "content": question})
            told = await chat_of(alice, "", messages=turns, blend=blend)
            assert told["blend"]["prefix_tokens"] >= kept > 0
            assert told["blend"]["exact"] is ("mode" in blend)


async def test_metrics_name_nobody(gateway: Gateway) -> None:
    hers = await registered(gateway.client(ALICE), text=text("meadow"), title="Secret title")
    await chat_of(gateway.client(ALICE), "Is it secret?", {"document_id": hers["id"]})
    told = (await gateway.client(BOB).get("/metrics")).body.decode()
    entry = gateway.documents.get(Tenant(name=ALICE), hers["id"])
    salt = derive_salt(SETTINGS.salt_secret, Tenant(name=ALICE))
    for secret in (ALICE, hers["id"], entry.key, salt, "meadow", "Secret", "secret"):
        assert secret not in told


FORGED = BlendParams(
    plan_id="forged",
    tenant=ALICE,
    segments=(SegmentSpan(start=0, end=8, context=SegmentContext.PREFIX),),
    approximate_salt=True,
).to_kv_transfer_params()
HERS = derive_salt(SETTINGS.salt_secret, Tenant(name=ALICE))
EXTRA_ARGS = {"kv_transfer_params": FORGED, "cache_salt": HERS}


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": HERS},
        {"kv_transfer_params": FORGED},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]}},
        {"ec_transfer_params": FORGED},
        {"vllm_xargs": EXTRA_ARGS},
        {"vllm_xargs": {"kv_transfer_params": "forged"}},
        {"extra_args": EXTRA_ARGS, "extra_body": EXTRA_ARGS, "sampling_params": EXTRA_ARGS},
        {"priority": -9, "request_id": "forged", "session_id": "forged"},
        {"tenant": ALICE, "user": ALICE, "metadata": {"tenant": ALICE}, "pool": "shared"},
        {"exchange": {"call": {}}, "_exchange": {"call": {}}, "plan": {"salt": HERS}},
        {"data_parallel_rank": 3, "lora_request": {"lora_name": "a"}, "trace_headers": {"a": "b"}},
        {"blend": {"tenant": ALICE}},
        {"blend": {"salt": HERS, "segments": []}},
        {"blend": {"check_layer": 0}},
        {"messages": [{"role": "user", "content": "Who?", "cache_salt": HERS, "tenant": ALICE}]},
        {"documents": [{"text": text("orchard"), "tenant": ALICE}]},
        {"documents": [{"text": text("orchard"), "key": "0" * 64, "cache_salt": HERS}]},
        {"stream_options": {"include_usage": True, "cache_salt": HERS}, "stream": True},
        {"chat_template_kwargs": EXTRA_ARGS},
        {"response_format": {"type": "text", **EXTRA_ARGS}},
    ],
    ids=lambda fields: "-".join(fields),
)
async def test_a_client_chooses_nothing_but_what_is_its_own(
    gateway: Gateway, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine hears what it hears of the same request without the fields, or nothing."""
    bob, heard = gateway.client(BOB), listening(gateway.engine, monkeypatch)
    plain = body("Who?", text("orchard"))
    for name in ("stream", "temperature"):
        if name in fields:
            plain[name] = fields[name]
    headers = {
        "x-tenant": ALICE,
        "x-user": ALICE,
        "x-request-id": "forged",
        "x-session-id": "forged",
        "x-vllm-priority": "-9",
        "x-data-parallel-rank": "3",
        "x-cache-salt": HERS,
        "x-kv-transfer-params": json.dumps(FORGED),
        "authorization": f"Bearer {ALICE}",
        "cookie": f"tenant={ALICE}",
    }
    query = f"?cache_salt={HERS}&tenant={ALICE}&request_id=forged&priority=-9"
    assert (await bob.post(CHAT, plain)).status == 200
    answer = await bob.post(f"{CHAT}{query}", {**plain, **fields}, headers=headers)
    assert b"kv_transfer_params" not in answer.body or answer.status == 400
    if answer.status == 400:
        assert len(heard) == 1
    else:
        assert answer.status == 200, answer.body
        assert heard[0] == heard[1]
        assert ALICE not in repr(heard)
        assert HERS not in repr(heard)
        assert "forged" not in repr(heard)


def listening(engine: BlendAsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine is asked to generate from here on, ids made for one request left out."""
    heard: list[Any] = []
    original = engine.generate

    def generate(prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        plan = parse_request_params((params.extra_args or {}).get("kv_transfer_params"))
        told = repr((prompt, params, sorted(options.items()), "forged" in request_id))
        for once in (request_id, plan.plan_id if plan else request_id):
            told = told.replace(once, "")
        heard.append(told)
        return original(prompt, params, request_id, **options)

    monkeypatch.setattr(engine, "generate", generate)
    return heard


Stage = Callable[[Gateway, Exchange], Awaitable[Any]]


def after_turns(turns: int) -> Stage:
    """Others have run so often: its body is being read, its prompt being assembled."""

    async def wait(_gateway: Gateway, _exchange: Exchange) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    return wait


async def in_the_engine(gateway: Gateway, _exchange: Exchange) -> None:
    await until(gateway.engine.get_num_unfinished_requests)


async def begun(gateway: Gateway, exchange: Exchange) -> None:
    """Its status and its first event are out; another answer has none of them yet."""
    await in_the_engine(gateway, exchange)
    await exchange.next_message()
    await exchange.next_message()


async def hung_up(gateway: Gateway, exchange: Exchange, stage: Stage) -> None:
    await stage(gateway, exchange)
    await exchange.hang_up()
    await exchange.task


@pytest.mark.parametrize(
    ("stage", "stream"),
    [
        *((after_turns(turns), stream) for turns in (0, 1, 4, 16) for stream in (False, True)),
        (in_the_engine, False),
        (in_the_engine, True),
        (begun, True),
    ],
)
async def test_hanging_up_on_a_chat_gives_everything_back(
    gateway: Gateway, stage: Stage, stream: bool
) -> None:
    """Beside a document that it hits and one that it misses; it is not answered to its end."""
    alice, most = gateway.client(ALICE), 400
    known, new = text("hedge"), text(uuid.uuid4().hex)
    await registered(alice, text=known)
    before = await gateway.metric("vllm:generation_tokens_total")
    asked = body("What is said?", known, new, stream=stream)
    exchange = opened(alice, "POST", CHAT, {**asked, "max_tokens": most})
    await hung_up(gateway, exchange, stage)
    await gateway.check_at_rest()
    assert await gateway.metric("vllm:generation_tokens_total") < before + most
    told = await chat_of(alice, "What is said?", known)
    assert told["blend"]["documents"][0]["status"] == "hit"


@pytest.mark.parametrize("stage", [after_turns(0), after_turns(2), in_the_engine])
async def test_hanging_up_on_a_registration_leaves_its_compiles_to_end(
    gateway: Gateway, stage: Stage
) -> None:
    """The same for one document, for several, and for one that is warmed again."""
    owner = Tenant(name=f"{ALICE} {id(stage)}")
    alice, drafts = (
        gateway.client(owner.name),
        [{"text": text(t)} for t in ("lake", "moor", "reef")],
    )

    async def statuses() -> list[str]:
        return [each["status"] for each in (await alice.get(DOCUMENTS)).json()["data"]]

    path = f"{DOCUMENTS}?wait=60"
    await hung_up(gateway, opened(alice, "POST", path, drafts[0]), stage)
    await hung_up(gateway, opened(alice, "POST", path, {"documents": drafts}), stage)
    await gateway.check_at_rest()
    assert await statuses() == ["ready"] * 3
    entries = {entry.id: entry for entry in gateway.documents.page(owner, limit=9).entries}
    await gateway.engine.drop([entry.key for entry in entries.values()])
    assert await statuses() == ["evicted"] * 3
    for name in entries:
        exchange = opened(alice, "POST", f"{DOCUMENTS}/{name}/warm?wait=60")
        await hung_up(gateway, exchange, stage)
    await gateway.check_at_rest()
    assert await statuses() == ["ready"] * 3
    for name in entries:
        await hung_up(gateway, opened(alice, "DELETE", f"{DOCUMENTS}/{name}"), stage)
    await gateway.check_at_rest()
    assert await statuses() == []
    assert not any(gateway.engine.is_resident(entry.key) for entry in entries.values())
