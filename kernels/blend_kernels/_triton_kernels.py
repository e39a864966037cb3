"""The Triton kernels and their launchers. Launchers take inputs that the public ops have checked.

Shapes: `L` layers, `T` tokens, `H` KV heads, `D` head dim, `P` table rows, `R` rotary dims,
`F` = R/2 frequencies.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of one tile: 32 a thread at the default of 4 warps.
_TILE_ELEMENTS = 4096
_MAX_TILE_TOKENS = 32


@triton.jit
def _rotate_keys_kernel(
    k_ptr,  # [L, T, H, D]
    out_ptr,  # [L, T, H, D]; may be k_ptr
    deltas_ptr,  # [T]
    cos_sin_ptr,  # [P, R]
    num_tokens,
    num_heads,
    num_rows,
    stride_k_layer,
    stride_k_token,
    stride_k_head,
    stride_out_layer,
    stride_out_token,
    stride_out_head,
    stride_delta,
    stride_row,
    NUM_FREQS: tl.constexpr,
    FREQ_STRIDE: tl.constexpr,  # from one pair's first member to the next pair's
    PAIR_STRIDE: tl.constexpr,  # from a pair's first member to its second
    IS_IN_PLACE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    token_block = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    token_T = token_block * BLOCK_T + tl.arange(0, BLOCK_T)
    freq_F = tl.arange(0, BLOCK_F)
    mask_T = token_T < num_tokens
    mask_TF = mask_T[:, None] & (freq_F < NUM_FREQS)[None, :]

    delta_T = tl.load(deltas_ptr + token_T * stride_delta, mask=mask_T, other=0).to(tl.int64)
    row_T = tl.where(delta_T < 0, -delta_T, delta_T)
    is_row_T = (row_T >= 0) & (row_T < num_rows)
    mask_row_TF = mask_TF & is_row_T[:, None]
    cos_ptrs = cos_sin_ptr + row_T[:, None] * stride_row + freq_F[None, :]
    # A distance without a row must not pass for a move of 0.
    cos_TF = tl.load(cos_ptrs, mask=mask_row_TF, other=float("nan"))
    sin_TF = tl.load(cos_ptrs + NUM_FREQS, mask=mask_row_TF, other=float("nan"))
    sin_TF = tl.where((delta_T < 0)[:, None], -sin_TF, sin_TF)

    is_moved_TF = (delta_T != 0)[:, None] & mask_TF
    if IS_IN_PLACE:
        mask_io_TF = is_moved_TF
    else:
        mask_io_TF = mask_TF
    column_F = freq_F * FREQ_STRIDE
    k_ptrs = k_ptr + layer * stride_k_layer + token_T[:, None] * stride_k_token + column_F[None, :]
    out_ptrs = (
        out_ptr + layer * stride_out_layer + token_T[:, None] * stride_out_token + column_F[None, :]
    )
    for _ in range(num_heads):
        first_TF = tl.load(k_ptrs, mask=mask_io_TF, other=0.0)
        second_TF = tl.load(k_ptrs + PAIR_STRIDE, mask=mask_io_TF, other=0.0)
        x_TF = first_TF.to(tl.float32)
        y_TF = second_TF.to(tl.float32)
        new_first_TF = (x_TF * cos_TF - y_TF * sin_TF).to(first_TF.dtype)
        new_second_TF = (y_TF * cos_TF + x_TF * sin_TF).to(first_TF.dtype)
        # Multiplying by 1 would lose the sign of a zero and the payload of a NaN.
        new_first_TF = tl.where(is_moved_TF, new_first_TF, first_TF)
        new_second_TF = tl.where(is_moved_TF, new_second_TF, second_TF)
        tl.store(out_ptrs, new_first_TF, mask=mask_io_TF)
        tl.store(out_ptrs + PAIR_STRIDE, new_second_TF, mask=mask_io_TF)
        k_ptrs += stride_k_head
        out_ptrs += stride_out_head


@triton.jit
def _key_deviation_kernel(
    fresh_ptr,  # [T, H, D]
    cached_ptr,  # [T, H, D]
    score_ptr,  # [T]
    num_tokens,
    num_heads,
    stride_fresh_token,
    stride_fresh_head,
    stride_cached_token,
    stride_cached_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    dim_D = tl.arange(0, BLOCK_D)
    mask_T = token_T < num_tokens
    mask_TD = mask_T[:, None] & (dim_D < HEAD_DIM)[None, :]
    fresh_ptrs = fresh_ptr + token_T[:, None] * stride_fresh_token + dim_D[None, :]
    cached_ptrs = cached_ptr + token_T[:, None] * stride_cached_token + dim_D[None, :]
    sum_TD = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for _ in range(num_heads):
        fresh_TD = tl.load(fresh_ptrs, mask=mask_TD, other=0.0).to(tl.float32)
        cached_TD = tl.load(cached_ptrs, mask=mask_TD, other=0.0).to(tl.float32)
        diff_TD = fresh_TD - cached_TD
        sum_TD += diff_TD * diff_TD
        fresh_ptrs += stride_fresh_head
        cached_ptrs += stride_cached_head
    tl.store(score_ptr + token_T, tl.sum(sum_TD, axis=1), mask=mask_T)


def is_interpreted() -> bool:
    """Return whether Triton's interpreter was active when the kernels were defined."""
    return not isinstance(_rotate_keys_kernel, triton.JITFunction)


