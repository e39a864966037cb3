"""The worker role: runs the passes that the scheduler role ordered and keeps this rank's KV.

Every failure of a load is a miss: the tokens are computed in the same pass and the outcome says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger

from blend_engine.attached import AttachedModel, UnsupportedModel, attach
from blend_engine.messages import BlendAck, BlendMetadata, PassOrder, PassOutcome
from blend_engine.model_pass import CheckedHit, ModelPass
from blend_engine.plan import Hit
from blend_engine.pool import SegmentPool
from blend_engine.protocol import Policy
from blend_engine.segments import SegmentContext
from blend_engine.selection import blended_hits, hit_positions, select_hkvd, select_sinks

logger = init_logger(__name__)

_NOTHING = torch.empty(0, dtype=torch.int64)


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
            self._attached = attach(
                model, self._vllm_config, self._kv_cache_config, self._kv_caches
            )
        except UnsupportedModel as error:
            self._unsupported_reason = str(error)
            logger.warning("blending is off, requests are served exactly: %s", error)
        return self._unsupported_reason

    def run(self, metadata: BlendMetadata) -> None:
        """Obey one step's orders."""
        for key in metadata.freed_keys:
            self.pool.free(key)
        for order in metadata.passes:
            self._outcomes.append(self._run_pass(order))

    def take_ack(self) -> BlendAck:
        """What was done since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return BlendAck(
            ready=self._attached is not None,
            unsupported_reason=self._unsupported_reason,
            outcomes=outcomes,
        )

    @torch.inference_mode()
    def _run_pass(self, order: PassOrder) -> PassOutcome:
        assert self._attached is not None, "a pass was ordered before the model was attached"
        run = ModelPass(self._attached, self._vllm_config, order.token_ids, order.block_ids)
        if order.capture is not None:
            return self._compile(order, run)
        hits, checked, failed = self._load(order, run)
        fresh_T = _fresh_positions(order, hits)
        selected_T, peeked = self._select(order, run, hits, checked, fresh_T)
        positions_T = torch.cat([fresh_T, selected_T]).sort().values
        if len(positions_T):
            run.compute(positions_T)
        return self._outcome(order, hits, failed, len(selected_T), peeked)

    def _compile(self, order: PassOrder, run: ModelPass) -> PassOutcome:
        capture = order.capture
        assert capture is not None
        positions_T = torch.arange(0, order.plan.covered_end)
        try:
            slabs = run.allocate(capture.end - capture.start)
        except (MemoryError, RuntimeError) as error:
            logger.warning("a segment is not stored, there is no memory for it: %s", error)
            run.compute(positions_T)
            return PassOutcome(pass_id=order.pass_id, error="out_of_memory")
        segment = run.compute_and_capture(positions_T, capture.start, slabs)
        self.pool.put(capture.key, segment)
        return PassOutcome(pass_id=order.pass_id, captured=True)

    def _load(
        self, order: PassOrder, run: ModelPass
    ) -> tuple[list[Hit], list[CheckedHit], list[Hit]]:
        """Move and write the hits, one at a time; what cannot be loaded is a miss.

        Returns:
            The hits loaded, what HKVD needs of them, and those that failed.
        """
        hits: list[Hit] = []
        checked: list[CheckedHit] = []
        failed: list[Hit] = []
        for hit in order.plan.hits:
            stored = self.pool.get(hit.key)
            if stored is None or stored.num_tokens != hit.segment_tokens:
                failed.append(hit)
                continue
            try:
                piece = run.rotate(hit, stored)
            except (MemoryError, RuntimeError) as error:
                logger.warning("stored KV is computed instead of loaded: %s", error)
                failed.append(hit)
                continue
            run.write(piece)
            hits.append(hit)
            if order.policy is Policy.HKVD and hit.context is not SegmentContext.PREFIX:
                checked.append(piece.at_layer(self._check_layer(order)))
        return hits, checked, failed

    def _check_layer(self, order: PassOrder) -> int:
        assert self._attached is not None
        return min(order.check_layer, self._attached.num_layers - 1)

    def _select(
        self,
        order: PassOrder,
        run: ModelPass,
        hits: list[Hit],
        checked: Sequence[CheckedHit],
        fresh_T: Tensor,
    ) -> tuple[Tensor, int]:
        """The hit tokens to recompute, and the layers that the peek has spent on all of them."""
        blended = blended_hits(hits)
        if not blended or order.policy is Policy.NONE or order.recompute_ratio == 0.0:
            return _NOTHING, 0
        if order.policy is Policy.SINKS:
            return select_sinks(hits, order.recompute_ratio), 0
        if order.recompute_ratio == 1.0:
            return hit_positions(blended), 0
        check_layer = self._check_layer(order)
        range_T = torch.cat([fresh_T, hit_positions(blended)]).sort().values
        score_T = run.peek(range_T, checked, check_layer)
        return select_hkvd(hits, order.recompute_ratio, score_T), check_layer

    def _outcome(
        self, order: PassOrder, hits: list[Hit], failed: list[Hit], num_selected: int, peeked: int
    ) -> PassOutcome:
        assert self._attached is not None
        num_blended = sum(hit.num_tokens for hit in blended_hits(hits))
        num_layers = self._attached.num_layers
        charged = 0.0
        if num_blended:
            charged = (peeked * num_blended + num_layers * num_selected) / (
                num_layers * num_blended
            )
        return PassOutcome(
            pass_id=order.pass_id,
            reused_tokens=num_blended - num_selected,
            recomputed_tokens=num_selected,
            loaded_exact_tokens=sum(hit.num_tokens for hit in hits) - num_blended,
            charged_ratio=charged,
            failed_segments=tuple(hit.segment_index for hit in failed),
            failed_keys=tuple(hit.key for hit in failed),
        )


def _fresh_positions(order: PassOrder, hits: list[Hit]) -> Tensor:
    """Positions of the pass for which no KV exists, sorted."""
    is_fresh = torch.zeros(order.plan.covered_end, dtype=torch.bool)
    is_fresh[order.plan.num_computed :] = True
    for start, end in order.fresh_ranges:
        is_fresh[start:end] = True
    for hit in hits:
        is_fresh[hit.start : hit.end] = False
    return torch.nonzero(is_fresh).flatten()
