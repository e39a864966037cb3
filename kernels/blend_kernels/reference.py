"""Every op in plain PyTorch: the definition of correct, and the path that CPU tensors take.

Shapes: `L` layers, `T` tokens, `S` selected tokens, `H` KV heads, `D` head dim, `P` table rows
(one per distance), `R` rotary dims, `F` = R/2 frequencies. In a rotation `S` are the tokens that
move.
"""

import torch
from torch import Tensor

from blend_kernels._checks import (
    FLOAT_DTYPES,
    KernelInputError,
    check_dtype,
    check_ndim,
    check_rotation,
    check_same_device,
    check_writable,
)


def rotate_keys(
    k_THD: Tensor,
    deltas_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    is_neox: bool,
    check_values: bool = True,
) -> Tensor:
    """Return cached keys moved by signed distances; see `rope.rotate_keys_` for the contract.

    Args:
        k_THD: `[T, H, D]` or `[L, T, H, D]` rotated keys. Read only.
        deltas_T: `[T]` new position minus old one.
        cos_sin_PR: `[P, R]` fp32 table, row 0 cos = 1 and sin = 0.
        is_neox: Whether a pair is (i, i + R/2); otherwise it is (2i, 2i + 1).
        check_values: Whether to check row 0 and the range of the moves.

    Returns:
        The moved keys, in the shape and dtype of `k_THD`.

    Raises:
        KernelInputError: An input is not as above.
    """
    check_rotation(k_THD, deltas_T, cos_sin_PR, check_values=check_values)
    out_THD = k_THD.clone()
    _rotate_(out_THD, deltas_T, cos_sin_PR, is_neox=is_neox)
    return out_THD


def rotate_keys_(
    k_THD: Tensor,
    deltas_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    is_neox: bool,
    check_values: bool = True,
) -> None:
    """Move cached keys in place; `rotate_keys` with its result written over `k_THD`.

    Raises:
        KernelInputError: An input is not as `rotate_keys` needs it, or `k_THD` is an expanded view.
    """
    check_rotation(k_THD, deltas_T, cos_sin_PR, check_values=check_values)
    check_writable("k", k_THD)
    _rotate_(k_THD, deltas_T, cos_sin_PR, is_neox=is_neox)


def key_deviation(fresh_THD: Tensor, cached_THD: Tensor) -> Tensor:
    """Return each token's squared key difference; see `deviation.key_deviation`.

    Args:
        fresh_THD: `[T, H, D]` keys computed in this prompt; bf16, fp16 or fp32.
        cached_THD: `[T, H, D]` cached keys at the same positions; dtype may differ.

    Returns:
        `[T]` fp32.

    Raises:
        KernelInputError: Shapes or devices differ, or a dtype is not one of the three.
    """
    check_deviation(fresh_THD, cached_THD)
    diff_THD = fresh_THD.float() - cached_THD.float()
    return diff_THD.square_().sum(dim=(1, 2))


def top_deviation_indices(score_T: Tensor, k: int) -> Tensor:
    """Return the positions of the `k` highest scores; see `deviation.top_deviation_indices`.

    Args:
        score_T: `[T]` fp32.
        k: How many, between 0 and T.

    Returns:
        `[S]` int64 with S = k, ascending.

    Raises:
        KernelInputError: `score_T` is not one fp32 row, or `k` is out of range.
    """
    check_ndim("score", score_T, 1)
    check_dtype("score", score_T, (torch.float32,))
    if not 0 <= k <= score_T.shape[0]:
        raise KernelInputError(f"`k` must lie within 0 and {score_T.shape[0]}, got {k!r}")
    # `topk` leaves the order of ties open; a stable sort keeps the lower index first.
    order_T = torch.sort(score_T, descending=True, stable=True).indices
    return order_T[:k].sort().values


def check_deviation(fresh_THD: Tensor, cached_THD: Tensor) -> None:
    """Check the inputs of `key_deviation`.

    Raises:
        KernelInputError: Shapes or devices differ, or a dtype is not a float of 16 or 32 bits.
    """
    check_ndim("fresh", fresh_THD, 3)
    check_dtype("fresh", fresh_THD, FLOAT_DTYPES)
    check_dtype("cached", cached_THD, FLOAT_DTYPES)
    check_same_device("cached", cached_THD, "fresh", fresh_THD)
    if fresh_THD.shape != cached_THD.shape:
        raise KernelInputError(
            f"`fresh` is {tuple(fresh_THD.shape)} and `cached` is {tuple(cached_THD.shape)}; "
            "both must have one shape"
        )


def _rotate_(k_THD: Tensor, deltas_T: Tensor, cos_sin_PR: Tensor, *, is_neox: bool) -> None:
    # Tokens that stay are left alone: multiplying by 1 would lose the sign of a zero and the
    # payload of a NaN.
    moved_S = deltas_T.nonzero().squeeze(1)
    if moved_S.numel() == 0 or k_THD.numel() == 0:
        return
    is_whole = moved_S.numel() == deltas_T.numel()
    deltas_S = deltas_T if is_whole else deltas_T.index_select(0, moved_S)
    rows_SR = cos_sin_PR.index_select(0, deltas_S.abs())
    cos_S1F, sin_S1F = rows_SR.unsqueeze(1).chunk(2, dim=-1)
    sin_S1F = torch.where((deltas_S < 0)[:, None, None], -sin_S1F, sin_S1F)

    # One layer at a time: its temporaries stay in the processor's cache.
    for layer_THD in k_THD.unbind(0) if k_THD.ndim == 4 else (k_THD,):
        rotary_THR = layer_THD[..., : cos_sin_PR.shape[1]]
        rotary_SHR = rotary_THR if is_whole else rotary_THR.index_select(0, moved_S)
        first_SHF, second_SHF = _pairs(rotary_SHR, is_neox=is_neox)
        x_SHF, y_SHF = first_SHF.float(), second_SHF.float()
        new_x_SHF = (x_SHF * cos_S1F).addcmul_(y_SHF, sin_S1F, value=-1)
        new_y_SHF = (y_SHF * cos_S1F).addcmul_(x_SHF, sin_S1F)
        first_SHF.copy_(new_x_SHF)
        second_SHF.copy_(new_y_SHF)
        if not is_whole:
            rotary_THR.index_copy_(0, moved_S, rotary_SHR)


def _pairs(rotary_THR: Tensor, *, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second member of every pair."""
    if is_neox:
        first_THF, second_THF = rotary_THR.chunk(2, dim=-1)
        return first_THF, second_THF
    return rotary_THR[..., 0::2], rotary_THR[..., 1::2]
