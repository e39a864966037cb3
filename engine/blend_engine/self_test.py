"""The start-up self-test: small passes on the loaded model, held to the model's own forward.

What the model's structure promises is checked here by running it: whether our batches of scattered
positions see what a plain prefill sees, whether the cache's writer and reader agree, and whether
moved keys are those that the model computes where they are moved to. The cache is still empty, so
its first blocks are free to use.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blend_engine.attached import AttachedModel, UnsupportedModel
from blend_engine.model_pass import ModelPass, finish
from blend_engine.plan import Hit
from blend_engine.pool import StoredSegment
from blend_engine.segments import SegmentContext, segment_key

_NUM_TOKENS = 96
_MOVE = 17
"""Odd, so that no period of a rotation hides a wrong one."""

_FULL_PRECISION_ERROR = 1e-3
_HALF_PRECISION_ERROR = 5e-2
"""Relative, in the Euclidean norm. A wrong mask or rotation is off by a tenth and more."""


@torch.inference_mode()
def check_model(attached: AttachedModel, vllm_config: Any, num_blocks: int) -> None:
    """Run the test.

    Args:
        attached: The model, its cache not in use yet.
        vllm_config: The engine's configuration.
        num_blocks: Blocks of vLLM's cache, the null block included.

    Raises:
        UnsupportedModel: Something differs, or there is no room to look.
    """
    block_size = vllm_config.cache_config.block_size
    num_tokens = min(
        _NUM_TOKENS,
        (num_blocks - 1) * block_size,
        vllm_config.model_config.max_model_len,
        vllm_config.scheduler_config.max_num_batched_tokens,
    )
    if num_tokens <= 2 * _MOVE:
        raise UnsupportedModel("self-test: the cache or a step is too small to test blending in")
    blocks = tuple(range(1, 1 + math.ceil(num_tokens / block_size)))
    vocabulary = vllm_config.model_config.get_vocab_size()

    def run(ids: Any) -> ModelPass:
        return ModelPass(attached, vllm_config, np.asarray(ids, dtype=np.int32), blocks)

    ids = np.arange(num_tokens) * 7919 % vocabulary
    tolerance = _FULL_PRECISION_ERROR
    if attached.kv_dtype != torch.float32 or "fp8" in vllm_config.cache_config.cache_dtype:
        tolerance = _HALF_PRECISION_ERROR
    try:
        own = _capture(run(ids), num_tokens)
        hidden_TD = run(ids).forward(torch.arange(num_tokens))
        _check_loaded(run, ids, own, hidden_TD, tolerance)
        _check_moved(run(np.full_like(ids, ids[1])), num_tokens, tolerance)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"self-test: a pass failed: {error}") from error


def _capture(model_pass: ModelPass, num_tokens: int) -> StoredSegment:
    slabs = model_pass.allocate(num_tokens)
    return finish(model_pass.compute_and_capture(torch.arange(num_tokens), 0, slabs))


def _check_loaded(
    run: Any, ids: Any, own: StoredSegment, hidden_TD: Tensor, tolerance: float
) -> None:
    """Foreign KV in the cache, ours written over it, some tokens computed: all as in a prefill."""
    positions_T = torch.arange(len(ids))
    run(ids[::-1]).forward(positions_T)
    model_pass: ModelPass = run(ids)
    model_pass.load(_whole(own, start=0), own, check_layer=None)
    # Runs of one, of two, and the last token, which sees all the others.
    some_T = positions_T[
        (positions_T % 5 == 1) | (positions_T % 7 == 3) | (positions_T == len(ids) - 1)
    ]
    error = _relative_error(model_pass.forward(some_T), hidden_TD[some_T])
    if error > tolerance:
        raise UnsupportedModel(
            f"self-test: a pass over stored KV is off by {error:.2g} from the model's own forward"
        )


def _check_moved(model_pass: ModelPass, num_tokens: int, tolerance: float) -> None:
    """In a prompt of one repeated token, every layer's keys differ by their place alone.

    All tokens attend to equal values, so their hidden states are equal, too. A key moved to a later
    place must be the key computed there. That also finds layers which hold a rotary module and do
    not apply it.
    """
    computed = _capture(model_pass, num_tokens)
    moved_LTHD, _ = model_pass.rotate(_whole(computed, start=_MOVE), computed)
    kept = moved_LTHD[:, :-_MOVE]
    for index, (found, expected) in enumerate(zip(kept, computed.k_LTHD[:, _MOVE:], strict=True)):
        error = _relative_error(found, expected.to(found.device))
        if error > tolerance:
            raise UnsupportedModel(
                f"self-test: moved keys of layer {index} are off by {error:.2g} from computed ones"
            )


def _whole(segment: StoredSegment, *, start: int) -> Hit:
    return Hit(
        start=start,
        end=start + segment.num_tokens,
        offset=0,
        segment_tokens=segment.num_tokens,
        key=segment_key("self-test", SegmentContext.PREFIX, [start]),
        context=SegmentContext.PREFIX,
        segment_index=0,
    )


def _relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    error = float((found - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf
