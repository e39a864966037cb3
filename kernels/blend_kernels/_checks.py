"""Checks of what callers hand to the ops. Every message names what was expected and what came.

Shapes: `L` layers, `T` tokens, `H` KV heads, `D` head dim, `P` table rows, `R` rotary dims.
"""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)

# cos^2 + sin^2 of a table computed in fp32 is 1 within a few 2^-24. A table that was rounded to
# bf16 (2^-9) or fp16 (2^-12), or that carries a magnitude factor, is far outside.
_UNIT_TOLERANCE = 1e-5


class KernelInputError(ValueError):
    """A tensor handed to an op has a shape, dtype, device, stride or value it does not take."""


def check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise unless the tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        got = str(tensor.dtype).removeprefix("torch.")
        raise KernelInputError(f"`{name}` must be {expected}, got {got}")


def check_ndim(name: str, tensor: Tensor, *expected: int) -> None:
    """Raise unless the tensor has one of the `expected` numbers of dimensions."""
    if tensor.ndim not in expected:
        wanted = " or ".join(map(str, expected))
        raise KernelInputError(
            f"`{name}` must have {wanted} dimensions, got {tensor.ndim}: {tuple(tensor.shape)}"
        )


def check_size(name: str, dim: int, tensor: Tensor, other_name: str, expected: int) -> None:
    """Raise unless dimension `dim` has the size that `other_name` asks for."""
    if tensor.shape[dim] != expected:
        raise KernelInputError(
            f"`{name}` has size {tensor.shape[dim]} in dimension {dim}, `{other_name}` asks for "
            f"{expected}; `{name}` is {tuple(tensor.shape)}"
        )


def check_same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless both tensors are on one device."""
    if tensor.device != other.device:
        raise KernelInputError(
            f"`{name}` is on {str(tensor.device)!r}, `{other_name}` on {str(other.device)!r}; "
            "both must be on one device"
        )


def check_last_dim_contiguous(name: str, tensor: Tensor) -> None:
    """Raise unless neighbours in the last dimension are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelInputError(
            f"`{name}` must have stride 1 in its last dimension, got {tensor.stride(-1)}; "
            f"its strides are {tensor.stride()}"
        )


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise if the tensor is an expanded view, whose elements share memory."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            raise KernelInputError(
                f"`{name}` is overwritten and must not be an expanded view: expected strides above "
                f"0 where the size is above 1, got strides {tensor.stride()} for "
                f"shape {tuple(tensor.shape)}"
            )


def check_rotation(
    k_THD: Tensor, deltas_T: Tensor, cos_sin_PR: Tensor, *, check_values: bool
) -> None:
    """Check the inputs of a rotation; see `rope.rotate_keys_` for what is expected.

    Args:
        k_THD: `[T, H, D]` or `[L, T, H, D]`.
        deltas_T: `[T]`.
        cos_sin_PR: `[P, R]`.
        check_values: Also look at values: row 0 of the table and the range of the moves. On a
            CUDA device this waits for the device.

    Raises:
        KernelInputError: An input is not as the ops need it.
    """
    check_ndim("k", k_THD, 3, 4)
    check_dtype("k", k_THD, FLOAT_DTYPES)
    check_last_dim_contiguous("k", k_THD)
    check_ndim("deltas", deltas_T, 1)
    check_dtype("deltas", deltas_T, INDEX_DTYPES)
    check_size("deltas", 0, deltas_T, "k", k_THD.shape[-3])
    check_same_device("deltas", deltas_T, "k", k_THD)
    check_same_device("cos_sin", cos_sin_PR, "k", k_THD)
    _check_table_layout(cos_sin_PR)
    num_rows, rotary_dim = cos_sin_PR.shape
    if rotary_dim > k_THD.shape[-1]:
        raise KernelInputError(
            f"`cos_sin` has {rotary_dim} columns, more than the head dim {k_THD.shape[-1]} of `k`"
        )
    if not check_values:
        return
    _check_row_zero(cos_sin_PR)
    if deltas_T.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(deltas_T))
    if lowest <= -num_rows or highest >= num_rows:
        raise KernelInputError(
            f"`deltas` must lie within -{num_rows - 1} and {num_rows - 1}, the rows of `cos_sin`; "
            f"got {lowest} to {highest}"
        )


def check_cos_sin(cos_sin_PR: Tensor) -> None:
    """Check a whole rotation table once, when it is made. Waits for the device.

    Every pair must be a point of the unit circle, and row 0 the point (1, 0). So a table with
    YaRN's magnitude factor still in it is refused, and so is one that was rounded to bf16 or fp16
    on its way.

    Args:
        cos_sin_PR: `[P, R]` fp32, one row per non-negative distance, R/2 cosines then R/2 sines.

    Raises:
        KernelInputError: The table is not as above.
    """
    _check_table_layout(cos_sin_PR)
    _check_row_zero(cos_sin_PR)
    cos_PR, sin_PR = cos_sin_PR.chunk(2, dim=-1)
    largest = float((cos_PR.square() + sin_PR.square() - 1).abs().max())
    if not largest <= _UNIT_TOLERANCE:
        raise KernelInputError(
            f"`cos_sin` must have cos^2 + sin^2 within {_UNIT_TOLERANCE} of 1 everywhere, "
            f"got a difference of {largest!r}; compute it in fp32 and without a magnitude factor"
        )


def _check_table_layout(cos_sin_PR: Tensor) -> None:
    check_ndim("cos_sin", cos_sin_PR, 2)
    check_dtype("cos_sin", cos_sin_PR, (torch.float32,))
    num_rows, rotary_dim = cos_sin_PR.shape
    if num_rows == 0 or rotary_dim == 0 or rotary_dim % 2:
        raise KernelInputError(
            "`cos_sin` must have at least one row and an even, positive number of columns, "
            f"got {tuple(cos_sin_PR.shape)}"
        )
    check_last_dim_contiguous("cos_sin", cos_sin_PR)


def _check_row_zero(cos_sin_PR: Tensor) -> None:
    cos, sin = cos_sin_PR[0].double().cpu().chunk(2)
    cos_error = float((cos - 1).abs().max())
    sin_error = float(sin.abs().max())
    if not (cos_error <= _UNIT_TOLERANCE and sin_error <= _UNIT_TOLERANCE):
        raise KernelInputError(
            "row 0 of `cos_sin` must be cos = 1 and sin = 0, "
            f"got cos in [{float(cos.min())!r}, {float(cos.max())!r}] and "
            f"sin in [{float(sin.min())!r}, {float(sin.max())!r}]; "
            "divide a table that carries a magnitude factor (YaRN) by its row 0 cosine"
        )
