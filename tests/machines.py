"""What the engine of a test runs on, and how far two right answers may lie apart there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

_LARGEST_KEY = 8.0
_ROUNDINGS = 5
"""Of a key that was stored, moved and written, against one that was computed: two by the model's
table and the sum of products, one on the way into the store, one by the move, one by the model."""


@dataclass(frozen=True)
class Machine:
    """A device and a dtype.

    Args:
        name: In test ids.
        dtype: Of weights and activations.
        key_noise: Largest difference of two right keys.
        wrong_key: What a key that is wrong by one position differs by at least.
        noise: Largest difference of two right log-probabilities; None where only the engine itself
            can tell (`Driver.noise`).
        environment: For vLLM, before it starts.
        engine: Arguments of the engine.
    """

    name: str
    dtype: str
    key_noise: float
    wrong_key: float
    noise: float | None
    environment: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def _half(name: str, dtype: str, significant_bits: int) -> Machine:
    noise = _ROUNDINGS * 2.0**-significant_bits * _LARGEST_KEY
    return Machine(name, dtype, noise, 2 * noise, None, engine=_CUDA_ENGINE)


_CUDA_ENGINE = {
    "gpu_memory_utilization": 0.1,
    # Tests fill a few hundred blocks; a pool of a million takes longer to make than they take.
    "kv_cache_memory_bytes": 1 << 28,
}

CPU = Machine("cpu", "float32", 1e-3, 0.1, 1e-4, environment={"VLLM_CPU_KVCACHE_SPACE": "1"})
CUDA_FP32 = Machine(
    "cuda-fp32",
    "float32",
    CPU.key_noise,
    CPU.wrong_key,
    CPU.noise,
    # FlashAttention takes no fp32, so vLLM chooses Triton's kernel, whose products would be tf32.
    environment={"TRITON_F32_DEFAULT": "ieee"},
    engine=_CUDA_ENGINE,
)
CUDA_BF16 = _half("cuda-bf16", "bfloat16", 8)
CUDA_FP16 = _half("cuda-fp16", "float16", 11)

_Case = TypeVar("_Case")


def on_machines(cases: Iterable[_Case], *machines: Machine) -> list[Any]:
    """Parameters: every case on the CPU, and, marked `gpu`, on each machine named that it can use.

    A case is a dataclass with a `name`, the `machine` that it runs on, and `machines`: the names of
    those that it can run on.
    """
    parameters = []
    for case in cases:
        each: Any = case
        if CPU.name in each.machines:
            parameters.append(pytest.param(case, id=each.name))
        parameters += [
            pytest.param(
                replace(each, machine=machine),
                id=f"{each.name}-{machine.name}",
                marks=pytest.mark.gpu,
            )
            for machine in machines
            if machine.name in each.machines
        ]
    return parameters
