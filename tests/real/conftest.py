"""One real engine for all tests of this folder: SmolLM2-135M-Instruct in fp32.

On the CPU and, under the marker `gpu`, on a CUDA device.

It runs inside the test process, so that tests can look into both connector roles. Prefix caching is
on; requests that must not meet each other's blocks use salts of their own.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.machines import CPU, CUDA_FP32, Machine
from tests.real.driver import Driver

from blend_engine.config import BlendConfig
from blend_engine.offline import attach, blend_llm_kwargs
from blend_gateway.demo_model import prepare

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
KV_CACHE_GIB = 2
MACHINES = (
    replace(CPU, environment={"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}),
    replace(CUDA_FP32, engine={**CUDA_FP32.engine, "kv_cache_memory_bytes": KV_CACHE_GIB << 30}),
)


@pytest.fixture(
    scope="package",
    params=[
        pytest.param(
            machine, id=machine.name, marks=pytest.mark.gpu if machine.name != "cpu" else ()
        )
        for machine in MACHINES
    ],
)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """The engine, with what tests ask of it."""
    from vllm import LLM

    machine: Machine = request.param
    model = prepare(progress=print)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**ENVIRONMENT, **machine.environment}.items():
            environment.setenv(name, value)
        llm = LLM(
            str(model),
            dtype=machine.dtype,
            enforce_eager=True,
            max_model_len=6144,
            max_num_batched_tokens=1024,
            max_logprobs=-1,
            seed=0,
            **machine.engine,
            **blend_llm_kwargs(BlendConfig(min_segment_tokens=1, store_bytes=1 << 30)),
        )
        assert attach(llm) is None
        yield Driver(llm, model)
        llm.llm_engine.engine_core.shutdown()
