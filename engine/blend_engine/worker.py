"""The worker role: runs the passes that the scheduler role ordered and keeps this rank's KV.

Every failure is a miss: what cannot be loaded is computed in the same pass, a pass that raises is
run again without stored KV, and the outcome says so. Only a second failure in a row reaches vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from blend_engine.segments import SegmentContext, SegmentKey
from blend_engine.selection import blended_hits, hit_positions, select_hkvd, select_sinks
from blend_engine.self_test import check_model

logger = init_logger(__name__)

_NOTHING = torch.empty(0, dtype=torch.int64)

_CAREFUL_PIECE = 256
"""Tokens of a piece when a pass is repeated: it may have failed for want of memory."""


@dataclass(slots=True)
class _Loaded:
    """What a pass found of its hits.

    Args:
        hits: Those written into the cache.
        checked: What a peek compares with.
        failed: Those to compute instead.
        lost_keys: Segments that no pass can load any more.
    """

    hits: list[Hit] = field(default_factory=list)
    checked: list[CheckedHit] = field(default_factory=list)
    failed: list[Hit] = field(default_factory=list)
    lost_keys: tuple[SegmentKey, ...] = ()


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
            attached = attach(model, self._vllm_config, self._kv_cache_config, self._kv_caches)
            check_model(attached, self._vllm_config, self._kv_cache_config.num_blocks)
            self._attached = attached
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
        loaded = self._load(order, run)
        fresh_T = _fresh_positions(order, loaded.hits)
        try:
            selected_T, peeked = self._select(order, run, loaded, fresh_T)
            positions_T = torch.cat([fresh_T, selected_T]).sort().values
            if len(positions_T):
                run.compute(positions_T)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request is served
            return self._compute_afresh(order, run, loaded, error)
        return self._outcome(order, loaded, len(selected_T), peeked)

    def _compute_afresh(
        self, order: PassOrder, run: ModelPass, loaded: _Loaded, error: Exception
    ) -> PassOutcome:
        """Repeat a pass that raised, with every hit a miss; the stored KV is not at fault."""
        logger.warning("a pass is repeated without stored KV: %s", error, exc_info=error)
        run.compute(_fresh_positions(order, []), max_tokens=_CAREFUL_PIECE)
        return PassOutcome(
            pass_id=order.pass_id,
            failed_segments=tuple(hit.segment_index for hit in order.plan.hits),
            failed_keys=loaded.lost_keys,
        )

    def _compile(self, order: PassOrder, run: ModelPass) -> PassOutcome:
        capture = order.capture
        assert capture is not None
        positions_T = torch.arange(0, order.plan.covered_end)
        error = "out_of_memory"
        try:
            slabs = run.allocate(capture.end - capture.start)
            error = "compile_failed"
            segment = run.compute_and_capture(positions_T, capture.start, slabs)
        except Exception as cause:
            logger.warning("a segment is not stored: %s", cause, exc_info=cause)
            run.compute(positions_T, max_tokens=_CAREFUL_PIECE)
            return PassOutcome(pass_id=order.pass_id, error=error)
        self.pool.put(capture.key, segment)
        return PassOutcome(pass_id=order.pass_id, captured=True)

    def _load(self, order: PassOrder, run: ModelPass) -> _Loaded:
        """Move and write the hits, one at a time; what cannot be loaded is a miss."""
        loaded = _Loaded()
        for hit in order.plan.hits:
            stored = self.pool.get(hit.key)
            if stored is None or not stored.is_intact(hit.segment_tokens):
                logger.warning("stored KV of %d tokens is gone or damaged", hit.segment_tokens)
                loaded.failed.append(hit)
                loaded.lost_keys += (hit.key,)
                continue
            try:
                piece = run.rotate(hit, stored)
                run.write(piece)
            except Exception as error:
                logger.warning("stored KV is not loaded: %s", error, exc_info=error)
                loaded.failed.append(hit)
                continue
            loaded.hits.append(hit)
            if order.policy is Policy.HKVD and hit.context is not SegmentContext.PREFIX:
                loaded.checked.append(piece.at_layer(self._check_layer(order)))
        return loaded

    def _check_layer(self, order: PassOrder) -> int:
        assert self._attached is not None
        return min(order.check_layer, self._attached.num_layers - 1)

    def _select(
        self,
        order: PassOrder,
        run: ModelPass,
        loaded: _Loaded,
        fresh_T: Tensor,
    ) -> tuple[Tensor, int]:
        """The hit tokens to recompute, and the layers that the peek has spent on all of them."""
        hits = loaded.hits
        blended = blended_hits(hits)
        if not blended or order.policy is Policy.NONE or order.recompute_ratio == 0.0:
            return _NOTHING, 0
        if order.policy is Policy.SINKS:
            return select_sinks(hits, order.recompute_ratio), 0
        if order.recompute_ratio == 1.0:
            return hit_positions(blended), 0
        check_layer = self._check_layer(order)
        range_T = torch.cat([fresh_T, hit_positions(blended)]).sort().values
        score_T = run.peek(range_T, loaded.checked, check_layer)
        return select_hkvd(hits, order.recompute_ratio, score_T), check_layer

    def _outcome(
        self, order: PassOrder, loaded: _Loaded, num_selected: int, peeked: int
    ) -> PassOutcome:
        assert self._attached is not None
        hits = loaded.hits
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
            failed_segments=tuple(hit.segment_index for hit in loaded.failed),
            failed_keys=loaded.lost_keys,
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
