"""Registered documents: which texts a tenant has stored, and whether their KV is there.

In memory. The registry owns texts and metadata; what is resident is the engine's to know, so a
status is read off the engine whenever it is asked for, and a document whose KV was evicted says so.
"""

import asyncio
import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blend_engine.errors import BlendError
from blend_engine.ports import BlendEngine
from blend_engine.segments import SegmentContext, SegmentKey, segment_key
from blend_gateway.assembler.documents import Document, Resolver
from blend_gateway.errors import DocumentNotFound, TooManyDocuments, shape_of
from blend_gateway.salts import Tenant

_log = logging.getLogger(__name__)

Encode = Callable[[str], Awaitable[Sequence[int]]]
"""Tokenizes a document's text exactly as a chat request does."""

_CONCURRENT_COMPILES = 4
"""Compiles handed to the engine at once. Its queue is bounded and shared with the misses of live
chats, so a large registration must not fill it."""


class RegisteredStatus(StrEnum):
    """Where a registered document's KV is."""

    QUEUED = "queued"
    """Waiting for its compile."""
    WARMING = "warming"
    """Being compiled."""
    READY = "ready"
    """Resident."""
    EVICTED = "evicted"
    """It was resident and is not any more; the text is kept."""
    FAILED = "failed"
    """It was not compiled; `last_error` says why. The text still serves chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a client registers. Equal texts with equal titles are one document."""

    text: str
    title: str | None = None
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFailure:
    """Why a document's KV was not made."""

    code: str
    message: str


@dataclass(slots=True, kw_only=True)
class Entry:
    """One registered document.

    Args:
        id: Content-addressed; see `document_id`.
        draft: As registered last.
        num_tokens: Length of its segment.
        key: What its KV is stored under.
        created_at: Unix seconds of the first registration.
        number: Its place among all registrations; seconds are too coarse to order by.
        failure: How the last compile failed; None unless it did.
        job: The running compile.
        is_started: Whether `job` has reached the engine.
    """

    id: str
    draft: Draft
    num_tokens: int
    key: SegmentKey
    created_at: int
    number: int
    failure: CompileFailure | None = None
    job: asyncio.Task[None] | None = None
    is_started: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether a compile is waiting or running."""
        return self.job is not None and not self.job.done()


@dataclass(slots=True)
class _Removal:
    """The deletions under way of one segment's KV.

    Args:
        num_running: How many there are.
        is_over: Set when the last has ended.
    """

    num_running: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A slice of a tenant's documents."""

    entries: tuple[Entry, ...]
    has_more: bool


