"""The engine as the gateway sees it. The real one is `blend_engine.async_engine.BlendAsyncLLM`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blend_engine.protocol import BlendReport, StoreStats
from blend_engine.segments import SegmentContext, SegmentKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOutcome:
    """How a compile ended: `ready`, or the reason why not (`store_full`, `too_long`, ...)."""

    key: SegmentKey
    ready: bool
    reason: str | None = None


class BlendEngine(Protocol):
    """Documents in, residency out; generation itself goes through vLLM's `EngineClient`."""

    @property
    def unsupported_reason(self) -> str | None:
        """Why this model is served without blending; None where it is blended."""

    @property
    def min_segment_tokens(self) -> int:
        """Shorter segments are neither compiled nor looked up."""

    async def compile(
        self, *, tenant: str, context: SegmentContext, token_ids: Sequence[int]
    ) -> CompileOutcome:
        """Make a segment's KV unless it is resident, and wait for it; bounded, deduplicated.

        Raises:
            EngineUnavailable: The engine died.
            EngineBusy: Its queue is full.
        """

    def compile_in_background(
        self, *, tenant: str, context: SegmentContext, token_ids: Sequence[int]
    ) -> bool:
        """Queue a compile; False where the queue is full. Already queued or resident: True."""

    def is_resident(self, key: SegmentKey) -> bool:
        """Whether the segment's KV is in the store; a hint that the scheduler may overrule."""

    def is_compiling(self, key: SegmentKey) -> bool:
        """Whether a compile of the segment is queued or running."""

    async def drop(self, keys: Sequence[SegmentKey]) -> None:
        """Remove segments from every tier; returns when leases are gone and the KV is, too.

        Raises:
            EngineUnavailable: The engine died.
            EngineBusy: Its queue is full; the segments may still be there.
        """

    async def report(self, plan_id: str) -> BlendReport | None:
        """The report of a plan, once its first token is there; None where there will be none."""

    def store_stats(self) -> StoreStats:
        """The store as last heard from the engine."""

    @property
    def compile_queue_depth(self) -> int:
        """Compiles waiting or running now."""
