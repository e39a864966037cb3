"""Moving cached keys to other positions (RoPE rotation). Owns the choice of implementation.

Does not make rotation tables: they come from the model's own rotary embedding.

Shapes: `L` layers, `T` tokens, `H` KV heads, `D` head dim, `P` table rows (one per distance),
`R` rotary dims, R <= D.
"""

import torch
from torch import Tensor

from blend_kernels import reference
from blend_kernels._backend import Backend, use_triton
from blend_kernels._checks import check_rotation, check_writable


def rotate_keys_(
    k_THD: Tensor,
    deltas_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    is_neox: bool,
    backend: Backend = "auto",
    check_values: bool = True,
) -> None:
    """Move cached keys from their stored positions to new ones, in place.

    RoPE rotations compose, so one turn by `new - old` replaces undoing one and applying another:
    `k_new = R(new - old) @ k_old`. For each pair (x, y) with the angle a of its frequency:
    `x' = x cos a - y sin a`, `y' = y cos a + x sin a`. A negative distance -d takes row d with the
    sine negated. CacheBlend (arXiv:2405.16444), footnote 3 and appendix A.

    Computed in fp32 and rounded once. A token whose distance is 0 keeps its bits. The D - R dims
    behind the rotary ones (partial rotary) are not touched. Moves `2 * T * H * R` elements of
    `k_THD` per layer, without the tokens that stay, plus one table row for each token.

    The keys already carry whatever magnitude factor the model's table has (YaRN's `mscale`), so
    the table here must not: divide the model's own fp32 table by its row 0 cosine. Row 0 is
    checked, so a table that would apply the factor twice is refused.

    Args:
        k_THD: `[T, H, D]`, or `[L, T, H, D]` with the same moves and table for every layer;
            rotated keys in bf16, fp16 or fp32; stride 1 in the last dimension, any other strides
            (a slice of a packed K|V tensor is fine). Overwritten.
        deltas_T: `[T]` int32 or int64, new position minus old one; same device.
        cos_sin_PR: `[P, R]` fp32, one row per non-negative distance, R/2 cosines then R/2 sines;
            same device.
        is_neox: Whether a pair is (i, i + R/2), the half split of GPT-NeoX and Llama; otherwise
            it is (2i, 2i + 1), the interleaved style of GPT-J.
        backend: Triton for CUDA tensors and PyTorch for others, or one of them by name.
        check_values: Check row 0 and that every distance has a row. On CUDA this waits for the
            device: a caller that has checked its table once with `check_cos_sin` and knows its
            distances passes False. The Triton kernel then writes NaN for a distance without a row.

    Raises:
        KernelInputError: A shape, dtype, device, stride or value is not as above.
    """
    if not use_triton(k_THD, backend):
        reference.rotate_keys_(
            k_THD, deltas_T, cos_sin_PR, is_neox=is_neox, check_values=check_values
        )
        return
    check_rotation(k_THD, deltas_T, cos_sin_PR, check_values=check_values)
    check_writable("k", k_THD)
    _launch(k_THD, k_THD, deltas_T, cos_sin_PR, is_neox=is_neox)


def rotate_keys(
    k_THD: Tensor,
    deltas_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    is_neox: bool,
    backend: Backend = "auto",
    check_values: bool = True,
) -> Tensor:
    """Return cached keys moved to new positions; `rotate_keys_` without overwriting `k_THD`.

    Moves `2 * T * H * D` elements per layer, plus one table row for each token.

    Returns:
        A new tensor in the shape and dtype of `k_THD`.

    Raises:
        KernelInputError: An input is not as `rotate_keys_` needs it.
    """
    if not use_triton(k_THD, backend):
        return reference.rotate_keys(
            k_THD, deltas_T, cos_sin_PR, is_neox=is_neox, check_values=check_values
        )
    check_rotation(k_THD, deltas_T, cos_sin_PR, check_values=check_values)
    out_THD = torch.empty_like(k_THD, memory_format=torch.contiguous_format)
    rotary_dim = cos_sin_PR.shape[1]
    out_THD[..., rotary_dim:] = k_THD[..., rotary_dim:]
    _launch(k_THD, out_THD, deltas_T, cos_sin_PR, is_neox=is_neox)
    return out_THD


def _launch(
    k_THD: Tensor, out_THD: Tensor, deltas_T: Tensor, cos_sin_PR: Tensor, *, is_neox: bool
) -> None:
    from blend_kernels._triton_kernels import launch_rotate_keys

    k_LTHD = k_THD if k_THD.ndim == 4 else k_THD.unsqueeze(0)
    out_LTHD = out_THD if out_THD.ndim == 4 else out_THD.unsqueeze(0)
    launch_rotate_keys(
        k_LTHD, out_LTHD, deltas_T, cos_sin_PR, is_neox=is_neox, is_in_place=out_THD is k_THD
    )