def launch_rotate_keys(
    k_LTHD: Tensor,
    out_LTHD: Tensor,
    deltas_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    is_neox: bool,
    is_in_place: bool,
) -> None:
    """Write the moved rotary dims of `k_LTHD` to `out_LTHD` in one launch for all layers.

    Args:
        k_LTHD: Rotated keys.
        out_LTHD: `k_LTHD` itself if `is_in_place`, else memory that shares nothing with it.
        deltas_T: Signed distances.
        cos_sin_PR: fp32 table.
        is_neox: Half split pairs, else interleaved ones.
        is_in_place: Tokens that stay are then neither read nor written.
    """
    num_layers, num_tokens, num_heads, _ = k_LTHD.shape
    if k_LTHD.numel() == 0:
        return
    num_rows, rotary_dim = cos_sin_PR.shape
    num_freqs = rotary_dim // 2
    block_freqs = triton.next_power_of_2(num_freqs)
    block_tokens = _tile_tokens(block_freqs)
    with _on_device_of(k_LTHD):
        _rotate_keys_kernel[(triton.cdiv(num_tokens, block_tokens), num_layers)](
            k_LTHD,
            out_LTHD,
            deltas_T,
            cos_sin_PR,
            num_tokens,
            num_heads,
            num_rows,
            *k_LTHD.stride()[:3],
            *out_LTHD.stride()[:3],
            deltas_T.stride(0),
            cos_sin_PR.stride(0),
            NUM_FREQS=num_freqs,
            FREQ_STRIDE=1 if is_neox else 2,
            PAIR_STRIDE=num_freqs if is_neox else 1,
            IS_IN_PLACE=is_in_place,
            BLOCK_T=block_tokens,
            BLOCK_F=block_freqs,
        )


def launch_key_deviation(fresh_THD: Tensor, cached_THD: Tensor, score_T: Tensor) -> None:
    """Write each token's squared key difference to `score_T`, which is contiguous fp32."""
    num_tokens, num_heads, head_dim = fresh_THD.shape
    if num_tokens == 0:
        return
    block_dims = triton.next_power_of_2(max(head_dim, 1))
    block_tokens = _tile_tokens(block_dims)
    with _on_device_of(fresh_THD):
        _key_deviation_kernel[(triton.cdiv(num_tokens, block_tokens),)](
            fresh_THD,
            cached_THD,
            score_T,
            num_tokens,
            num_heads,
            *fresh_THD.stride()[:2],
            *cached_THD.stride()[:2],
            HEAD_DIM=head_dim,
            BLOCK_T=block_tokens,
            BLOCK_D=block_dims,
        )


def _tile_tokens(block_columns: int) -> int:
    return max(1, min(_MAX_TILE_TOKENS, _TILE_ELEMENTS // block_columns))


def _on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU current.

    Triton launches on the current device: a tensor of another one would fail with "Pointer
    argument cannot be accessed from Triton (cpu tensor?)".
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
