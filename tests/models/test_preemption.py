"""Requests that vLLM preempts for want of blocks: they come back and end as if they were alone."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models.engine import Served, serving
from tests.models.families import BLENDED
from tests.real.driver import Prompt, blend_params

from blend_engine.protocol import Policy
from blend_engine.segments import SegmentContext, SegmentSpan

BLOCK_SIZE, NUM_BLOCKS = 32, 36
DOCUMENT, NUM_REQUESTS, NEW_TOKENS = 180, 4, 200


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A cache with room for two of the four requests."""
    family = replace(
        BLENDED[0], engine={"block_size": BLOCK_SIZE, "num_gpu_blocks_override": NUM_BLOCKS}
    )
    folder: Path = tmp_path_factory.mktemp("model")
    with serving(family, folder) as started:
        assert started.refusal is None
        yield started


def prompt(served: Served, seed: int) -> Prompt:
    """Fresh text, a document that all requests share at another place each, fresh text."""
    before, document = served.ids(seed, 20 + 3 * seed), served.ids(1000, DOCUMENT)
    span = SegmentSpan(start=len(before), end=len(before) + DOCUMENT, context=SegmentContext.FREE)
    return Prompt([*before, *document, *served.ids(seed + 50, 25)], (span,))


def generate(served: Served, prompts: list[Prompt]) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling: list[Any] = []
    for each in prompts:
        params = blend_params(each, Policy.SINKS, 0.2)
        sampling.append(
            SamplingParams(
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                temperature=0.0,
                extra_args={"kv_transfer_params": params.to_kv_transfer_params()},
            )
        )
    outputs = served.driver.llm.generate(
        [TokensPrompt(prompt_token_ids=each.ids, cache_salt=uuid.uuid4().hex) for each in prompts],
        sampling,
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_preempted_requests_end_as_if_alone(
    cramped: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each resumed prompt is planned and blended again; what was generated before is kept."""
    prompts = [prompt(cramped, seed) for seed in range(NUM_REQUESTS)]
    cramped.driver.compile(prompts[0])
    alone = [generate(cramped, [each])[0] for each in prompts]
    assert len({tuple(tokens) for tokens in alone}) == NUM_REQUESTS

    scheduler = cramped.driver.llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    original = type(scheduler)._preempt_request

    def counting(this: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return original(this, request, *arguments, **options)

    monkeypatch.setattr(type(scheduler), "_preempt_request", counting)
    loaded = cramped.driver.scheduler.store_stats().loaded_tokens
    together = generate(cramped, prompts)
    assert preempted
    assert together == alone
    stats = cramped.driver.scheduler.store_stats()
    assert stats.loaded_tokens - loaded >= (NUM_REQUESTS + 1) * DOCUMENT
    assert (stats.num_leases, stats.num_load_failures) == (0, 0)
