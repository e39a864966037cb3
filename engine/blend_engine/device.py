"""What this machine computes on, in words."""

import os

import torch


def describe_device() -> str:
    """The GPU's name, or how many CPUs this process may use and the widest instructions it takes.

    `ATEN_CPU_CAPABILITY` narrows the latter, as it does for PyTorch's kernels.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{len(os.sched_getaffinity(0))} CPUs, {torch.backends.cpu.get_cpu_capability()}"
