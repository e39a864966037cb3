"""What the engine refuses by its configuration and its cache before any request comes."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from blend_engine.attached import UnsupportedModel, attach, bytes_per_token

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


def _config(**changes: object) -> SimpleNamespace:
    """A configuration that nothing is wrong with, but for the changes."""
    parallel = dict.fromkeys(
        ("pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"), 1
    )
    names = ("use_mla", "is_encoder_decoder", "is_multimodal_model", "is_hybrid")
    model = dict.fromkeys(names, False)
    rest: dict[str, object] = {"lora_config": None, "speculative_config": None}
    for given in (parallel, model, rest):
        given.update((name, changes[name]) for name in given.keys() & changes.keys())
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model),
        compilation_config=SimpleNamespace(static_forward_context={}),
        **rest,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor parallel"),
        ({"pipeline_parallel_size": 2}, "pipeline parallel"),
        ({"data_parallel_size": 2}, "data parallel"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"use_mla": True}, "MLA"),
        ({"is_multimodal_model": True}, "multimodal"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_hybrid": True}, "recurrent"),
        ({}, "no attention layers"),
    ],
)
def test_what_was_never_shown_right_is_refused(change: dict[str, object], reason: str) -> None:
    """By what the model and the engine are, before anything is built for passes."""
    cache = _cache(FullAttentionSpec(**SHAPE))
    with pytest.raises(UnsupportedModel, match=reason):
        attach(torch.nn.Module(), _config(**change), cache, {})


def test_caches_of_several_layouts_are_refused() -> None:
    """One block table would not say where a token is in all layers."""
    group = _cache(FullAttentionSpec(**SHAPE)).kv_cache_groups
    cache = SimpleNamespace(kv_cache_groups=group * 2)
    with pytest.raises(UnsupportedModel, match="more than one KV cache group"):
        attach(torch.nn.Module(), _config(), cache, {})
