"""Segments of every kind: long, tiny, empty, repeated, equal, and made of what a template is made
of."""

import uuid

import pytest
import torch
from tests.real.driver import Driver, Prompt, max_logprob_difference
from tests.real.texts import fact_document, question

from blend_engine.model_pass import ModelPass
from blend_engine.protocol import Policy, SegmentStatus
from blend_engine.segments import SegmentContext, SegmentSpan

DOSSIER = "Reference dossier 4815162342.\n\n" + (
    "The quick brown fox jumps over the lazy dog near the riverbank. " * 260
)


@pytest.mark.slow
def test_a_long_leading_segment_comes_back_as_it_was(driver: Driver) -> None:
    """3,600 tokens compiled, then loaded: identical greedy text, logits within 1e-4."""
    leading = driver.encode(DOSSIER)
    assert len(leading) > 3600
    ids = leading + driver.encode("\n\nQuestion: Summarize the passage in one sentence.\nAnswer:")
    prompt = Prompt(ids, (SegmentSpan(start=0, end=len(leading), context=SegmentContext.PREFIX),))
    full = driver.full(ids, max_tokens=32)
    driver.compile(prompt)
    loaded = driver.scheduler.store_stats().loaded_tokens
    reused = driver.blend(prompt, Policy.SINKS, 0.1, max_tokens=32)
    assert driver.scheduler.store_stats().loaded_tokens - loaded == len(leading)
    assert reused.token_ids == full.token_ids
    assert max_logprob_difference(full, reused) < 1e-4
    assert reused.report is not None
    assert reused.report.prefix_tokens == len(leading)


def test_a_whole_raw_prompt_as_leading_segment(driver: Driver) -> None:
    """Only the last token is left for vLLM: it samples from it."""
    ids = driver.encode(fact_document(51, 2))
    prompt = Prompt(ids, (SegmentSpan(start=0, end=len(ids), context=SegmentContext.PREFIX),))
    full = driver.full(ids, max_tokens=8)
    driver.compile(prompt)
    reused = driver.blend(prompt, Policy.NONE, 0.0, max_tokens=8)
    assert reused.token_ids == full.token_ids
    assert max_logprob_difference(full, reused) < 1e-4
    assert reused.report is not None
    assert (reused.report.prefix_tokens, reused.report.computed_tokens) == (len(ids) - 1, 1)


def test_three_sources_in_one_prompt(driver: Driver) -> None:
    """Blocks in vLLM's cache, a document in the store, and fresh text: all three are used."""
    documents = [driver.encode(fact_document(seed, 8)) for seed in (52, 53)]
    first = driver.prompt(documents[:1], question(52))
    second = driver.prompt(documents, question(53))
    driver.compile(second)
    salt = uuid.uuid4().hex
    driver.blend(first, Policy.SINKS, 1.0, salt=salt)
    answer = driver.blend(second, Policy.SINKS, 1.0, salt=salt)
    report = answer.report
    assert report is not None
    assert report.prefix_tokens >= 128
    assert report.recomputed_tokens >= len(documents[1])
    assert report.computed_tokens > 0
    assert max_logprob_difference(driver.full(second.ids), answer) < 1e-4


def test_an_equal_prompt_again_hits_its_own_blocks(driver: Driver) -> None:
    """A local hit that ends inside a document leaves less of it to plan, never a negative rest."""
    prompt = driver.prompt([driver.encode(fact_document(54, 9))], question(54))
    driver.compile(prompt)
    salt = uuid.uuid4().hex
    first = driver.blend(prompt, Policy.SINKS, 0.1, salt=salt)
    again = driver.blend(prompt, Policy.SINKS, 0.1, salt=salt)
    assert again.report is not None
    assert again.report.prefix_tokens >= 128
    assert again.report.approximate
    assert max_logprob_difference(first, again) < 1e-4


@pytest.mark.parametrize("policy", list(Policy))
def test_tiny_empty_repeated_and_control_token_documents(driver: Driver, policy: Policy) -> None:
    """One token, none, the same twice, an equal one, separators and control ids: each is just
    ids."""
    long = driver.encode(fact_document(55, 2))
    one = driver.encode(" yes")[:1]
    control = driver.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"]) * 3
    separators = driver.encode("\n\nDocument [1]\n\nfoo\n\n")
    documents = [long, one, [], control, separators, long, list(long)]
    prompt = driver.prompt(documents, question(55))
    driver.compile(prompt)
    answer = driver.blend(prompt, policy, 0.2)
    report = answer.report
    assert report is not None
    hits = [
        status
        for span, status in zip(prompt.spans, report.segments, strict=True)
        if span.num_tokens
    ]
    assert set(hits) == {SegmentStatus.HIT}
    blended = sum(len(document) for document in documents)
    assert report.reused_tokens + report.recomputed_tokens == blended
    assert driver.scheduler.store_stats().num_leases == 0
    full = driver.blend(prompt, policy if policy is not Policy.NONE else Policy.SINKS, 1.0)
    assert max_logprob_difference(driver.full(prompt.ids), full) < 1e-4


def test_a_miss_between_hits_is_computed_in_the_pass(driver: Driver) -> None:
    """A gap costs its own tokens and nothing else."""
    known = [driver.encode(fact_document(seed, 3)) for seed in (56, 57)]
    driver.compile(driver.prompt(known, "x"))
    prompt = driver.prompt([known[0], driver.encode(fact_document(58, 3)), known[1]], question(56))
    answer = driver.blend(prompt, Policy.SINKS, 1.0)
    assert answer.report is not None
    assert list(answer.report.segments[1:]) == [
        SegmentStatus.HIT,
        SegmentStatus.MISS,
        SegmentStatus.HIT,
    ]
    assert max_logprob_difference(driver.full(prompt.ids), answer) < 1e-4


def test_kv_lost_in_the_worker_is_computed_and_said(driver: Driver) -> None:
    """A failed load is a miss: the answer is the one without it, and the report names it."""
    ids = driver.encode(fact_document(59, 3))
    prompt = driver.prompt([ids], question(59))
    driver.compile(prompt)
    from tests.real.driver import TENANT

    from blend_engine.segments import segment_key

    driver.worker.pool.free(segment_key(TENANT, SegmentContext.FREE, ids))
    answer = driver.blend(prompt, Policy.SINKS, 0.1)
    assert answer.report is not None
    assert answer.report.segments[1] is SegmentStatus.FAILED
    assert answer.report.fallback_reason == "load_failed"
    assert max_logprob_difference(driver.full(prompt.ids), answer) < 1e-4
    again = driver.blend(prompt, Policy.SINKS, 0.1)
    assert again.report is not None
    assert again.report.segments[1] is SegmentStatus.MISS


def test_no_memory_is_a_miss_and_the_engine_lives(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile without room is not stored; a load without room is computed; answers stay right."""
    ids = driver.encode(fact_document(60, 3))
    prompt = driver.prompt([ids], question(60))

    def no_memory(*_args: object, **_kwargs: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ModelPass, "allocate", no_memory)
        driver.compile_ids(SegmentContext.FREE, ids)
    assert driver.stored(SegmentContext.FREE, ids) is None
    driver.compile(prompt)
    with monkeypatch.context() as patch:
        patch.setattr(ModelPass, "rotate", no_memory)
        answer = driver.blend(prompt, Policy.SINKS, 0.1)
    assert answer.report is not None
    assert answer.report.segments[1] is SegmentStatus.FAILED
    assert max_logprob_difference(driver.full(prompt.ids), answer) < 1e-4
    assert driver.scheduler.store_stats().num_leases == 0
