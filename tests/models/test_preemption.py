"""Requests that vLLM preempts for want of blocks: they come back and end as if they were alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.models.engine import Served, counted_preemptions, serving, with_document
from tests.models.families import BLENDED
from tests.real.driver import Prompt, blend_params

from blend_engine.protocol import Policy

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
    document = served.ids(1000, DOCUMENT)
    return with_document(
        served, seed, document, before=20 + 3 * seed, after_seed=seed + 50, after=25
    )


def generate(served: Served, prompts: list[Prompt]) -> list[list[int]]:
    requests = [(each.ids, blend_params(each, Policy.SINKS, 0.2)) for each in prompts]
    answers = served.driver.generate_all(requests, max_tokens=NEW_TOKENS)
    return [answer.token_ids for answer in answers]


def test_preempted_requests_end_as_if_alone(
    cramped: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each resumed prompt is planned and blended again; what was generated before is kept."""
    prompts = [prompt(cramped, seed) for seed in range(NUM_REQUESTS)]
    cramped.driver.compile(prompts[0])
    alone = [generate(cramped, [each])[0] for each in prompts]
    assert len({tuple(tokens) for tokens in alone}) == NUM_REQUESTS

    preempted = counted_preemptions(cramped, monkeypatch)
    loaded = cramped.driver.scheduler.store_stats().loaded_tokens
    together = generate(cramped, prompts)
    assert preempted
    assert together == alone
    stats = cramped.driver.scheduler.store_stats()
    assert stats.loaded_tokens - loaded >= (NUM_REQUESTS + 1) * DOCUMENT
    assert (stats.num_leases, stats.num_load_failures) == (0, 0)
