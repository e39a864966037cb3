"""The gateway's engine on a tiny model: tenants apart, removals, a full queue, bad grammars."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from tests.models.engine import random_ids, start_async_engine
from tests.models.families import BLENDED

from blend_engine.async_engine import BlendAsyncLLM
from blend_engine.errors import ColdDocument, EngineBusy, InvalidBlendParams, InvalidGrammar
from blend_engine.protocol import BlendParams, BlendReport, Policy, SegmentStatus
from blend_engine.segments import SegmentContext, SegmentSpan, segment_key

pytestmark = pytest.mark.anyio

FREE = SegmentContext.FREE
MAX_QUEUED = 3


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[BlendAsyncLLM]:
    folder = tmp_path_factory.mktemp("model")
    started = await start_async_engine(BLENDED[0], folder, max_num_queued_reqs=MAX_QUEUED)
    try:
        assert started.unsupported_reason is None
        yield started
    finally:
        started.shutdown()


def blended(document: Sequence[int], tenant: str, **fields: Any) -> tuple[list[int], BlendParams]:
    """A prompt around a document, and what asks for the document's KV."""
    span = SegmentSpan(start=7, end=7 + len(document), context=FREE)
    params = BlendParams(
        plan_id=uuid.uuid4().hex,
        tenant=tenant,
        segments=(span,),
        policy=Policy.NONE,
        approximate_salt=True,
        **fields,
    )
    return [*random_ids(1, 7), *document, *random_ids(2, 9)], params


async def generate(
    engine: BlendAsyncLLM, ids: Sequence[int], params: BlendParams | None, **sampling: Any
) -> list[int]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    extra = {"kv_transfer_params": params.to_kv_transfer_params()} if params else None
    request_id = uuid.uuid4().hex
    stream = engine.generate(
        TokensPrompt(prompt_token_ids=list(ids), cache_salt=request_id),
        SamplingParams(temperature=0.0, extra_args=extra, **{"max_tokens": 4, **sampling}),
        request_id,
    )
    async with aclosing(stream):
        async for output in stream:
            last = output
    return list(last.outputs[0].token_ids)


async def report_of(engine: BlendAsyncLLM, document: Sequence[int], tenant: str) -> BlendReport:
    ids, params = blended(document, tenant)
    await generate(engine, ids, params)
    report = await engine.report(params.plan_id)
    assert report is not None
    return report


async def settled(engine: BlendAsyncLLM) -> None:
    """Wait for background compiles."""
    async with asyncio.timeout(60):
        while engine.compile_queue_depth:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)


async def test_tenants_share_nothing(engine: BlendAsyncLLM) -> None:
    """Through chats, compiles, strict mode, statuses and removals."""
    document = random_ids(10, 60)
    hers, his = (segment_key(tenant, FREE, document) for tenant in ("alice", "bob"))
    assert (await engine.compile(tenant="alice", context=FREE, token_ids=document)).key == hers
    assert engine.is_resident(hers)
    assert not engine.is_resident(his)
    ids, params = blended(document, "bob", strict=True)
    with pytest.raises(ColdDocument):
        await generate(engine, ids, params)
    assert not engine.is_compiling(his)
    ids, params = blended(document, "bob")
    exact = await generate(engine, ids, None)
    loaded = engine.store_stats().loaded_tokens
    assert await generate(engine, ids, params) == exact
    report = await engine.report(params.plan_id)
    assert report is not None
    assert report.segments == (SegmentStatus.MISS,)
    assert (report.cached_tokens, report.reused_tokens) == (0, 0)
    assert engine.store_stats().loaded_tokens == loaded
    await settled(engine)
    # His miss has made KV of his own, which goes alone.
    assert engine.store_stats().num_segments == 2
    await engine.drop([his])
    assert (engine.is_resident(hers), engine.is_resident(his)) == (True, False)
    assert (await report_of(engine, document, "alice")).segments == (SegmentStatus.HIT,)
    await engine.drop([hers])


async def test_a_request_that_missed_a_document_does_not_bring_it_back(
    engine: BlendAsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed while the answer to the request is on its way; the next one may compile it."""
    document = random_ids(20, 60)
    key = segment_key("alice", FREE, document)
    has_missed, may_go_on, report = asyncio.Event(), asyncio.Event(), engine.report

    async def held_up(plan_id: str) -> BlendReport | None:
        has_missed.set()
        await may_go_on.wait()
        return await report(plan_id)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "report", held_up)
        ids, params = blended(document, "alice")
        asking = asyncio.create_task(generate(engine, ids, params))
        await has_missed.wait()
        await engine.drop([key])
        may_go_on.set()
        await asking
    await settled(engine)
    assert not engine.is_resident(key)
    assert engine._unanswered == []
    await report_of(engine, document, "alice")
    await settled(engine)
    assert engine.is_resident(key)
    await engine.drop([key])


async def test_a_full_queue_is_an_error_of_ours(engine: BlendAsyncLLM) -> None:
    """Compiles and removals that vLLM does not admit can be asked for again."""
    document = random_ids(30, 60)
    key = segment_key("alice", FREE, document)
    busy = [
        asyncio.create_task(
            generate(engine, random_ids(31, 9), None, max_tokens=700, ignore_eos=True)
        )
        for _ in range(MAX_QUEUED)
    ]
    async with asyncio.timeout(60):
        while engine.get_num_unfinished_requests() < MAX_QUEUED:  # noqa: ASYNC110
            await asyncio.sleep(0)
    with pytest.raises(EngineBusy):
        await engine.compile(tenant="alice", context=FREE, token_ids=document)
    with pytest.raises(EngineBusy):
        await engine.drop([key])
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    assert (await engine.compile(tenant="alice", context=FREE, token_ids=document)).ready
    await engine.drop([key])
    assert not engine.is_resident(key)


async def test_a_grammar_that_cannot_be_compiled_is_the_clients_mistake(
    engine: BlendAsyncLLM,
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    ids, params = blended(random_ids(40, 60), "alice")
    # vLLM checks the second one with another library than its engine, by then, compiles with.
    good, bad = (StructuredOutputsParams(regex=regex) for regex in ("[a-z]", "(?i)[a-z]"))
    assert await generate(engine, ids, None, structured_outputs=good)
    for each in (params, None):
        with pytest.raises(InvalidGrammar):
            await generate(engine, ids, each, structured_outputs=bad)
    assert await generate(engine, ids, None, structured_outputs=good)


@pytest.mark.parametrize(
    ("changes", "salt", "complaint"),
    [
        ({"policy": Policy.HKVD, "check_layer": 99}, "s", "check_layer"),
        ({"segments": (SegmentSpan(start=7, end=999, context=FREE),)}, "s", "beyond"),
        ({}, None, "cache_salt"),
    ],
)
async def test_parameters_that_do_not_fit_their_request_are_refused(
    engine: BlendAsyncLLM, changes: dict[str, Any], salt: str | None, complaint: str
) -> None:
    """The scheduler role would serve them without blending, and nobody would be told."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    ids, params = blended(random_ids(50, 60), "alice")
    wire = replace(params, **changes).to_kv_transfer_params()
    prompt = TokensPrompt(prompt_token_ids=ids)
    if salt is not None:
        prompt["cache_salt"] = salt
    options = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": wire})
    with pytest.raises(InvalidBlendParams, match=complaint):
        await anext(engine.generate(prompt, options, uuid.uuid4().hex))
    assert engine._unanswered == []
    assert engine.get_num_unfinished_requests() == 0
