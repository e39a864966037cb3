"""Stored keys, moved the way a pass moves them, against keys that were computed there."""

from typing import Any

import torch
from tests.models.engine import Served
from torch import Tensor

from blend_engine.model_pass import ModelPass
from blend_engine.plan import Hit
from blend_engine.segments import SegmentContext, segment_key

_TOKENS = 96
_DISTANCE = 40


def moved_key_error(served: Served) -> float:
    """Largest error, over layers, of keys that were moved by one distance.

    A prompt of one repeated token has the same values everywhere, so attention returns the same at
    every position, and so do all layers: their keys differ by their positions alone.
    """
    driver = served.driver
    ids = served.ids(4, 1) * _TOKENS
    driver.compile_ids(SegmentContext.PREFIX, ids)
    stored = driver.stored(SegmentContext.PREFIX, ids)
    moved = placed(served, stored, _DISTANCE)[:, : _TOKENS - _DISTANCE].cpu()
    errors_LTHD = (moved - stored.k_LTHD[:, _DISTANCE:]).abs()
    return float(errors_LTHD.max())


def placed(served: Served, stored: Any, start: int) -> Tensor:
    """A whole segment's keys, moved the way a pass moves them."""
    worker = served.driver.worker
    assert worker._attached is not None
    token_ids = torch.zeros(0, dtype=torch.int32).numpy()
    hit = Hit(
        segment_index=0,
        key=segment_key("tests", SegmentContext.FREE, []),
        context=SegmentContext.FREE,
        start=start,
        end=start + stored.num_tokens,
        offset=0,
        segment_tokens=stored.num_tokens,
    )
    run = ModelPass(worker._attached, worker._vllm_config, token_ids, (0,))
    k_LTHD, _ = run.rotate(hit, stored)
    return k_LTHD
