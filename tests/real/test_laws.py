"""Laws of the pass on the real model, in fp32, against vLLM's own full prefill."""

import random

import pytest
from tests.real.driver import Driver, Prompt, kl_divergence, max_logprob_difference
from tests.real.texts import fact_document, question

from blend_engine.protocol import Policy

RATIOS = (0.0, 0.05, 0.15, 0.5, 1.0)
NUM_PROMPTS = 20


def _prompt(driver: Driver, seed: int, num_documents: int = 3, sentences: int = 3) -> Prompt:
    documents = [
        driver.encode(fact_document(100 * seed + n, sentences)) for n in range(num_documents)
    ]
    return driver.prompt(documents, question(seed))


@pytest.mark.parametrize("check_layer", [0, 1, 2])
def test_hkvd_at_ratio_one_equals_full_prefill(driver: Driver, check_layer: int) -> None:
    """Recomputing every token gives full prefill's logits, whatever the check layer."""
    prompt = _prompt(driver, 1)
    driver.compile(prompt)
    blended = driver.blend(prompt, Policy.HKVD, 1.0, check_layer=check_layer)
    assert blended.report is not None
    assert blended.report.recomputed_tokens == sum(s.num_tokens for s in prompt.spans[1:])
    assert max_logprob_difference(driver.full(prompt.ids), blended) < 1e-4


@pytest.mark.slow
def test_ratio_one_equals_full_prefill_in_pieces(driver: Driver) -> None:
    """A range of more than `max_num_batched_tokens` is computed in position order."""
    prompt = _prompt(driver, 2, num_documents=4, sentences=12)
    assert len(prompt.ids) > 1024
    driver.compile(prompt)
    blended = driver.blend(prompt, Policy.SINKS, 1.0)
    assert max_logprob_difference(driver.full(prompt.ids), blended) < 1e-4


@pytest.mark.slow
def test_divergence_falls_monotonically_with_the_ratio(driver: Driver) -> None:
    """Mean first-token KL over 20 prompts never rises with the ratio, for either policy."""
    documents = [driver.encode(fact_document(seed, 3)) for seed in range(8)]
    shuffle = random.Random(0)
    means = {policy: [0.0] * len(RATIOS) for policy in (Policy.SINKS, Policy.HKVD)}
    for seed in range(NUM_PROMPTS):
        prompt = driver.prompt(shuffle.sample(documents, 3), question(seed))
        driver.compile(prompt)
        full = driver.full(prompt.ids)
        reuse = kl_divergence(full, driver.blend(prompt, Policy.NONE, 0.0))
        for policy, sums in means.items():
            sums[0] += reuse / NUM_PROMPTS
            for index, ratio in enumerate(RATIOS[1:], 1):
                blended = driver.blend(prompt, policy, ratio)
                sums[index] += kl_divergence(full, blended) / NUM_PROMPTS
    print({policy.value: [round(mean, 5) for mean in sums] for policy, sums in means.items()})
    for policy, sums in means.items():
        assert sums == sorted(sums, reverse=True), f"{policy}: {sums}"
        assert sums[-1] < 1e-6
        assert sums[0] > 1e-3, "full reuse must be visibly worse"


def test_full_reuse_reports_every_token_and_a_load(driver: Driver) -> None:
    """Policy none recomputes nothing; the load counter proves that the KV came from the store."""
    prompt = _prompt(driver, 3)
    driver.compile(prompt)
    before = driver.scheduler.store_stats().loaded_tokens
    report = driver.blend(prompt, Policy.NONE, 0.0).report
    assert report is not None
    documents = sum(span.num_tokens for span in prompt.spans[1:])
    leading = prompt.spans[0].num_tokens
    assert (report.prefix_tokens, report.reused_tokens) == (leading, documents)
    assert report.recomputed_tokens == 0
    assert report.computed_tokens == len(prompt.ids) - documents - leading
    assert driver.scheduler.store_stats().loaded_tokens - before == documents + leading
    assert driver.scheduler.store_stats().num_leases == 0
