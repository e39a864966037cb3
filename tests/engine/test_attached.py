"""What the engine refuses by its cache before any request comes."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from blend_engine.attached import UnsupportedModel, bytes_per_token

pytestmark = pytest.mark.vllm
SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def _cache(spec: object) -> SimpleNamespace:
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[group])


def test_a_token_is_its_keys_and_values_in_every_layer() -> None:
    """Two layers, two heads, 64 keys and 64 values, four bytes each."""
    assert bytes_per_token(_cache(FullAttentionSpec(**SHAPE)), 4) == 2 * 2 * (64 + 64) * 4


def test_a_windowed_cache_is_refused() -> None:
    """vLLM gives null blocks to positions below the window, which a pass would read and write."""
    with pytest.raises(UnsupportedModel, match="SlidingWindowSpec"):
        bytes_per_token(_cache(SlidingWindowSpec(**SHAPE, sliding_window=128)), 4)
