"""Per-layer RoPE tables, taken from the model's own rotary modules and checked before use.

A table is fp32, one row per distance, cosines then sines. It is normalised so that row 0 is the
identity: YaRN scales both by a magnitude factor that the stored keys already carry.
"""

import torch
from torch import Tensor, nn

from blend_kernels import KernelInputError, check_cos_sin

_TOLERANCE_FP32 = 2e-3
"""Angle sums at far distances: an fp32 product of position and frequency at 32k rounds by 2e-3."""

_TRANSFORMERS_HALVES = frozenset({"GPTNeoXRotaryEmbedding", "Olmo2RotaryEmbedding"})
"""Modules of vLLM's Transformers backend whose pairs are halves, as tests/models shows. A module of
that library does not say how its table is applied, so no other is taken."""


class UnsupportedRotary(Exception):
    """The model's positions cannot be moved; blending is refused with this reason."""


def find_rotary(model: nn.Module, attention_path: str) -> nn.Module:
    """The rotary module that serves an attention layer: the nearest `rotary_emb` above it.

    Args:
        model: The loaded model.
        attention_path: Name of the attention layer within `model`.

    Raises:
        UnsupportedRotary: There is none.
    """
    modules = dict(model.named_modules())
    parts = attention_path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        parent = modules.get(".".join(parts[:depth]))
        rotary = getattr(parent, "rotary_emb", None)
        if isinstance(rotary, nn.Module):
            return rotary
    raise UnsupportedRotary(f"no rotary embedding above {attention_path!r}")


def rotation_table(rotary: nn.Module, max_distance: int) -> Tensor:
    """The normalised fp32 table of a rotary module, on the CPU.

    Args:
        rotary: One of vLLM's rotary modules, or a known one of Transformers'.
        max_distance: Rows needed.

    Returns:
        ``[P, R]`` with P >= `max_distance` rows where the module has them; R is the rotary dim.

    Raises:
        UnsupportedRotary: Not plain rotations by an angle linear in the position.
    """
    name = type(rotary).__name__
    if name in _TRANSFORMERS_HALVES:
        table_PR = _transformers_table(rotary, max_distance)
    else:
        table_PR = _vllm_table(rotary)
    half = table_PR.shape[1] // 2
    table_PR = table_PR / table_PR[0, :half].repeat(2)
    _check_composes(table_PR, name)
    if len(table_PR) < max_distance:
        raise UnsupportedRotary(f"{name!r} has {len(table_PR)} rows, {max_distance} are needed")
    table_PR = table_PR[:max_distance].contiguous()
    try:
        check_cos_sin(table_PR)
    except KernelInputError as error:
        raise UnsupportedRotary(f"table of {name!r}: {error}") from error
    return table_PR


def _vllm_table(rotary: nn.Module) -> Tensor:
    name = type(rotary).__name__
    compute = getattr(rotary, "_compute_cos_sin_cache", None)
    cached = getattr(rotary, "cos_sin_cache", None)
    if compute is None or not isinstance(cached, Tensor) or cached.ndim != 2:
        raise UnsupportedRotary(f"unknown RoPE kind {name!r}")
    if "MRotary" in name or "DualChunk" in name or "Long" in name or "Fourier" in name:
        raise UnsupportedRotary(f"RoPE kind {name!r} is not a rotation by one position")
    # Where the model computed its own, so that both are the same to the last bit. It also keeps a
    # GPU worker from PyTorch's CPU cosine, whose first call of a process can be off by 3e-4 in one
    # thread's share of the rows (https://github.com/pytorch/pytorch/issues/188792).
    with torch.device(cached.device):
        table_PR: Tensor = compute().float().cpu()
    if table_PR.shape != cached.shape:
        raise UnsupportedRotary(f"{name!r} computes another table than it uses")
    error = (table_PR.to(cached.dtype).float() - cached.float().cpu()).abs().max().item()
    if error > 1e-2:
        raise UnsupportedRotary(f"{name!r} computes another table than it uses, off by {error:.3g}")
    return table_PR


def _transformers_table(rotary: nn.Module, num_rows: int) -> Tensor:
    kind = getattr(rotary, "rope_type", None)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedRotary(f"RoPE kind {kind!r} of {type(rotary).__name__!r}")
    frequencies = rotary.inv_freq
    assert isinstance(frequencies, Tensor)
    positions_1P = torch.arange(num_rows, device=frequencies.device)[None]
    cos_1PR, sin_1PR = rotary(frequencies.new_zeros(1, dtype=torch.float32), positions_1P)
    half = cos_1PR.shape[-1] // 2
    return torch.cat([cos_1PR[0, :, :half], sin_1PR[0, :, :half]], dim=-1).float().cpu()


def _check_composes(table_PR: Tensor, name: str) -> None:
    """Rotations must add up: R(a) R(b) = R(a + b). Position-dependent schemes break this law."""
    half = table_PR.shape[1] // 2
    cos, sin = table_PR[:, :half], table_PR[:, half:]
    rows = len(table_PR)
    for a, b in ((1, 1), (3, rows // 5), (rows // 3, rows // 2), (7, rows - 8)):
        if a < 0 or b < 0 or a + b >= rows:
            continue
        expected = cos[a] * cos[b] - sin[a] * sin[b]
        if (expected - cos[a + b]).abs().max().item() > max(_TOLERANCE_FP32, 1e-6 * rows):
            raise UnsupportedRotary(f"RoPE kind {name!r} does not rotate by a linear angle")
