"""A tiny model's engine driven step by step, and what has to be as before when nothing runs."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.models.engine import Served, with_document
from tests.real.driver import Prompt

from blend_engine.model_pass import ModelPass
from blend_engine.pool import StoredSegment
from blend_engine.preamble import compile_prompt
from blend_engine.protocol import CompileParams, RequestParams
from blend_engine.segments import SegmentContext


@dataclass
class Stepper:
    """Drives the engine step by step and counts what passes compute in each."""

    served: Served
    pass_tokens: list[int] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def engine(self) -> Any:
        return self.served.driver.llm.llm_engine

    @property
    def vllm_scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def in_flight(self) -> int:
        return len(self.served.driver.scheduler._flights)

    def add(
        self,
        ids: Sequence[int],
        params: RequestParams | None = None,
        *,
        max_tokens: int = 1,
        salt: str | None = None,
    ) -> str:
        request_id = self.served.driver.add(ids, params, max_tokens=max_tokens, salt=salt)
        self.tokens[request_id] = []
        return request_id

    def step(self) -> None:
        self.pass_tokens.append(0)
        for output in self.engine.step():
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()
        # Whatever the last step has freed is settled by one more.
        self.step()

    def alone(
        self,
        ids: Sequence[int],
        params: RequestParams | None = None,
        max_tokens: int = 1,
        *,
        salt: str | None = None,
    ) -> list[int]:
        """What a request is answered with nothing beside it."""
        request_id = self.add(ids, params, max_tokens=max_tokens, salt=salt)
        self.drain()
        return self.tokens[request_id]


@contextmanager
def stepping(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepper]:
    """A stepper whose engine must have given everything back in the end."""
    stepper = Stepper(served)
    original = ModelPass._call

    def counting(this: ModelPass, positions_T: torch.Tensor, **options: Any) -> Any:
        if stepper.pass_tokens:
            stepper.pass_tokens[-1] += len(positions_T)
        return original(this, positions_T, **options)

    monkeypatch.setattr(ModelPass, "_call", counting)
    yield stepper
    stepper.drain()
    check_at_rest(stepper)


def check_at_rest(stepper: Stepper) -> None:
    """Nothing is held of any request: no lease, no booking, no block, no memory of it."""
    driver, vllm = stepper.served.driver, stepper.vllm_scheduler
    role, worker = driver.scheduler, driver.worker
    assert (role.store_stats().num_leases, stepper.in_flight) == (0, 0)
    assert (role._admitted, role._flights._cancelled, role._index._evicted) == ([], [], [])
    assert (role._requests._requests, role._blocks._blocks) == ({}, {})
    assert not any(role._index.is_reserved(key) for key in role._index._entries)
    assert (worker._sliced, worker._outcomes, worker._received) == ({}, [], set())
    assert set(worker.pool._segments) == set(role._index._entries)
    assert (vllm.requests, list(vllm.running), list(vllm.waiting)) == ({}, [], [])
    assert num_free_blocks(stepper.served) == num_blocks(stepper.served)


def block_pool(served: Served) -> Any:
    engine_core = served.driver.llm.llm_engine.engine_core.engine_core
    return engine_core.scheduler.kv_cache_manager.block_pool


def num_free_blocks(served: Served) -> int:
    return int(block_pool(served).get_num_free_blocks())


def num_blocks(served: Served) -> int:
    """All but the null block."""
    return int(block_pool(served).num_gpu_blocks) - 1


def prompt_of(served: Served, seed: int, length: int, *, document: int, after: int = 9) -> Prompt:
    """A document between a little fresh text."""
    return with_document(
        served, seed, served.ids(document, length), before=11, after_seed=seed + 1, after=after
    )


def compile_of(
    served: Served,
    ids: Sequence[int],
    *,
    tenant: str = "tests",
    context: SegmentContext = SegmentContext.FREE,
) -> tuple[list[int], CompileParams]:
    prompt_ids, span = compile_prompt(served.driver.tokenizer, context, ids)
    return prompt_ids, CompileParams(plan_id=uuid.uuid4().hex, tenant=tenant, segment=span)


def same_bytes(one: StoredSegment | None, other: StoredSegment | None) -> bool:
    """Whether both hold the same KV, bit for bit."""
    assert one is not None
    assert other is not None
    return torch.equal(one.k_LTHD, other.k_LTHD) and torch.equal(one.v_LTHD, other.v_LTHD)
