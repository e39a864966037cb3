"""One pass on one worker, from its order to its outcome; it can pause after every model call.

Every failure is a miss: what cannot be loaded is computed in the same pass, a pass that raises is
run again without stored KV, and the outcome says so. Only a second failure in a row reaches vLLM.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from blend_engine.attached import AttachedModel
from blend_engine.messages import Capture, PassOrder, PassOutcome
from blend_engine.model_pass import CheckedHit, ModelPass, Work, finish
from blend_engine.plan import Hit
from blend_engine.pool import SegmentPool
from blend_engine.protocol import Policy
from blend_engine.segments import SegmentKey
from blend_engine.selection import blended_hits, hit_positions, select_hkvd, select_sinks

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


class PassRun:
    """Obeys one order.

    Args:
        order: What to do.
        attached: The model.
        vllm_config: The engine's configuration.
        pool: Where hits are read and captures kept.
    """

    def __init__(
        self, order: PassOrder, attached: AttachedModel, vllm_config: Any, pool: SegmentPool
    ) -> None:
        self._order = order
        self._attached = attached
        self._pool = pool
        self._pass = ModelPass(
            attached, vllm_config, order.token_ids, order.block_ids, order.piece_tokens
        )
        self._work = self._blend() if order.capture is None else self._compile(order.capture)

    @property
    def pass_id(self) -> int:
        """The order's."""
        return self._order.pass_id

    @property
    def piece_tokens(self) -> int:
        """What one call costs at most, where the order says so."""
        return self._order.piece_tokens or 1

    @torch.inference_mode()
    def advance(self) -> int | PassOutcome:
        """Go on to the end of the next model call.

        Returns:
            The fresh tokens that it cost; the outcome where nothing is left to do.
        """
        try:
            return next(self._work)
        except StopIteration as end:
            outcome: PassOutcome = end.value
            return outcome

    @torch.inference_mode()
    def finish(self) -> PassOutcome:
        """Go on to the end."""
        return finish(self._work)

    def _blend(self) -> Work[PassOutcome]:
        loaded = self._load()
        fresh_T = _fresh_positions(self._order, loaded.hits)
        try:
            selected_T, peeked = yield from self._select(loaded, fresh_T)
            positions_T = torch.cat([fresh_T, selected_T]).sort().values
            if len(positions_T):
                yield from self._pass.compute(positions_T)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request is served
            return (yield from self._compute_afresh(loaded, error))
        return self._outcome(loaded, len(selected_T), peeked)

    def _compute_afresh(self, loaded: _Loaded, error: Exception) -> Work[PassOutcome]:
        """Repeat a pass that raised, with every hit a miss; the stored KV is not at fault."""
        logger.warning("a pass is repeated without stored KV: %s", error, exc_info=error)
        positions_T = _fresh_positions(self._order, [])
        yield from self._pass.compute(positions_T, max_tokens=_CAREFUL_PIECE)
        return PassOutcome(
            pass_id=self.pass_id,
            failed_segments=tuple(hit.segment_index for hit in self._order.plan.hits),
            failed_keys=loaded.lost_keys,
        )

    def _compile(self, capture: Capture) -> Work[PassOutcome]:
        positions_T = torch.arange(0, self._order.plan.covered_end)
        error = "out_of_memory"
        try:
            slabs = self._pass.allocate(capture.end - capture.start)
            error = "compile_failed"
            segment = yield from self._pass.compute_and_capture(positions_T, capture.start, slabs)
        except Exception as cause:
            logger.warning("a segment is not stored: %s", cause, exc_info=cause)
            yield from self._pass.compute(positions_T, max_tokens=_CAREFUL_PIECE)
            return PassOutcome(pass_id=self.pass_id, error=error)
        self._pool.put(capture.key, segment)
        return PassOutcome(pass_id=self.pass_id, captured=True)

    def _load(self) -> _Loaded:
        """Move and write the hits, one at a time; what cannot be loaded is a miss."""
        order, loaded = self._order, _Loaded()
        for hit in order.plan.hits:
            stored = self._pool.get(hit.key)
            if stored is None or not stored.is_intact(hit.segment_tokens):
                logger.warning("stored KV of %d tokens is gone or damaged", hit.segment_tokens)
                loaded.failed.append(hit)
                loaded.lost_keys += (hit.key,)
                continue
            try:
                checked = self._pass.load(hit, stored, self._peeked_layer(hit))
            except Exception as error:
                logger.warning("stored KV is not loaded: %s", error, exc_info=error)
                loaded.failed.append(hit)
                continue
            loaded.hits.append(hit)
            if checked is not None:
                loaded.checked.append(checked)
        return loaded

    def _peeked_layer(self, hit: Hit) -> int | None:
        """The layer at which a peek will look at this hit, if one will."""
        looks = self._order.policy is Policy.HKVD and hit.is_blended
        return self._check_layer if looks else None

    @property
    def _check_layer(self) -> int:
        return min(self._order.check_layer, self._attached.num_layers - 1)

    def _select(self, loaded: _Loaded, fresh_T: Tensor) -> Work[tuple[Tensor, int]]:
        """The hit tokens to recompute, and the layers that the peek has spent on all of them."""
        order, hits = self._order, loaded.hits
        blended = blended_hits(hits)
        if not blended or order.policy is Policy.NONE or order.recompute_ratio == 0.0:
            return _NOTHING, 0
        if order.policy is Policy.SINKS:
            return select_sinks(hits, order.recompute_ratio), 0
        if order.recompute_ratio == 1.0:
            return hit_positions(blended), 0
        range_T = torch.cat([fresh_T, hit_positions(blended)]).sort().values
        score_T = yield from self._pass.peek(range_T, loaded.checked, self._check_layer)
        return select_hkvd(hits, order.recompute_ratio, score_T), self._check_layer

    def _outcome(self, loaded: _Loaded, num_selected: int, peeked: int) -> PassOutcome:
        hits = loaded.hits
        num_blended = sum(hit.num_tokens for hit in blended_hits(hits))
        num_layers = self._attached.num_layers
        charged = 0.0
        if num_blended:
            charged = (peeked * num_blended + num_layers * num_selected) / (
                num_layers * num_blended
            )
        return PassOutcome(
            pass_id=self.pass_id,
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
