"""AttachedModel: what a worker knows of the model it serves once the engine has loaded it.

Attention layers in order, their cache writers, their RoPE tables, and metadata builders of our own.
Built at start-up; whatever cannot be blended is refused here, with the reason.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from blend_engine.rotary import UnsupportedRotary, find_rotary, rotation_table


class UnsupportedModel(Exception):
    """The model is served without blending, for this reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share attention metadata, and the builder that makes it."""

    names: tuple[str, ...]
    builder: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedModel:
    """A model that can be blended.

    Args:
        model: The model as vLLM loaded it.
        layer_names: Attention layers, first to last.
        layers: The layers by name.
        groups: Metadata groups; together they hold every layer once.
        tables: Distinct RoPE tables.
        table_of_layer: Per layer the index into `tables`.
        is_neox: Whether rotary pairs are halves (neox) or neighbours.
        num_kv_heads: KV heads of this rank.
        head_dims: Head dim of keys and of values.
        kv_dtype: dtype in which keys and values reach the cache.
        block_size: Tokens per block of the attention kernel.
        blocks_per_kv_block: Kernel blocks per block of vLLM's block table.
        device: Where the cache is.
    """

    model: nn.Module
    layer_names: tuple[str, ...]
    layers: Mapping[str, Any]
    groups: tuple[LayerGroup, ...]
    tables: tuple[Tensor, ...]
    table_of_layer: tuple[int, ...]
    is_neox: bool
    num_kv_heads: int
    head_dims: tuple[int, int]
    kv_dtype: torch.dtype
    block_size: int
    blocks_per_kv_block: int
    device: torch.device

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.layer_names)


def attach(
    model: nn.Module, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]
) -> AttachedModel:
    """Describe a loaded model for passes.

    Args:
        model: From the worker's model runner.
        vllm_config: The engine's configuration.
        kv_cache_config: The cache's layout, from the connector's constructor.
        kv_caches: Cache tensors by layer name, from `register_kv_caches`.

    Raises:
        UnsupportedModel: Blending would be wrong or was never shown right for this model.
    """
    _refuse_configuration(vllm_config, kv_cache_config)
    names = sorted(kv_caches, key=_layer_index)
    context = vllm_config.compilation_config.static_forward_context
    layers = {name: context[name] for name in names}
    _refuse_layers(layers)
    first = layers[names[0]]
    device = _cache_tensor(first).device
    try:
        tables, table_of_layer, is_neox = _rotary_tables(model, layers, vllm_config, device)
    except UnsupportedRotary as error:
        raise UnsupportedModel(str(error)) from error
    spec = _spec_of(kv_cache_config, names[0])
    kernel_block_size = _kernel_block_size(first, spec)
    return AttachedModel(
        model=model,
        layer_names=tuple(names),
        layers=layers,
        groups=_groups(layers, vllm_config, kv_cache_config, device),
        tables=tables,
        table_of_layer=table_of_layer,
        is_neox=is_neox,
        num_kv_heads=first.num_kv_heads,
        head_dims=(first.head_size, getattr(first, "head_size_v", first.head_size)),
        kv_dtype=vllm_config.model_config.dtype,
        block_size=kernel_block_size,
        blocks_per_kv_block=spec.block_size // kernel_block_size,
        device=device,
    )


def cache_of(layer: Any) -> Any:
    """The layer's cache tensor as its own update call expects it; vLLM 0.26 keeps it in a list."""
    return layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache


def bytes_per_token(kv_cache_config: Any, dtype_bytes: int) -> int:
    """Host bytes of one stored token over all layers: keys and values in the model's dtype.

    Args:
        kv_cache_config: The cache's layout.
        dtype_bytes: Bytes per element of the model's dtype; an fp8 cache is stored unquantized.
    """
    total = 0
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            spec = _spec_of(kv_cache_config, name)
            head_dim = spec.head_size + getattr(spec, "head_size_v", spec.head_size)
            total += spec.num_kv_heads * head_dim * dtype_bytes
    return total


def _layer_index(name: str) -> tuple[int, str]:
    numbers = re.findall(r"\d+", name)
    return (int(numbers[0]) if numbers else 0, name)


def _cache_tensor(layer: Any) -> Tensor:
    cache = cache_of(layer)
    assert isinstance(cache, Tensor)
    return cache


