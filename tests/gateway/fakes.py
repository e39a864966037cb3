"""Stand-ins for an engine that is slow, dead, full or forgetful on demand.

What the real engine does is tested against the real engine, in `tests/gateway/e2e`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blend_engine.errors import EngineBusy, EngineUnavailable
from blend_engine.ports import CompileOutcome
from blend_engine.protocol import BlendReport, StoreStats
from blend_engine.segments import SegmentContext, SegmentKey, segment_key
from blend_gateway.assembler.documents import Resolver
from blend_gateway.errors import EngineDown
from blend_gateway.outcome import Plan, without_report
from blend_gateway.ports import Completion, EventStream
from blend_gateway.protocol import ChatCall


@dataclass
class FakeEngine:
    """A `BlendEngine` whose compiles end when `gate` is open."""

    unsupported_reason: str | None = None
    min_segment_tokens: int = 4
    failure: str | None = None
    is_dead: bool = False
    is_busy: bool = False
    resident: set[SegmentKey] = field(default_factory=set)
    compiling: set[SegmentKey] = field(default_factory=set)
    dropped: list[SegmentKey] = field(default_factory=list)
    num_compiles: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def compile(
        self, *, tenant: str, context: SegmentContext, token_ids: Sequence[int]
    ) -> CompileOutcome:
        key = segment_key(tenant, context, token_ids)
        self.num_compiles += 1
        await self.gate.wait()
        if self.is_dead:
            raise EngineUnavailable("the engine died")
        self._check_busy()
        if self.failure is None:
            self.resident.add(key)
        return CompileOutcome(key=key, ready=self.failure is None, reason=self.failure)

    def compile_in_background(
        self, *, tenant: str, context: SegmentContext, token_ids: Sequence[int]
    ) -> bool:
        return True

    def is_resident(self, key: SegmentKey) -> bool:
        return key in self.resident

    def is_compiling(self, key: SegmentKey) -> bool:
        return key in self.compiling

    async def drop(self, keys: Sequence[SegmentKey]) -> None:
        self._check_busy()
        self.dropped += keys
        self.resident -= set(keys)

    def _check_busy(self) -> None:
        if self.is_busy:
            raise EngineBusy("the engine's queue is full")

    async def report(self, plan_id: str) -> BlendReport | None:
        return None

    def store_stats(self) -> StoreStats:
        return StoreStats(
            num_segments=len(self.resident),
            num_bytes=0,
            budget_bytes=1,
            num_leases=0,
            num_evictions=0,
            num_load_failures=0,
            loaded_tokens=0,
        )

    @property
    def compile_queue_depth(self) -> int:
        return 0


@dataclass
class FakeBackend:
    """A `ChatBackend` that answers at once, never, or with an error."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    error: Exception | None = None
    is_stuck: bool = False
    calls: list[ChatCall] = field(default_factory=list)
    num_aborted: int = 0
    is_closed: bool = False

    async def chat(self, call: ChatCall, resolve: Resolver) -> Completion | EventStream:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        try:
            if self.is_stuck and not call.payload.get("stream"):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        outcome = without_report(Plan(salt="s"))
        if call.payload.get("stream"):
            return EventStream(events=self._events(), outcome=outcome)
        return Completion(body={"object": "chat.completion", "usage": {}}, outcome=outcome)

    async def _events(self) -> AsyncGenerator[str, None]:
        try:
            yield "data: first\n\n"
            if self.is_stuck:
                await asyncio.Event().wait()
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise

    async def encode_document(self, text: str) -> Sequence[int]:
        return [len(word) for word in text.split()]

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "demo", "object": "model"}]}

    async def check_health(self) -> None:
        if self.engine.is_dead:
            raise EngineDown("the engine died")

    def metrics_exposition(self) -> bytes:
        return b"# vllm\n"

    def close(self) -> None:
        self.is_closed = True
