"""Keys rotated by vLLM's own embedding to position a, then moved by b - a, are those rotated to b.

Each case is followed by mutations that must break the law, so that it cannot hold by accident.
"""

import pytest
import torch

from blend_kernels import KernelInputError, check_cos_sin, rotate_keys

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

NUM_TOKENS, NUM_HEADS, MAX_POSITION = 1000, 3, 2048
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
# head dim, neox, parameters of the embedding
KINDS = {
    "default": (64, True, {"rope_type": "default", "rope_theta": 10_000.0}),
    "linear": (64, True, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
    "llama3": (128, True, LLAMA3),
    "yarn": (128, True, YARN),
    "partial": (80, True, {"rope_type": "default", "partial_rotary_factor": 0.4}),
    "interleaved": (64, False, {"rope_type": "default", "rope_theta": 10_000.0}),
    "interleaved-partial": (128, False, {"rope_type": "default", "partial_rotary_factor": 0.5}),
    "interleaved-yarn": (64, False, YARN),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def make_rope():
    """Make vLLM's embedding of a kind, in a dtype."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    def make(kind, dtype):
        head_dim, is_neox, parameters = KINDS[kind]
        with set_current_vllm_config(VllmConfig()):
            return get_rope(head_dim, MAX_POSITION, is_neox, parameters, dtype)

    return make


def table_of(rope):
    """The fp32 table of the model's embedding, without a magnitude factor."""
    cos_sin_PR = rope._compute_cos_sin_cache()
    return cos_sin_PR / cos_sin_PR[0, 0]


def rotate_to(rope, k_THD, positions_T):
    flat = k_THD.flatten(1)
    _, rotated = rope.forward_native(positions_T, flat.clone(), flat.clone())
    return rotated.view_as(k_THD)


def moved_pair(rope, dtype):
    """Keys at a, the moves b - a, keys at b; moves of both signs and of zero."""
    k_THD = torch.randn(NUM_TOKENS, NUM_HEADS, rope.head_size).to(dtype)
    old_T = torch.randint(0, MAX_POSITION, (NUM_TOKENS,))
    new_T = torch.randint(0, MAX_POSITION, (NUM_TOKENS,))
    new_T[::7] = old_T[::7]
    return rotate_to(rope, k_THD, old_T), new_T - old_T, rotate_to(rope, k_THD, new_T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_moved_key_is_the_key_at_its_new_position(kind, dtype, make_rope, assert_law):
    rope = make_rope(kind, dtype)
    at_old, deltas_T, at_new = moved_pair(rope, dtype)
    table_PR = table_of(rope)
    check_cos_sin(table_PR)
    assert_law(rotate_keys(at_old, deltas_T, table_PR, is_neox=rope.is_neox_style), at_new)


MUTATIONS = {
    "table shifted by one row": lambda table, deltas: (table.roll(-1, 0), deltas),
    "moves of the wrong sign": lambda table, deltas: (table, -deltas),
    "moves without a sign": lambda table, deltas: (table, deltas.abs()),
    "moves off by one": lambda table, deltas: (table, (deltas + 1).clamp(max=MAX_POSITION - 1)),
    "no move at all": lambda table, deltas: (table, torch.zeros_like(deltas)),
    "cosines and sines swapped": lambda table, deltas: (
        table.roll(table.shape[1] // 2, 1).contiguous(),
        deltas,
    ),
    "magnitude factor applied again": lambda table, deltas: (table * 1.1386, deltas),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_breaks_the_law(kind, mutation, make_rope, assert_law):
    rope = make_rope(kind, torch.float32)
    at_old, deltas_T, at_new = moved_pair(rope, torch.float32)
    table_PR, deltas_T = MUTATIONS[mutation](table_of(rope), deltas_T)
    got = rotate_keys(at_old, deltas_T, table_PR, is_neox=rope.is_neox_style, check_values=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_law(got, at_new)


def test_the_other_pairing_breaks_the_law(kind, make_rope, assert_law):
    rope = make_rope(kind, torch.float32)
    at_old, deltas_T, at_new = moved_pair(rope, torch.float32)
    got = rotate_keys(at_old, deltas_T, table_of(rope), is_neox=not rope.is_neox_style)
    with pytest.raises(AssertionError, match="not close"):
        assert_law(got, at_new)


@pytest.mark.parametrize("scaled", ["linear", "llama3", "yarn"])
def test_an_unscaled_table_breaks_the_law(scaled, make_rope, make_table, assert_law):
    """A table guessed from the base alone, without the model's scaling."""
    rope = make_rope(scaled, torch.float32)
    at_old, deltas_T, at_new = moved_pair(rope, torch.float32)
    guess_PR = make_table(rope.rotary_dim, base=rope.base)
    with pytest.raises(AssertionError, match="not close"):
        assert_law(rotate_keys(at_old, deltas_T, guess_PR, is_neox=True), at_new)


@pytest.mark.parametrize("yarn", ["yarn", "interleaved-yarn"])
def test_yarns_table_is_refused_until_its_factor_is_divided_out(yarn, make_rope):
    rope = make_rope(yarn, torch.float32)
    at_old, deltas_T, _ = moved_pair(rope, torch.float32)
    assert rope.mscale > 1.1
    with pytest.raises(KernelInputError, match="magnitude factor"):
        rotate_keys(at_old, deltas_T, rope.cos_sin_cache, is_neox=rope.is_neox_style)