def _refuse_configuration(vllm_config: Any, kv_cache_config: Any) -> None:
    model_config = vllm_config.model_config
    parallel = vllm_config.parallel_config
    refusals = (
        (vllm_config.lora_config is not None, "LoRA: a pass would inherit the batch's adapter"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallel is not verified yet"),
        (parallel.tensor_parallel_size > 1, "tensor parallel is not verified yet"),
        (parallel.data_parallel_size > 1, "data parallel is not verified yet"),
        (vllm_config.speculative_config is not None, "speculative decoding is not verified yet"),
        (getattr(model_config, "use_mla", False), "MLA keeps latents, not keys and values"),
        (getattr(model_config, "is_encoder_decoder", False), "encoder-decoder"),
        (getattr(model_config, "is_multimodal_model", False), "multimodal positions"),
        (getattr(model_config, "is_hybrid", False), "hybrid model with recurrent state"),
        (getattr(model_config, "is_attention_free", False), "no attention"),
        (len(kv_cache_config.kv_cache_groups) != 1, "more than one KV cache group"),
    )
    for is_refused, reason in refusals:
        if is_refused:
            raise UnsupportedModel(reason)


def _refuse_layers(layers: Mapping[str, Any]) -> None:
    if not layers:
        raise UnsupportedModel("no attention layers with a KV cache")
    shapes = set()
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if impl is None or not hasattr(impl, "do_kv_cache_update"):
            raise UnsupportedModel(f"the backend of {name!r} has no do_kv_cache_update")
        if getattr(impl, "alibi_slopes", None) is not None:
            raise UnsupportedModel("ALiBi: distances cannot be moved in the keys")
        if getattr(impl, "kv_sharing_target_layer_name", None) is not None:
            raise UnsupportedModel("layers share KV")
        shapes.add((layer.num_kv_heads, layer.head_size))
    if len(shapes) != 1:
        raise UnsupportedModel("layers differ in KV heads or head size")


def _rotary_tables(
    model: nn.Module, layers: Mapping[str, Any], vllm_config: Any, device: torch.device
) -> tuple[tuple[Tensor, ...], tuple[int, ...], bool]:
    paths = {id(module): path for path, module in model.named_modules()}
    max_distance = vllm_config.model_config.max_model_len
    tables: list[Tensor] = []
    index_of: dict[int, int] = {}
    table_of_layer: list[int] = []
    styles: set[bool] = set()
    for name, layer in layers.items():
        path = paths.get(id(layer))
        if path is None:
            raise UnsupportedModel(f"attention layer {name!r} is not part of the model")
        rotary = find_rotary(model, path)
        if id(rotary) not in index_of:
            index_of[id(rotary)] = len(tables)
            tables.append(rotation_table(rotary, max_distance).to(device))
            styles.add(bool(getattr(rotary, "is_neox_style", True)))
        table_of_layer.append(index_of[id(rotary)])
    if len(styles) != 1:
        raise UnsupportedModel("layers differ in rotary style")
    return tuple(tables), tuple(table_of_layer), styles.pop()


def _spec_of(kv_cache_config: Any, layer_name: str) -> Any:
    for group in kv_cache_config.kv_cache_groups:
        if layer_name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[layer_name]
            # A windowed cache gives null blocks to positions below the window; a pass needs them
            # all.
            if not isinstance(spec, FullAttentionSpec):
                raise UnsupportedModel(f"KV cache kind {type(spec).__name__}")
            return spec
    raise UnsupportedModel(f"layer {layer_name!r} has no KV cache group")


def _kernel_block_size(layer: Any, spec: Any) -> int:
    from vllm.v1.worker.utils import select_common_block_size

    return int(select_common_block_size(spec.block_size, [layer.get_attn_backend()]))


def _groups(
    layers: Mapping[str, Any], vllm_config: Any, kv_cache_config: Any, device: torch.device
) -> tuple[LayerGroup, ...]:
    """One builder per attention window: metadata may be laid out by it."""
    by_window: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        by_window.setdefault(getattr(layer.impl, "sliding_window", None), []).append(name)
    groups = []
    for names in by_window.values():
        spec = _spec_of(kv_cache_config, names[0])
        builder_class = layers[names[0]].get_attn_backend().get_builder_cls()
        builder = builder_class(spec, names, vllm_config, device)
        # FlashAttention's ahead-of-time schedule is sized by `max_num_seqs`; a pass has more rows.
        builder.aot_schedule = False
        groups.append(LayerGroup(names=tuple(names), builder=builder))
    return tuple(groups)
