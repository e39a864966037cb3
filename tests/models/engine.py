"""A family's tiny model, written, served inside the test process, and shut down."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import Machine
from tests.models.families import Family
from tests.models.weights import VOCABULARY, write_model
from tests.real.driver import LITTLE_NOISE, Driver, Prompt

from blend_engine.async_engine import BlendAsyncLLM
from blend_engine.config import BlendConfig
from blend_engine.offline import attach, blend_llm_kwargs
from blend_engine.segments import SegmentContext, SegmentSpan

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
MAX_MODEL_LEN = 768
CONFIG = BlendConfig(min_segment_tokens=1, store_bytes=1 << 28)
NOISE_TOKENS = 240


@dataclass(frozen=True)
class Served:
    """A loaded engine and what the connector said of its model."""

    family: Family
    driver: Driver
    refusal: str | None
    noise: float

    @property
    def machine(self) -> Machine:
        """What it runs on."""
        return self.family.machine

    def ids(self, seed: int, length: int) -> list[int]:
        """Random token ids, the special ones left out."""
        return random_ids(seed, length)


def random_ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()


def with_document(
    served: Served, seed: int, document: Sequence[int], *, before: int, after_seed: int, after: int
) -> Prompt:
    """Fresh text, a document, fresh text."""
    span = SegmentSpan(start=before, end=before + len(document), context=SegmentContext.FREE)
    ids = [*served.ids(seed, before), *document, *served.ids(after_seed, after)]
    return Prompt(ids, (span,))


def counted_preemptions(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of requests that vLLM preempts from here on."""
    scheduler = type(served.driver.llm.llm_engine.engine_core.engine_core.scheduler)
    preempted: list[str] = []
    original = scheduler._preempt_request

    def counting(this: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return original(this, request, *arguments, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", counting)
    return preempted


def found_in_cache(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that vLLM finds in its own cache, per request from here on."""
    asked_at: list[int] = []
    scheduler = served.driver.llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler.connector.get_num_new_matched_tokens

    def recording(request: object, num_computed: int) -> object:
        asked_at.append(num_computed)
        return original(request, num_computed)

    monkeypatch.setattr(scheduler.connector, "get_num_new_matched_tokens", recording)
    return asked_at


@contextmanager
def serving(family: Family, folder: Path, config: BlendConfig = CONFIG) -> Iterator[Served]:
    """Write the model, serve it, shut it down."""
    _write(family, folder)
    with serving_folder(family, folder, config) as started:
        yield started


@contextmanager
def serving_folder(family: Family, folder: Path, config: BlendConfig = CONFIG) -> Iterator[Served]:
    """Serve a model that is there, shut it down."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**ENVIRONMENT, **family.machine.environment}.items():
            environment.setenv(name, value)
        settings = {
            "dtype": family.machine.dtype,
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "max_logprobs": -1,
            "seed": 0,
            **family.machine.engine,
            **family.engine,
        }
        _forget_llvmlite()
        llm = None
        try:
            llm = LLM(
                str(folder),
                **settings,
                **blend_llm_kwargs(config, is_hybrid=family.is_hybrid),
            )
            refusal = attach(llm)
            driver = Driver(llm, folder)
            noise = family.machine.noise
            if noise is None:
                # A refused model does the same sums twice, and only those.
                noise = LITTLE_NOISE if refusal else driver.noise(random_ids(5, NOISE_TOKENS))
            yield Served(family, driver, refusal, noise)
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            _forget_llvmlite()


async def start_async_engine(
    family: Family, folder: Path, config: BlendConfig = CONFIG, **settings: Any
) -> BlendAsyncLLM:
    """Write the model and start the gateway's engine on it; the caller shuts it down."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    _write(family, folder)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in family.machine.environment.items():
            environment.setenv(name, value)
        arguments = AsyncEngineArgs(
            model=str(folder),
            dtype=family.machine.dtype,
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            **{"max_num_seqs": 8, **settings},
        )
        return await BlendAsyncLLM.start(arguments, config)


def _forget_llvmlite() -> None:
    """VLLM reads the attributes of all imported modules when an engine starts, and fails at this.

    N-gram speculation and what reads sound import it.
    """
    sys.modules.pop("llvmlite.binding.ffi", None)


def _write(family: Family, folder: Path) -> None:
    write_model(folder, family.model_type, family.config, family.architecture)
    if family.finish is not None:
        family.finish(folder)
