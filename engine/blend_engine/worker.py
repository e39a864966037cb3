"""The worker role: runs the passes that the scheduler role ordered and keeps this rank's KV."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from vllm.logger import init_logger

from blend_engine.attached import AttachedModel, UnsupportedModel, attach
from blend_engine.messages import (
    CANCELLED,
    BlendAck,
    BlendMetadata,
    Cancellation,
    PassOrder,
    PassOutcome,
)
from blend_engine.pass_run import PassRun
from blend_engine.pool import SegmentPool
from blend_engine.self_test import check_model

logger = init_logger(__name__)


class BlendWorker:
    """One rank's passes and segments.

    Args:
        vllm_config: The engine's configuration.
        kv_cache_config: The cache's layout.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._kv_caches: Mapping[str, Any] = {}
        self._attached: AttachedModel | None = None
        self._unsupported_reason: str | None = None
        self._outcomes: list[PassOutcome] = []
        self._sliced: dict[int, PassRun] = {}
        self._received: set[str] = set()
        self.pool = SegmentPool()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The paged cache, by layer name."""
        self._kv_caches = kv_caches

    def attach_model(self, model: nn.Module) -> str | None:
        """Take the loaded model.

        Returns:
            None, or why this model is not blended.
        """
        try:
            attached = attach(model, self._vllm_config, self._kv_cache_config, self._kv_caches)
            check_model(attached, self._vllm_config, self._kv_cache_config.num_blocks)
            self._attached = attached
        except UnsupportedModel as error:
            self._unsupported_reason = str(error)
            logger.warning("blending is off, requests are served exactly: %s", error)
        return self._unsupported_reason

    def run(self, metadata: BlendMetadata) -> None:
        """Obey one step's orders."""
        for cancellation in metadata.cancelled:
            self._cancel(cancellation)
        for key in metadata.freed_keys:
            self.pool.free(key)
        for order in metadata.passes:
            self._outcomes.append(self._start(order).finish())
        self._advance_slices(metadata)

    def take_ack(self) -> BlendAck:
        """What was done since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return BlendAck(
            ready=self._attached is not None,
            unsupported_reason=self._unsupported_reason,
            outcomes=outcomes,
        )

    def take_received(self) -> set[str]:
        """Requests whose asynchronous pass has ended since the last call, cancelled ones too."""
        received, self._received = self._received, set()
        return received

    def _start(self, order: PassOrder) -> PassRun:
        assert self._attached is not None, "a pass was ordered before the model was attached"
        return PassRun(order, self._attached, self._vllm_config, self.pool)

    def _advance_slices(self, metadata: BlendMetadata) -> None:
        left = metadata.slice_tokens
        for turn in metadata.slices:
            if turn.order is not None:
                self._sliced[turn.pass_id] = self._start(turn.order)
            # Where the scheduler runs ahead of the workers, it still names passes that have ended.
            run = self._sliced.get(turn.pass_id)
            # Whole pieces only; the first pass of a step always has room for one.
            while run is not None and left >= run.piece_tokens:
                done = run.advance()
                if isinstance(done, PassOutcome):
                    self._end(turn.pass_id, turn.request_id, done)
                    run = None
                else:
                    left -= done

    def _cancel(self, cancellation: Cancellation) -> None:
        pass_id = cancellation.pass_id
        if pass_id in self._sliced or not cancellation.is_started:
            outcome = PassOutcome(pass_id=pass_id, error=CANCELLED)
            self._end(pass_id, cancellation.request_id, outcome)

    def _end(self, pass_id: int, request_id: str, outcome: PassOutcome) -> None:
        self._sliced.pop(pass_id, None)
        self._outcomes.append(outcome)
        self._received.add(request_id)
