"""Wrong rotations, to put in the place of `model_pass.rotate_keys`."""

from typing import Any

from torch import Tensor

from blend_kernels import rotate_keys


def without_rotation(k: Tensor, deltas: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Keys stay as they were compiled."""
    return k


def rotated_by_one_more(k: Tensor, deltas: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Keys move one position too far."""
    return rotate_keys(k, deltas + 1, *args, **kwargs)
