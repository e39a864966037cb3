"""Many requests at once, requests that are preempted, and requests that are given up."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.gpu.prompts import DOCUMENT, moved
from tests.models.engine import Served, counted_preemptions, with_document
from tests.real.driver import Answer, Prompt, blend_params, max_logprob_difference, same_text

from blend_engine.protocol import BlendParams, Policy

NUM_REQUESTS = 4
NEW_TOKENS = 104


def _one_document(served: Served, seed: int) -> Prompt:
    """Fresh text, a document that all requests share at another place each, fresh text."""
    document = served.ids(1000, 180)
    prompt = with_document(
        served, seed, document, before=20 + 3 * seed, after_seed=seed + 50, after=25
    )
    served.driver.compile(prompt)
    return prompt


def _blend(served: Served, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
    requests = [(each.ids, blend_params(each, Policy.SINKS, 0.25)) for each in prompts]
    return served.driver.generate_all(requests, max_tokens=max_tokens)


def test_preempted_requests_end_as_if_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has no room for what they grow to: some come back and are blended again."""
    prompts = [_one_document(served, seed) for seed in range(NUM_REQUESTS)]
    alone = [_blend(served, [each], NEW_TOKENS)[0] for each in prompts]
    assert len({tuple(answer.token_ids) for answer in alone}) == NUM_REQUESTS

    preempted = counted_preemptions(served, monkeypatch)
    together = _blend(served, prompts, NEW_TOKENS)
    assert preempted
    for one, other in zip(alone, together, strict=True):
        assert len(one.token_ids) == len(other.token_ids) == NEW_TOKENS
        assert max_logprob_difference(one, other) < served.noise
        assert same_text(one, other, served.noise)


def test_a_mixed_batch_answers_as_each_alone(served: Served) -> None:
    """Plain requests, blended ones at every policy, and prompts of one block, in one stream."""
    prompts = [moved(served, seed) for seed in (1, 2)]
    requests: list[Any] = [(served.ids(seed, 16 * (seed % 3 + 1)), None) for seed in range(20, 24)]
    for prompt in prompts:
        requests += [(prompt.ids, blend_params(prompt, policy, 0.25)) for policy in Policy] + [
            (prompt.ids, None)
        ]
    requests = requests[::2] + requests[1::2]
    alone = [served.driver.generate_all([each], max_tokens=8)[0] for each in requests]
    loaded = served.driver.scheduler.store_stats().loaded_tokens
    again = [(ids, _with_new_plan(params)) for ids, params in requests]
    together = served.driver.generate_all(again, max_tokens=8)
    num_blended = sum(params is not None for _, params in requests)
    assert served.driver.scheduler.store_stats().loaded_tokens - loaded >= (
        num_blended * 2 * DOCUMENT
    )
    for one, other in zip(alone, together, strict=True):
        assert max_logprob_difference(one, other) < served.noise
        assert same_text(one, other, served.noise)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_requests_given_up_leave_nothing(served: Served, num_steps: int) -> None:
    """Whatever had been done for them: no lease, and the next answer is right."""
    engine = served.driver.llm.llm_engine
    prompt = moved(served, 4)
    before = _blend(served, [prompt], 8)[0]
    names = [
        served.driver.add(prompt.ids, blend_params(prompt, Policy.HKVD, 0.25), max_tokens=64)
        for _ in range(3)
    ]
    for _ in range(num_steps):
        engine.step()
    engine.abort_request(names[1:])
    engine.step()
    engine.abort_request(names[:1])
    after = _blend(served, [prompt], 8)[0]
    assert max_logprob_difference(before, after) < served.noise
    assert same_text(before, after, served.noise)


def _with_new_plan(params: BlendParams | None) -> BlendParams | None:
    return params and replace(params, plan_id=uuid.uuid4().hex)
