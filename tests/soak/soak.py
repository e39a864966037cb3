"""The soak: an engine with faults in it, a stream of clients, and a check after each tenth."""

import asyncio
import os
import pickle
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from unittest import mock

from tests.models.engine import random_ids, start_async_engine
from tests.models.families import BLENDED
from tests.soak.clients import serve
from tests.soak.inside import EXTENSION, resident_bytes
from tests.soak.oracle import Oracle
from tests.soak.records import Chapter, Rest
from tests.soak.traffic import MIN_SEGMENT_TOKENS, Kind, Request, Traffic
from tests.soak.verify import Findings, Verifier

from blend_engine.async_engine import BlendAsyncLLM
from blend_engine.config import BlendConfig
from blend_engine.preamble import ballast_ids

BLOCK_SIZE, NUM_BLOCKS = 32, 44
CONCURRENCY = 32
MEMORY_GROWTH = 0.05
_CHAPTERS = 10
_STORE_BYTES = 3 << 20
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
}
"""The last: oneDNN keeps a kernel for each of the last 1,024 shapes, 150 MiB in some thousands of
requests, which would hide a leak."""
_CONFIG = BlendConfig(
    store_bytes=_STORE_BYTES,
    min_segment_tokens=MIN_SEGMENT_TOKENS,
    compile_queue_depth=64,
    pass_budget_tokens=64,
)
_TRIES = 50


@dataclass
class Outcome:
    """What is left to say at the end.

    Args:
        seed: To repeat it.
        findings: Counts and problems.
        injected: Faults by kind.
        seconds: Of serving, and of checking.
        memory: Of the engine's process and of the clients', after each tenth, in bytes.
    """

    seed: int
    findings: Findings = field(default_factory=Findings)
    injected: dict[str, int] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)

    @property
    def growth(self) -> tuple[float, float]:
        """Memory at the end over memory after the first tenth, less one."""
        first, last = self.memory[0], self.memory[-1]
        return last[0] / first[0] - 1, last[1] / first[1] - 1


async def soak(folder: Path, *, num_requests: int, seed: int) -> Outcome:
    """Serve so many requests, and check everything.

    Args:
        folder: For the model.
        num_requests: Of all kinds.
        seed: Of requests and of faults.
    """
    outcome = Outcome(seed)
    async with _engine(folder) as engine:
        await engine.collective_rpc("soak_arm", args=(seed,))
        oracle = Oracle.load(folder, ballast_ids(engine.get_tokenizer()), BLOCK_SIZE)
        verifier = Verifier(oracle, outcome.findings)
        stream = Traffic(seed).draw(num_requests)
        while chapter := list(islice(stream, max(1, num_requests // _CHAPTERS))):
            await _chapter(engine, verifier, chapter, outcome)
    _conclude(outcome)
    return outcome


async def _chapter(
    engine: BlendAsyncLLM, verifier: Verifier, requests: list[Request], outcome: Outcome
) -> None:
    started = time.monotonic()
    endings = await serve(engine, requests, concurrency=CONCURRENCY)
    rest = await _at_rest(engine, outcome)
    served = time.monotonic()
    (pickled, *_) = await engine.collective_rpc("soak_chapter")
    chapter: Chapter = pickle.loads(pickled)
    verifier.check(endings, chapter)
    outcome.injected = chapter.totals
    findings = outcome.findings
    findings.counts["requests"] += len(requests)
    findings.counts["preemptions"] = chapter.num_preemptions
    findings.counts["evictions"] = rest.evictions
    findings.expect(
        findings.counts["failed loads"] == rest.load_failures,
        f"{rest.load_failures} load failures counted, {findings.counts['failed loads']} happened",
    )
    outcome.memory.append((rest.rss_bytes, resident_bytes()))
    outcome.seconds["serving"] += served - started
    outcome.seconds["checking"] += time.monotonic() - served


async def _at_rest(engine: BlendAsyncLLM, outcome: Outcome) -> Rest:
    """Wait for background compiles and for whatever a step's end leaves to the next."""
    async with asyncio.timeout(600):
        while engine.compile_queue_depth:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
    for number in range(_TRIES):
        step = Request(
            name=f"step{number}",
            kind=Kind.CHAT,
            tenant="nobody",
            token_ids=tuple(random_ids(number, 5)),
        )
        await serve(engine, [step], concurrency=1)
        (pickled, *_) = await engine.collective_rpc("soak_rest")
        rest: Rest = pickle.loads(pickled)
        if not rest.left:
            break
    for name, what in rest.left.items():
        outcome.findings.expect(False, f"at rest, {name}: {what[:200]}")
    outcome.findings.expect(not engine.errored, "the engine is dead")
    return rest


@asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[BlendAsyncLLM]:
    with (
        mock.patch.dict(os.environ, _ENVIRONMENT),
        mock.patch("blend_engine.async_engine.WORKER_EXTENSION", EXTENSION),
    ):
        engine = await start_async_engine(
            replace(BLENDED[0], name="soak"),
            folder,
            _CONFIG,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_num_batched_tokens=256,
            max_num_seqs=CONCURRENCY,
            # vLLM moves the worker out of the engine's process on CPUs, unless it is told so.
            distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        )
        try:
            assert engine.unsupported_reason is None
            yield engine
        finally:
            engine.shutdown()


def _conclude(outcome: Outcome) -> None:
    findings, counts = outcome.findings, outcome.findings.counts
    for kind in ("damaged", "truncated", "evicted", "slow", "no_memory"):
        _must_happen(findings, f"fault {kind}", outcome.injected.get(kind, 0))
    for kind in ("call_without_memory", "worker_raises", "no_slab", "compile_fails", "store_full"):
        _must_happen(findings, f"fault {kind}", outcome.injected.get(kind, 0))
    for name in ("preemptions", "evictions", "tokens found in vLLM's cache", "passes cancelled"):
        _must_happen(findings, name, counts[name])
    for process, growth in zip(("engine", "clients"), outcome.growth, strict=True):
        findings.expect(growth <= MEMORY_GROWTH, f"memory of the {process}' process: {growth:+.1%}")


def _must_happen(findings: Findings, name: str, count: int) -> None:
    findings.expect(count > 0, f"{name}: none, so nothing is shown")