class DocumentRegistry:
    """The documents of every tenant.

    Args:
        engine: Compiles, and knows what is resident.
        encode: Tokenizes a document's text.
        max_documents: Documents one tenant may have.
        on_compiled: Called with the seconds a compile took.
    """

    def __init__(
        self,
        engine: BlendEngine,
        encode: Encode,
        *,
        max_documents: int,
        on_compiled: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._engine = engine
        self._encode = encode
        self._max_documents = max_documents
        self._on_compiled = on_compiled
        self._tenants: dict[str, dict[str, Entry]] = {}
        self._removals: dict[SegmentKey, _Removal] = {}
        self._slots = asyncio.Semaphore(_CONCURRENT_COMPILES)
        self._numbers = itertools.count()

    async def register(self, tenant: Tenant, draft: Draft) -> Entry:
        """Store a document and start its compile unless its KV is there or on its way.

        Raises:
            TooManyDocuments: The tenant has as many as it may.
        """
        entries = self._tenants.setdefault(tenant.name, {})
        new_id = document_id(tenant, draft)
        entry = entries.get(new_id)
        if entry is None:
            token_ids = await self._encode(draft.text)
            if len(entries) >= self._max_documents and new_id not in entries:
                raise TooManyDocuments(
                    f"at most {self._max_documents} documents may be registered; delete some"
                )
            key = segment_key(tenant.name, SegmentContext.FREE, token_ids)
            entry = entries.setdefault(
                new_id,
                Entry(
                    id=new_id,
                    draft=draft,
                    num_tokens=len(token_ids),
                    key=key,
                    created_at=int(time.time()),
                    number=next(self._numbers),
                ),
            )
        entry.draft = draft
        self._start_compile(tenant, entry)
        return entry

    def get(self, tenant: Tenant, entry_id: str) -> Entry:
        """Find one document.

        Raises:
            DocumentNotFound: Unknown, or another tenant's; the two look the same.
        """
        entry = self._tenants.get(tenant.name, {}).get(entry_id)
        if entry is None:
            raise DocumentNotFound(f"no document {entry_id[:64]!r}", param="document_id")
        return entry

    def status(self, entry: Entry) -> RegisteredStatus:
        """Where the document's KV is now."""
        if entry.is_pending:
            return RegisteredStatus.WARMING if entry.is_started else RegisteredStatus.QUEUED
        if self._is_resident(entry.key):
            return RegisteredStatus.READY
        if entry.failure is not None:
            return RegisteredStatus.FAILED
        return RegisteredStatus.EVICTED

    def page(
        self,
        tenant: Tenant,
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
        status: RegisteredStatus | None = None,
    ) -> Page:
        """List a tenant's documents.

        Args:
            tenant: The caller.
            limit: Most entries to return.
            after: Id of the last entry of the page before.
            newest_first: The order of registration, or its reverse.
            status: Only these.

        Raises:
            DocumentNotFound: `after` names no document.
        """
        # Not in the order of the mapping: a document whose deletion fails comes back to its end.
        entries = sorted(
            self._tenants.get(tenant.name, {}).values(),
            key=lambda entry: entry.number,
            reverse=newest_first,
        )
        if after is not None:
            entries = entries[entries.index(self.get(tenant, after)) + 1 :]
        if status is not None:
            entries = [entry for entry in entries if self.status(entry) is status]
        return Page(entries=tuple(entries[:limit]), has_more=len(entries) > limit)

    def warm(self, tenant: Tenant, entry_id: str) -> Entry:
        """Start a document's compile unless its KV is there or on its way.

        Raises:
            DocumentNotFound: Unknown to this tenant.
        """
        entry = self.get(tenant, entry_id)
        self._start_compile(tenant, entry)
        return entry

    async def delete(self, tenant: Tenant, entry_id: str) -> None:
        """Forget a document and remove its KV, unless another document of the tenant shares it.

        Raises:
            DocumentNotFound: Unknown to this tenant.
            EngineUnavailable: The engine died. The document is still there.
            EngineBusy: Its queue is full. The document is still there.
        """
        entry = self.get(tenant, entry_id)
        entries = self._tenants[tenant.name]
        del entries[entry_id]
        if any(other.key == entry.key for other in entries.values()):
            return
        # A document registered meanwhile is compiled once this KV is gone; it may be deleted, too.
        removal = self._removals.setdefault(entry.key, _Removal())
        removal.num_running += 1
        try:
            # The engine ends the compile behind the job, without waiting for those of others.
            await _cancel_job(entry)
            await self._engine.drop([entry.key])
        except Exception:
            # Whatever it was, its KV may still be there, so it must be possible to ask again.
            entries.setdefault(entry_id, entry)
            raise
        finally:
            removal.num_running -= 1
            if removal.num_running == 0:
                del self._removals[entry.key]
                removal.is_over.set()

    async def wait(self, entries: Iterable[Entry], seconds: float) -> None:
        """Wait until the entries' compiles have ended, at most so long."""
        jobs = [entry.job for entry in entries if entry.job is not None and entry.is_pending]
        if jobs and seconds > 0:
            await asyncio.wait(jobs, timeout=seconds)

    def resolver(self, tenant: Tenant) -> Resolver:
        """How a chat request of this tenant finds the texts behind its references."""
        entries = self._tenants.get(tenant.name, {})

        def resolve(entry_id: str) -> Document | None:
            entry = entries.get(entry_id)
            if entry is None:
                return None
            return Document(
                id=entry.draft.label,
                document_id=entry.id,
                title=entry.draft.title,
                text=entry.draft.text,
                metadata=entry.draft.metadata,
            )

        return resolve

    def count_by_status(self) -> Mapping[str, int]:
        """How many documents of all tenants are where."""
        return Counter(str(self.status(entry)) for entry in self._all())

    async def close(self) -> None:
        """Give up what is still waiting or running."""
        jobs = [entry.job for entry in self._all() if entry.job is not None and entry.is_pending]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def _all(self) -> list[Entry]:
        return [entry for entries in self._tenants.values() for entry in entries.values()]

    def _is_resident(self, key: SegmentKey) -> bool:
        return key not in self._removals and self._engine.is_resident(key)

    def _start_compile(self, tenant: Tenant, entry: Entry) -> None:
        if entry.is_pending or self._is_resident(entry.key):
            return
        entry.failure = self._refusal(entry)
        if entry.failure is None:
            entry.is_started = False
            entry.job = asyncio.create_task(self._compile(tenant, entry))

    def _refusal(self, entry: Entry) -> CompileFailure | None:
        """Why a compile would be pointless."""
        if self._engine.unsupported_reason is not None:
            return CompileFailure(code="unsupported_model", message=self._engine.unsupported_reason)
        least = self._engine.min_segment_tokens
        if entry.num_tokens < least:
            return CompileFailure(
                code="too_short",
                message=f"the document has {entry.num_tokens} tokens; KV is kept from {least} on",
            )
        return None

    async def _compile(self, tenant: Tenant, entry: Entry) -> None:
        while (removal := self._removals.get(entry.key)) is not None:
            await removal.is_over.wait()
        async with self._slots:
            entry.is_started = True
            started = time.monotonic()
            token_ids = await self._encode(entry.draft.text)
            try:
                outcome = await self._engine.compile(
                    tenant=tenant.name, context=SegmentContext.FREE, token_ids=token_ids
                )
            except BlendError as error:
                _log.warning("compile of %s failed: %s", entry.id, error)
                entry.failure = CompileFailure(
                    code=shape_of(error).code, message="the engine did not compile it"
                )
                return
            if outcome.ready:
                self._on_compiled(time.monotonic() - started)
            else:
                reason = outcome.reason or "compile_failed"
                entry.failure = CompileFailure(
                    code=reason, message=f"the document's KV was not stored: {reason}"
                )


def document_id(tenant: Tenant, draft: Draft) -> str:
    """Derive a document's id from its tenant, text and title; fields are length-prefixed."""
    digest = hashlib.blake2b(digest_size=16)
    title = b"\x00" if draft.title is None else b"\x01" + draft.title.encode()
    for part in (tenant.name.encode(), draft.text.encode(), title):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"doc_{digest.hexdigest()}"


async def _cancel_job(entry: Entry) -> None:
    if entry.job is None or entry.job.done():
        return
    entry.job.cancel()
    await asyncio.wait([entry.job])
