"""The ways to run vLLM that the matrix covers: backend, KV cache, graphs, scheduling, runner."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.machines import CPU, CUDA_BF16, CUDA_FP16, Machine
from tests.models.families import COMMON, Family

NUM_TOKENS_OF_CACHE = 1024
"""Not enough for the four requests that are made to preempt each other."""

V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@dataclass(frozen=True)
class Configuration:
    """An engine, and what it must turn out to be.

    Args:
        name: In test ids.
        machine: Device, dtype, environment.
        engine: Arguments of the engine.
        backend: Name of the attention backend.
        has_graphs: Whether CUDA graphs are captured.
        is_async: Whether a step is scheduled before the one before it has ended.
        runner_module: Where the model runner is defined; empty where there is one alone.
    """

    name: str
    machine: Machine
    engine: Mapping[str, Any]
    backend: str
    has_graphs: bool = False
    is_async: bool = False
    runner_module: str = ""

    def family(self) -> Family:
        """A tiny Llama under this configuration."""
        block_size = self.engine.get("block_size", 16)
        return Family(
            self.name,
            "llama",
            {**COMMON, "num_attention_heads": 2, "num_key_value_heads": 1},
            engine={
                "num_gpu_blocks_override": NUM_TOKENS_OF_CACHE // block_size,
                **self.engine,
            },
            machine=self.machine,
        )


def _cuda(
    name: str,
    backend: str = "FLASH_ATTN",
    *,
    runner: Mapping[str, str] = V2_RUNNER,
    machine: Machine = CUDA_BF16,
    is_eager: bool = False,
    is_async: bool = True,
    **engine: Any,
) -> Configuration:
    is_second = runner is V2_RUNNER
    return Configuration(
        name,
        replace(machine, environment={**machine.environment, **runner}),
        {
            "attention_backend": backend,
            "enforce_eager": is_eager,
            "async_scheduling": is_async,
            **engine,
        },
        backend,
        has_graphs=not is_eager,
        is_async=is_async,
        runner_module="vllm.v1.worker.gpu.model_runner"
        if is_second
        else "vllm.v1.worker.gpu_model_runner",
    )


CONTROL = Configuration("cpu", CPU, {"block_size": 32}, "CPU_ATTN")
ON_CUDA = (
    _cuda("flash-graphs-v2"),
    _cuda("flash-graphs-v1", runner=V1_RUNNER),
    _cuda("flash-eager", is_eager=True),
    _cuda("flash-sync-v1", runner=V1_RUNNER, is_async=False),
    _cuda("triton-v2", "TRITON_ATTN"),
    _cuda("triton-v1", "TRITON_ATTN", runner=V1_RUNNER),
    _cuda("fp8-cache-v2", kv_cache_dtype="fp8"),
    _cuda("fp8-cache-v1", runner=V1_RUNNER, kv_cache_dtype="fp8"),
    _cuda("triton-fp8-cache", "TRITON_ATTN", kv_cache_dtype="fp8"),
    _cuda("fp16-blocks-of-32", machine=CUDA_FP16, block_size=32),
)
