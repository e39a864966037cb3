"""KV deviation of cached keys, and the tokens where it is highest (HKVD tokens).

Shapes: `T` tokens, `S` selected tokens, `H` KV heads, `D` head dim.
"""

import torch
from torch import Tensor

from blend_kernels import reference
from blend_kernels._backend import Backend, use_triton
from blend_kernels._checks import check_last_dim_contiguous


def key_deviation(fresh_THD: Tensor, cached_THD: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return how far each token's cached key is from the one computed in this prompt.

    `score[t] = sum over h, d of (fresh[t, h, d] - cached[t, h, d])^2`, in fp32: CacheBlend
    (arXiv:2405.16444), section 4.1, on keys. A sum and not a mean, so that scores of
    tensor-parallel ranks, each with its own heads, add up to the score of all heads. Both sides
    must stand at the same positions: rotate the cached keys first. Reads `2 * T * H * D` elements
    and writes `4 * T` bytes.

    Args:
        fresh_THD: `[T, H, D]` bf16, fp16 or fp32; stride 1 in the last dimension on Triton.
        cached_THD: `[T, H, D]` on the same device; its dtype may differ.
        backend: Triton for CUDA tensors and PyTorch for others, or one of them by name.

    Returns:
        `[T]` fp32. NaN where a key holds NaN.

    Raises:
        KernelInputError: A shape, dtype, device or stride is not as above.
    """
    if not use_triton(fresh_THD, backend):
        return reference.key_deviation(fresh_THD, cached_THD)
    from blend_kernels._triton_kernels import launch_key_deviation

    reference.check_deviation(fresh_THD, cached_THD)
    check_last_dim_contiguous("fresh", fresh_THD)
    check_last_dim_contiguous("cached", cached_THD)
    score_T = torch.empty(fresh_THD.shape[0], dtype=torch.float32, device=fresh_THD.device)
    launch_key_deviation(fresh_THD, cached_THD, score_T)
    return score_T


def top_deviation_indices(score_T: Tensor, k: int) -> Tensor:
    """Return the positions of the `k` highest scores, in ascending order.

    Deterministic: of equal scores the lower position is taken first, on every device. A NaN
    counts as highest, so a token with a damaged key is recomputed. Never waits for the device.

    Args:
        score_T: `[T]` fp32, already reduced over tensor-parallel ranks.
        k: How many, between 0 and T.

    Returns:
        `[S]` int64 with S = k, on the device of `score_T`.

    Raises:
        KernelInputError: `score_T` is not one fp32 row, or `k` is out of range.
    """
    return reference.top_deviation_indices(score_T, k)
