"""Which implementation of an op runs for a tensor. Triton is imported only where it is used."""

from typing import Literal

from torch import Tensor

from blend_kernels._checks import KernelInputError

Backend = Literal["auto", "torch", "triton"]
"""`auto`: Triton for CUDA tensors, PyTorch for all others. The other two ask for one by name."""


def use_triton(tensor: Tensor, backend: Backend) -> bool:
    """Return whether an op on `tensor` runs its Triton kernel.

    Raises:
        KernelInputError: `backend` is unknown, or is `triton` and neither is the tensor on CUDA
            nor is Triton's interpreter (`TRITON_INTERPRET=1`) active.
    """
    if backend not in ("auto", "torch", "triton"):
        raise KernelInputError(f"`backend` must be 'auto', 'torch' or 'triton', got {backend!r}")
    if backend != "triton":
        return backend == "auto" and tensor.is_cuda
    if tensor.is_cuda:
        return True
    from blend_kernels._triton_kernels import is_interpreted

    if not is_interpreted():
        raise KernelInputError(
            "`backend` 'triton' expects a CUDA tensor, or TRITON_INTERPRET=1 set before the first "
            f"import of Triton; got a tensor on {str(tensor.device)!r} and no interpreter"
        )
    return True
