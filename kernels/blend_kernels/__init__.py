"""Tensor kernels of Blendgate: tensors in, tensors out. No vLLM, no HTTP, no state."""

from blend_kernels._backend import Backend
from blend_kernels._checks import KernelInputError, check_cos_sin
from blend_kernels.deviation import key_deviation, top_deviation_indices
from blend_kernels.rope import rotate_keys, rotate_keys_

__all__ = [
    "Backend",
    "KernelInputError",
    "check_cos_sin",
    "key_deviation",
    "rotate_keys",
    "rotate_keys_",
    "top_deviation_indices",
]
