"""Clients: they ask, read, hang up, and say how it ended for them."""

import asyncio
import math
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from tests.soak.traffic import Kind, Request

from blend_engine.async_engine import BlendAsyncLLM
from blend_engine.errors import ColdDocument
from blend_engine.protocol import BlendReport
from blend_engine.segments import segment_key

_PATIENCE_S = 120.0


@dataclass(slots=True)
class Ending:
    """How a request ended for its client.

    Args:
        request: What was asked.
        token_ids: What came of the answer.
        how: `done`, `hung up`, `cold`, `ready`, `not ready`, `dropped`, or what went wrong.
        report: What the engine says it did.
        reason: Why a compile has not stored its segment.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    how: str = "lost"
    report: BlendReport | None = None
    reason: str | None = None


async def serve(
    engine: BlendAsyncLLM, requests: Iterable[Request], *, concurrency: int
) -> list[Ending]:
    """Ask all, so many at once; returns when each has ended for its client."""
    stream = iter(requests)
    endings: list[Ending] = []

    async def client() -> None:
        for request in stream:
            ending = Ending(request)
            endings.append(ending)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await _ask(engine, ending)
            except Exception as error:  # noqa: BLE001 - whatever it is, the soak reports it
                ending.how = f"raised {type(error).__name__}: {error}"

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return endings


async def _ask(engine: BlendAsyncLLM, ending: Ending) -> None:
    request = ending.request
    if request.segment is None:
        await _chat_until_hung_up(engine, ending)
        return
    context, ids = request.segment.context, request.segment.token_ids
    if request.kind is Kind.DROP:
        await engine.drop([segment_key(request.tenant, context, ids)])
        ending.how = "dropped"
        return
    outcome = await engine.compile(tenant=request.tenant, context=context, token_ids=ids)
    ending.how = "ready" if outcome.ready else "not ready"
    ending.reason = outcome.reason


async def _chat_until_hung_up(engine: BlendAsyncLLM, ending: Ending) -> None:
    if ending.request.abort_after_s is None:
        await _chat(engine, ending)
        return
    task = asyncio.create_task(_chat(engine, ending))
    done, _ = await asyncio.wait([task], timeout=ending.request.abort_after_s)
    if done:
        await task
        return
    task.cancel()
    await asyncio.wait([task])
    ending.how = "hung up"


async def _chat(engine: BlendAsyncLLM, ending: Ending) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    request, params = ending.request, ending.request.params
    extra = {"kv_transfer_params": params.to_kv_transfer_params()} if params else None
    stream = engine.generate(
        TokensPrompt(prompt_token_ids=list(request.token_ids), cache_salt=request.salt),
        SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, extra_args=extra
        ),
        request.name,
    )
    try:
        async with aclosing(stream):
            async for output in stream:
                ending.token_ids = list(output.outputs[0].token_ids)
                if len(ending.token_ids) >= (request.abort_after_tokens or math.inf):
                    ending.how = "hung up"
                    return
        ending.how = "done"
    except ColdDocument:
        ending.how = "cold"
    finally:
        if params is not None:
            ending.report = engine._mirror.report(params.plan_id)
