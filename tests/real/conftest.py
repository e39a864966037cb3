"""One real engine for all tests of this folder: vLLM on the CPU, SmolLM2-135M-Instruct in fp32.

It runs inside the test process, so that tests can look into both connector roles. Prefix caching is
on; requests that must not meet each other's blocks use salts of their own.
"""

from collections.abc import Iterator

import pytest
from tests.real.driver import Driver

from blend_engine.config import BlendConfig
from blend_engine.offline import attach, blend_llm_kwargs
from blend_gateway.demo_model import prepare

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs vLLM."""
    for item in items:
        if "tests/real" in str(item.path):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="package")
def driver() -> Iterator[Driver]:
    """The engine, with what tests ask of it."""
    from vllm import LLM

    model = prepare(progress=print)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        llm = LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=6144,
            max_num_batched_tokens=1024,
            max_logprobs=-1,
            seed=0,
            **blend_llm_kwargs(BlendConfig(min_segment_tokens=1, store_bytes=1 << 30)),
        )
        assert attach(llm) is None
        yield Driver(llm, model)
        llm.llm_engine.engine_core.shutdown()
