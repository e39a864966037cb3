"""RoPE tables as an engine takes them from a model: scaled, partial, per layer, or refused."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from blend_engine.attached import _rotary_tables
from blend_engine.model_pass import ModelPass
from blend_engine.rotary import UnsupportedRotary, rotation_table
from blend_kernels import rotate_keys

pytestmark = pytest.mark.vllm

NUM_POSITIONS = 256
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    **PLAIN,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "plain": PLAIN,
    "linear": {**PLAIN, "rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "partial": {**PLAIN, "partial_rotary_factor": 0.5},
}


def rope_of(parameters: dict[str, object]) -> nn.Module:
    with set_current_vllm_config(VllmConfig()):
        return get_rope(64, NUM_POSITIONS, True, parameters, torch.float32)


def keys_at(rope: nn.Module, k_THD: Tensor, position: int) -> Tensor:
    """What the model's own embedding makes of keys that all stand at one position."""
    flat = k_THD.flatten(1)
    positions = torch.full((len(flat),), position)
    return rope.forward_native(positions, flat.clone(), flat.clone())[1].view_as(k_THD)


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_own_table_moves_its_keys(kind: str) -> None:
    """With its scaling, its part of the head, and its magnitude factor once and not twice."""
    rope, k_THD = rope_of(KINDS[kind]), torch.randn(8, 2, 64)
    table_PR = rotation_table(rope, NUM_POSITIONS)
    deltas_T = torch.full((8,), 200)
    moved = rotate_keys(keys_at(rope, k_THD, 3), deltas_T, table_PR, is_neox=True)
    torch.testing.assert_close(moved, keys_at(rope, k_THD, 203), atol=2e-3, rtol=0)


def test_every_layer_is_moved_by_its_own_table() -> None:
    """Layers may differ in the base of their angles, and share a table where they do not."""
    ropes = [rope_of({**PLAIN, "rope_theta": base}) for base in (1e4, 1e6, 1e4)]
    model = nn.ModuleDict()
    for index, rope in enumerate(ropes):
        model[f"block{index}"] = nn.ModuleDict({"attn": nn.Identity()})
        model[f"block{index}"].rotary_emb = rope
    layers = {f"block{index}.attn": model[f"block{index}"]["attn"] for index in range(len(ropes))}
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=NUM_POSITIONS))
    tables, table_of_layer, is_neox = _rotary_tables(model, layers, config, torch.device("cpu"))
    assert (len(tables), table_of_layer) == (2, (0, 1, 0))
    run = ModelPass.__new__(ModelPass)
    run._attached = SimpleNamespace(tables=tables, table_of_layer=table_of_layer, is_neox=is_neox)
    k_THD = torch.randn(8, 2, 64)
    stored = torch.stack([keys_at(rope, k_THD, 3) for rope in ropes])
    wanted = torch.stack([keys_at(rope, k_THD, 203) for rope in ropes])
    moved = run._rotate_layers(stored, 200)
    torch.testing.assert_close(moved, wanted, atol=2e-3, rtol=0)
    moved = run._rotate_layers(stored[1:], 200, first_layer=1)
    torch.testing.assert_close(moved, wanted[1:], atol=2e-3, rtol=0)


def test_positions_of_several_axes_are_refused() -> None:
    """A key that stands at a place in an image cannot be moved by one distance."""
    parameters = {**PLAIN, "mrope_section": [8, 12, 12]}
    with pytest.raises(UnsupportedRotary, match="not a rotation by one position"):
        rotation_table(rope_of(parameters), NUM_POSITIONS)


class Handmade(nn.Module):
    """A rotary module whose table is what it is told to be."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.cos_sin_cache = self._compute_cos_sin_cache()

    def _compute_cos_sin_cache(self) -> Tensor:
        angle_PF = torch.arange(NUM_POSITIONS).float()[:, None] * 0.5 ** torch.arange(8).float()
        return torch.cat([angle_PF.cos(), angle_PF.sin()], dim=-1).to(self.dtype)


def test_a_table_is_computed_where_the_models_own_is() -> None:
    """Not where new tensors happen to be made just now."""
    rotary = Handmade(torch.float32)
    with torch.device("meta"):
        table_PR = rotation_table(rotary, NUM_POSITIONS)
    assert torch.equal(table_PR, rotary.cos_sin_cache)


def test_an_imprecise_table_is_refused_with_the_reason() -> None:
    """Rounded to half precision it still composes, but moved keys would change their length."""
    with pytest.raises(UnsupportedRotary, match=r"Handmade.*within .* of 1 everywhere"):
        rotation_table(Handmade(torch.float16), NUM_POSITIONS)


@pytest.mark.gpu
def test_on_a_gpu_the_table_is_the_models_own() -> None:
    """To the last bit: a CPU's powers, cosines and sines may round otherwise."""
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        rope = get_rope(128, 32 * NUM_POSITIONS, True, PLAIN, torch.float32)
    assert rope.cos_sin_cache.is_cuda
    table_PR = rotation_table(rope, 32 * NUM_POSITIONS)
    assert torch.equal(table_PR, rope.cos_sin_cache.cpu())
