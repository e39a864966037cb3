import asyncio
from collections.abc import Sequence

import pytest
from tests.gateway.asgi import until
from tests.gateway.fakes import FakeEngine

from blend_engine.errors import EngineBusy
from blend_engine.segments import SegmentContext, SegmentKey, segment_key
from blend_gateway.documents import (
    DocumentRegistry,
    Draft,
    Entry,
    RegisteredStatus,
    document_id,
)
from blend_gateway.errors import DocumentNotFound, TooManyDocuments
from blend_gateway.salts import Tenant

pytestmark = pytest.mark.anyio

ALICE, BOB = Tenant(name="alice"), Tenant(name="bob")
TEXT = "one two three four five"
DRAFT = Draft(text=TEXT, title="Numbers")


async def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def registry(engine: FakeEngine) -> DocumentRegistry:
    return DocumentRegistry(engine, encode, max_documents=10)


async def ready(registry: DocumentRegistry, engine: FakeEngine, draft: Draft = DRAFT) -> Entry:
    engine.gate.set()
    entry = await registry.register(ALICE, draft)
    await registry.wait([entry], 5)
    return entry


async def test_a_document_is_queued_then_warming_then_ready(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    entry = await registry.register(ALICE, DRAFT)
    assert registry.status(entry) is RegisteredStatus.QUEUED
    await until(lambda: entry.is_started)
    assert registry.status(entry) is RegisteredStatus.WARMING
    engine.gate.set()
    await registry.wait([entry], 5)
    assert registry.status(entry) is RegisteredStatus.READY


async def test_registration_is_idempotent(registry: DocumentRegistry, engine: FakeEngine) -> None:
    first = await ready(registry, engine)
    again = await registry.register(
        ALICE, Draft(text=TEXT, title="Numbers", metadata={"lang": "en"})
    )
    assert again is first
    assert again.draft.metadata == {"lang": "en"}
    assert engine.num_compiles == 1


async def test_simultaneous_registrations_compile_once(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    entries = await asyncio.gather(*(registry.register(ALICE, DRAFT) for _ in range(5)))
    engine.gate.set()
    await registry.wait(entries, 5)
    assert len({id(entry) for entry in entries}) == 1
    assert engine.num_compiles == 1


def test_ids_depend_on_tenant_text_and_title_only() -> None:
    base = document_id(ALICE, DRAFT)
    same = document_id(ALICE, Draft(text=TEXT, title="Numbers", label="x", metadata={"a": 1}))
    assert base == same
    others = {
        document_id(BOB, DRAFT),
        document_id(ALICE, Draft(text=TEXT)),
        document_id(ALICE, Draft(text=TEXT, title="")),
        document_id(ALICE, Draft(text=TEXT + "Numbers", title="")),
    }
    assert len(others | {base}) == 5
    assert base.startswith("doc_")


async def test_the_key_is_the_one_a_chat_looks_up(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    entry = await ready(registry, engine)
    assert entry.key == segment_key("alice", SegmentContext.FREE, await encode(TEXT))


async def test_another_tenants_document_does_not_exist(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    entry = await ready(registry, engine)
    for attempt in (
        lambda: registry.get(BOB, entry.id),
        lambda: registry.warm(BOB, entry.id),
        lambda: registry.page(BOB, limit=1, after=entry.id),
    ):
        with pytest.raises(DocumentNotFound):
            attempt()
    with pytest.raises(DocumentNotFound):
        await registry.delete(BOB, entry.id)
    assert registry.resolver(BOB)(entry.id) is None
    assert registry.page(BOB, limit=10).entries == ()


async def test_a_document_whose_kv_is_gone_says_so_and_can_be_warmed(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    entry = await ready(registry, engine)
    engine.resident.clear()
    assert registry.status(entry) is RegisteredStatus.EVICTED
    registry.warm(ALICE, entry.id)
    await registry.wait([entry], 5)
    assert registry.status(entry) is RegisteredStatus.READY


async def test_warming_what_is_warm_does_nothing(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    entry = await ready(registry, engine)
    registry.warm(ALICE, entry.id)
    assert not entry.is_pending
    assert engine.num_compiles == 1


async def test_a_failed_compile_is_told_and_tried_again(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    engine.failure = "store_full"
    entry = await ready(registry, engine)
    assert registry.status(entry) is RegisteredStatus.FAILED
    assert entry.failure is not None
    assert entry.failure.code == "store_full"
    engine.failure = None
    registry.warm(ALICE, entry.id)
    await registry.wait([entry], 5)
    assert registry.status(entry) is RegisteredStatus.READY


async def test_a_dead_engine_fails_the_document_not_the_registry(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    engine.is_dead = True
    entry = await ready(registry, engine)
    assert entry.failure is not None
    assert entry.failure.code == "engine_unavailable"


async def test_a_compile_that_the_engine_has_no_room_for_can_be_tried_again(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    engine.is_busy = True
    entry = await ready(registry, engine)
    assert registry.status(entry) is RegisteredStatus.FAILED
    assert entry.failure is not None
    assert entry.failure.code == "overloaded"
    engine.is_busy = False
    registry.warm(ALICE, entry.id)
    await registry.wait([entry], 5)
    assert registry.status(entry) is RegisteredStatus.READY


@pytest.mark.parametrize(
    ("engine", "code"),
    [
        (FakeEngine(min_segment_tokens=6), "too_short"),
        (FakeEngine(unsupported_reason="sliding window"), "unsupported_model"),
    ],
)
async def test_what_cannot_be_compiled_is_kept_as_text(engine: FakeEngine, code: str) -> None:
    registry = DocumentRegistry(engine, encode, max_documents=10)
    entry = await registry.register(ALICE, DRAFT)
    assert registry.status(entry) is RegisteredStatus.FAILED
    assert entry.failure is not None
    assert entry.failure.code == code
    document = registry.resolver(ALICE)(entry.id)
    assert document is not None
    assert document.text == TEXT
    assert engine.num_compiles == 0


async def test_waiting_ends_in_time(registry: DocumentRegistry) -> None:
    entry = await registry.register(ALICE, DRAFT)
    await registry.wait([entry], 0.01)
    assert entry.is_pending
    await registry.close()


async def test_deleting_drops_the_kv(registry: DocumentRegistry, engine: FakeEngine) -> None:
    entry = await ready(registry, engine)
    await registry.delete(ALICE, entry.id)
    assert engine.dropped == [entry.key]
    with pytest.raises(DocumentNotFound):
        registry.get(ALICE, entry.id)


async def test_kv_that_another_document_shares_stays(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    first = await ready(registry, engine)
    second = await ready(registry, engine, Draft(text=TEXT, title="Other title"))
    assert first.key == second.key
    await registry.delete(ALICE, first.id)
    assert engine.dropped == []
    await registry.delete(ALICE, second.id)
    assert engine.dropped == [first.key]


async def test_deleting_leaves_the_end_of_a_compile_to_the_engine(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    """A compile that waits behind others in the engine's queue must not hold the answer up."""
    entry = await registry.register(ALICE, DRAFT)
    await until(lambda: entry.is_started)
    await registry.delete(ALICE, entry.id)
    assert entry.job is not None
    assert entry.job.cancelled()
    assert engine.dropped == [entry.key]
    engine.gate.set()
    assert engine.resident == set()


async def test_registering_while_the_same_document_is_deleted_compiles_it_again(
    registry: DocumentRegistry, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ready` is only said of KV that stays."""
    entry = await ready(registry, engine)
    may_drop, drop = asyncio.Event(), engine.drop

    async def slow_drop(keys: Sequence[SegmentKey]) -> None:
        await may_drop.wait()
        await drop(keys)

    monkeypatch.setattr(engine, "drop", slow_drop)
    deletion = asyncio.create_task(registry.delete(ALICE, entry.id))
    await asyncio.sleep(0)
    again = await registry.register(ALICE, DRAFT)
    assert registry.status(again) is RegisteredStatus.QUEUED
    may_drop.set()
    await deletion
    await registry.wait([again], 5)
    assert registry.status(again) is RegisteredStatus.READY
    assert engine.resident == {again.key}


async def test_deletions_that_overlap_are_all_waited_for(
    registry: DocumentRegistry, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted, registered and deleted again at once; what is registered then waits for both."""
    may_drop, drop = [asyncio.Event(), asyncio.Event()], engine.drop
    waiting = iter(may_drop)

    async def slow_drop(keys: Sequence[SegmentKey]) -> None:
        await next(waiting).wait()
        await drop(keys)

    monkeypatch.setattr(engine, "drop", slow_drop)
    deletions = []
    entry = await ready(registry, engine)
    for _ in may_drop:
        deletions.append(asyncio.create_task(registry.delete(ALICE, entry.id)))
        await asyncio.sleep(0)
        entry = await registry.register(ALICE, DRAFT)
    for event, deletion in zip(may_drop, deletions, strict=True):
        assert registry.status(entry) is RegisteredStatus.QUEUED
        event.set()
        await deletion
        await asyncio.sleep(0)
    await registry.wait([entry], 5)
    assert registry.status(entry) is RegisteredStatus.READY
    assert engine.resident == {entry.key}


@pytest.mark.parametrize("error", [EngineBusy("full"), RuntimeError("unforeseen")])
async def test_a_deletion_that_fails_can_be_asked_for_again(
    registry: DocumentRegistry,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """Its KV may still be there, whatever kept it from being dropped. It stays where it stood."""

    async def failing_drop(_keys: Sequence[SegmentKey]) -> None:
        raise error

    entry = await ready(registry, engine)
    later = await ready(registry, engine, Draft(text="a text that came later"))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "drop", failing_drop)
        with pytest.raises(type(error)):
            await registry.delete(ALICE, entry.id)
    assert registry.get(ALICE, entry.id) is entry
    assert registry.page(ALICE, limit=9).entries == (later, entry)
    await registry.delete(ALICE, entry.id)
    assert engine.dropped == [entry.key]


async def test_one_tenants_texts_and_kv_are_nothing_to_another(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    """The same text is another document with a compile of its own, and outlives the other's."""
    hers = await ready(registry, engine)
    engine.gate.clear()
    his = await registry.register(BOB, DRAFT)
    assert his.id != hers.id
    assert his.key != hers.key
    assert registry.status(his) is RegisteredStatus.QUEUED
    engine.gate.set()
    await registry.wait([his], 5)
    assert engine.num_compiles == 2
    assert registry.page(BOB, limit=5).entries == (his,)
    await registry.delete(BOB, his.id)
    assert engine.dropped == [his.key]
    assert registry.status(hers) is RegisteredStatus.READY


async def test_deleting_leaves_a_compile_that_another_document_needs(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    first = await registry.register(ALICE, DRAFT)
    second = await registry.register(ALICE, Draft(text=TEXT, title="Other title"))
    await registry.delete(ALICE, first.id)
    engine.gate.set()
    await registry.wait([second], 5)
    assert registry.status(second) is RegisteredStatus.READY


async def test_deleting_a_queued_document_cancels_its_compile(
    registry: DocumentRegistry, engine: FakeEngine
) -> None:
    entry = await registry.register(ALICE, DRAFT)
    await registry.delete(ALICE, entry.id)
    assert engine.num_compiles == 0


async def test_the_number_of_documents_is_bounded(engine: FakeEngine) -> None:
    registry = DocumentRegistry(engine, encode, max_documents=1)
    await ready(registry, engine)
    await ready(registry, engine)
    with pytest.raises(TooManyDocuments):
        await registry.register(ALICE, Draft(text="another text"))
    await registry.register(BOB, Draft(text="another text"))


async def test_pages_follow_a_cursor(registry: DocumentRegistry, engine: FakeEngine) -> None:
    entries = [await ready(registry, engine, Draft(text=f"{TEXT} {'x' * n}")) for n in range(5)]
    ids = [entry.id for entry in entries]
    first = registry.page(ALICE, limit=2)
    assert [entry.id for entry in first.entries] == ids[4:2:-1]
    assert first.has_more
    rest = registry.page(ALICE, limit=3, after=first.entries[-1].id)
    assert [entry.id for entry in rest.entries] == ids[2::-1]
    assert not rest.has_more
    oldest = registry.page(ALICE, limit=5, newest_first=False)
    assert [entry.id for entry in oldest.entries] == ids


async def test_pages_filter_by_status(registry: DocumentRegistry, engine: FakeEngine) -> None:
    warm = await ready(registry, engine)
    cold = await ready(registry, engine, Draft(text=f"{TEXT} six"))
    engine.resident = {warm.key}
    assert registry.page(ALICE, limit=5, status=RegisteredStatus.READY).entries == (warm,)
    assert registry.page(ALICE, limit=5, status=RegisteredStatus.EVICTED).entries == (cold,)
    assert registry.count_by_status() == {"ready": 1, "evicted": 1}


async def test_closing_gives_up_waiting_compiles(registry: DocumentRegistry) -> None:
    entry = await registry.register(ALICE, DRAFT)
    await registry.close()
    assert not entry.is_pending
