"""What the two connector roles say to each other within a step.

Scheduler to workers: `BlendMetadata`, pickled with vLLM's scheduler output. Workers to scheduler:
`BlendAck`, one per worker and step, aggregated over ranks.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from blend_engine.plan import Plan
from blend_engine.protocol import Policy
from blend_engine.segments import SegmentKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Keep the KV of prompt range ``[start, end)`` under `key`."""

    key: SegmentKey
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOrder:
    """One pass of one request.

    Args:
        pass_id: Unique within the engine; the acknowledgement names it.
        token_ids: Prompt ids of ``[0, plan.covered_end)``, int32.
        block_ids: The request's blocks, enough for the covered range.
        plan: What is loaded and what is computed.
        fresh_ranges: Parts of ``[0, plan.num_computed)`` that this step's forward will write only
            after the pass, so that the pass has to compute them itself (same-step hazard).
        policy: Which hit tokens are recomputed.
        recompute_ratio: In [0, 1].
        check_layer: Layer whose deviation HKVD ranks by.
        capture: Set for a compile.
        piece_tokens: Tokens of one call of the model at most; None where only vLLM's own limit on
            a step counts.
    """

    pass_id: int
    token_ids: NDArray[np.int32]
    block_ids: tuple[int, ...]
    plan: Plan
    fresh_ranges: tuple[tuple[int, int], ...] = ()
    policy: Policy = Policy.NONE
    recompute_ratio: float = 0.0
    check_layer: int = 1
    capture: Capture | None = None
    piece_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSlice:
    """A step's turn of a pass that is spread over steps.

    Args:
        pass_id: The pass.
        request_id: Whom vLLM wakes when it is done.
        order: What to do, with the first slice.
    """

    pass_id: int
    request_id: str
    order: PassOrder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    """Stop a pass that is spread over steps; its blocks are free for others once it is said so.

    Args:
        pass_id: The pass.
        request_id: Whose blocks it writes.
        is_started: Whether a slice was ever ordered. One that was and is unknown has just ended.
    """

    pass_id: int
    request_id: str
    is_started: bool


@dataclass
class BlendMetadata(KVConnectorMetadata):
    """One step's orders, in this order: cancel, free, run the passes, advance the slices.

    Args:
        passes: To be complete before the step's forward.
        freed_keys: Segments to forget.
        slices: Passes that go on, as far as `slice_tokens` reach.
        slice_tokens: Fresh tokens that slices compute together in this step.
        cancelled: Passes to stop.
    """

    passes: list[PassOrder] = field(default_factory=list)
    freed_keys: list[SegmentKey] = field(default_factory=list)
    slices: list[PassSlice] = field(default_factory=list)
    slice_tokens: int = 0
    cancelled: list[Cancellation] = field(default_factory=list)


CANCELLED = "cancelled"
"""Error of a pass whose request ended before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutcome:
    """What a pass did.

    Args:
        reused_tokens: Blended hit tokens used as stored.
        recomputed_tokens: Blended hit tokens recomputed.
        loaded_exact_tokens: `prefix` hit tokens loaded.
        charged_ratio: Fresh token-layers spent on hit tokens over layers x hit tokens.
        failed_segments: Indices of hits that were computed after all.
        failed_keys: Segments that are gone or damaged; the others can be loaded another time.
        captured: Whether the capture, if one was ordered, is stored.
        error: Why a capture failed, or `CANCELLED`.
    """

    pass_id: int
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    loaded_exact_tokens: int = 0
    charged_ratio: float = 0.0
    failed_segments: tuple[int, ...] = ()
    failed_keys: tuple[SegmentKey, ...] = ()
    captured: bool = False
    error: str | None = None


@dataclass
class BlendAck(KVConnectorWorkerMetadata):
    """What one worker did in a step.

    Args:
        ready: Whether the worker holds the model and can run passes.
        unsupported_reason: Why it never will.
        outcomes: One per pass it ran.
    """

    ready: bool
    unsupported_reason: str | None = None
    outcomes: list[PassOutcome] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "BlendAck":
        """Merge another rank's: a step is done when all are, and fails when one does."""
        assert isinstance(other, BlendAck)
        theirs = {outcome.pass_id: outcome for outcome in other.outcomes}
        return BlendAck(
            ready=self.ready and other.ready,
            unsupported_reason=self.unsupported_reason or other.unsupported_reason,
            outcomes=[_worse(outcome, theirs[outcome.pass_id]) for outcome in self.outcomes],
        )


def _worse(one: PassOutcome, other: PassOutcome) -> PassOutcome:
    return max(one, other, key=lambda outcome: (outcome.error is not None, outcome.failed_segments))
