"""What vLLM's scheduler does to a prompt, and what a client asks of sampling, beside a pass.

Prompts of thousands of tokens in steps of a few hundred, prompts whose ends fall on a block's, and
every option that changes how often, or how, a prompt is sampled from.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.machines import CPU, CUDA_FP32, Machine, on_machines
from tests.models.engine import Served, serving, with_document
from tests.models.families import BLENDED, COMMON
from tests.real.driver import Prompt, blend_params, max_logprob_difference, same_text
from torch import Tensor
from vllm.sampling_params import StructuredOutputsParams

from blend_engine.protocol import BlendReport, FallbackReason, Policy
from blend_engine.segments import SegmentContext, SegmentSpan

LONG = 4096
DOCUMENT = 150
COLOURS = ("red", "green")
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": list(COLOURS)},
        "loud": {"type": "boolean"},
        "count": {"enum": [1, 22, 333]},
    },
    "required": ["colour", "loud", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Steps:
    """How an engine cuts prompts.

    Args:
        name: In test ids.
        step_tokens: Of one step at most.
        block_size: Tokens of a block.
        machines: Names of those that have such blocks.
        machine: The one that it runs on.
    """

    name: str
    step_tokens: int
    block_size: int
    machines: tuple[str, ...] = (CPU.name, CUDA_FP32.name)
    machine: Machine = CPU


# vLLM's CPU backend has blocks of 32 tokens at least.
SMALL_BLOCKS = Steps("256-by-16", 256, 16, machines=(CUDA_FP32.name,))
ENGINES = (SMALL_BLOCKS, Steps("256-by-32", 256, 32), Steps("512-by-128", 512, 128))


@pytest.fixture(scope="module", params=on_machines(ENGINES, CUDA_FP32))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    steps: Steps = request.param
    family = replace(
        BLENDED[0],
        config={**COMMON, "max_position_embeddings": 2 * LONG},
        engine={
            "block_size": steps.block_size,
            "max_num_batched_tokens": steps.step_tokens,
            "max_model_len": LONG + 64,
            # Random weights would write blanks for ever.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        },
        machine=steps.machine,
    )
    with serving(family, tmp_path_factory.mktemp("model")) as started:
        assert started.refusal is None
        yield started


def config_of(served: Served) -> Any:
    return served.driver.llm.llm_engine.vllm_config


def block_size(served: Served) -> int:
    return int(config_of(served).cache_config.block_size)


def checked(report: BlendReport | None) -> BlendReport:
    """The report, its counts added up."""
    assert report is not None
    counts = (report.prefix_tokens, report.reused_tokens, report.recomputed_tokens)
    assert sum(counts) + report.computed_tokens == report.prompt_tokens
    return report


def short(served: Served, seed: int) -> Prompt:
    """A document that is stored, between fresh text."""
    prompt = with_document(
        served, seed, served.ids(2, DOCUMENT), before=20, after_seed=seed + 1, after=45
    )
    served.driver.compile(prompt)
    return prompt


def long(served: Served, seed: int) -> Prompt:
    """4K tokens: a stored document, one that is not, a stored one, and much fresh text behind."""
    stored = [served.ids(2, 900), served.ids(3, 1100)]
    ids: list[int] = []
    spans = []
    for number, document in enumerate((stored[0], served.ids(seed, 700), stored[1])):
        ids += served.ids(seed + 1 + number, 30 + seed)
        end = len(ids) + len(document)
        spans.append(SegmentSpan(start=len(ids), end=end, context=SegmentContext.FREE))
        ids += document
    known = Prompt(ids, (spans[0], spans[2]))
    served.driver.compile(known)
    return Prompt([*ids, *served.ids(seed + 9, LONG - len(ids))], tuple(spans))


class TestLongPrompts:
    """Chunked prefill: a prompt takes many steps, and so does its pass."""

    @pytest.mark.parametrize("policy", [Policy.SINKS, Policy.HKVD])
    def test_recomputed_in_full_they_equal_full_prefill(
        self, served: Served, policy: Policy
    ) -> None:
        prompt = long(served, 100)
        full = served.driver.full(prompt.ids, max_tokens=6)
        # Just below 1.0 HKVD peeks, and still recomputes all.
        answer = served.driver.blend(prompt, policy, 0.9999, max_tokens=6)
        report = checked(answer.report)
        assert (report.loaded_tokens, report.recomputed_tokens) == (2000, 2000)
        assert report.fallback_reason is FallbackReason.MISS
        assert max_logprob_difference(full, answer) < served.noise
        assert same_text(full, answer, served.noise)

    def test_together_they_are_answered_as_if_alone(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blended, exact, and decoding, in one stream, and no step longer than it may be."""
        prompts = [long(served, seed) for seed in (120, 140, 160)]
        policies = [(Policy.SINKS, 0.05), (Policy.HKVD, 0.1), (Policy.NONE, 0.0)]

        def requests() -> list[Any]:
            blended = [
                (prompt.ids, blend_params(prompt, *policy))
                for prompt, policy in zip(prompts, policies, strict=True)
            ]
            return [(served.ids(180, 30), None), *blended, (prompts[0].ids, None)]

        alone = [served.driver.generate_all([each], max_tokens=12)[0] for each in requests()]
        scheduled = step_lengths(served, monkeypatch)
        together = served.driver.generate_all(requests(), max_tokens=12)
        step_tokens = config_of(served).scheduler_config.max_num_batched_tokens
        assert max(scheduled) <= step_tokens
        assert len(scheduled) > LONG / step_tokens
        for solo, other in zip(alone, together, strict=True):
            assert max_logprob_difference(solo, other) < served.noise
            assert same_text(solo, other, served.noise)
            if solo.report is not None:
                assert checked(other.report).loaded_tokens == 2000


class TestEdges:
    """Prompts whose documents and ends fall where a count could be off by one."""

    @pytest.mark.parametrize(
        ("before", "document", "after"),
        [
            (3, -8, 5),
            (0, 0, 0),
            (0, -1, 0),
            (0, -5, 2),
            (3, 40, 0),
            (3, 40, 1),
            (3, 40, 2),
        ],
        ids=[
            "one block",
            "one block, all of it a hit",
            "less than a block, all of it a hit",
            "less than a block",
            "all but the first tokens a hit",
            "one token behind the last hit",
            "two tokens behind the last hit",
        ],
    )
    def test_a_prompt_of_any_length_is_answered_like_full_prefill(
        self, served: Served, before: int, document: int, after: int
    ) -> None:
        """And so it is when it comes again and finds whatever vLLM has kept of it."""
        size = block_size(served)
        length = document if document > 0 else size + document
        prompt = with_document(
            served,
            200,
            served.ids(201 + length, length),
            before=before,
            after_seed=202,
            after=after,
        )
        served.driver.compile(prompt)
        full = served.driver.full(prompt.ids, max_tokens=6)
        usable = length - (after == 0)
        for policy, ratio in ((Policy.SINKS, 1.0), (Policy.NONE, 0.0)):
            salt = f"edge-{policy}-{before}-{document}-{after}"
            first = served.driver.blend(prompt, policy, ratio, max_tokens=6, salt=salt)
            report = checked(first.report)
            assert report.loaded_tokens == usable
            assert report.computed_tokens == before + max(after, 1)
            again = served.driver.blend(prompt, policy, ratio, max_tokens=6, salt=salt)
            cached = (len(prompt.ids) - 1) // size * size
            report = checked(again.report)
            assert report.prefix_tokens == cached
            assert report.loaded_tokens == max(0, before + usable - max(cached, before))
            assert max_logprob_difference(first, again) < served.noise
            assert same_text(first, again, served.noise)
            if ratio == 1.0:
                assert max_logprob_difference(full, first) < served.noise
                assert same_text(full, first, served.noise)

    @pytest.mark.parametrize("tail", [0, 1])
    def test_two_documents_and_nothing_else(self, served: Served, tail: int) -> None:
        """Whole blocks of hits and nothing between them; or one token behind them."""
        size = block_size(served)
        ids = [*served.ids(220, size), *served.ids(221, 2 * size)]
        spans = tuple(
            SegmentSpan(start=start, end=end, context=SegmentContext.FREE)
            for start, end in ((0, size), (size, 3 * size))
        )
        prompt = Prompt([*ids, *served.ids(222, tail)], spans)
        served.driver.compile(prompt)
        answer = served.driver.blend(prompt, Policy.SINKS, 1.0, max_tokens=6)
        report = checked(answer.report)
        assert (report.loaded_tokens, report.computed_tokens) == (3 * size - 1 + tail, 1)
        assert (report.fallback_reason, report.prefix_tokens) == (None, 0)
        full = served.driver.full(prompt.ids, max_tokens=6)
        assert max_logprob_difference(full, answer) < served.noise
        assert same_text(full, answer, served.noise)


class TestSampling:
    """A pass fills a prompt's KV, and whoever samples from it gets what full prefill gives."""

    @pytest.mark.parametrize("ratio", [0.1, 1.0])
    @pytest.mark.parametrize("make", [short, long])
    def test_every_choice_of_several_is_the_one_of_its_seed(
        self, served: Served, make: Any, ratio: float
    ) -> None:
        """Three choices are three requests under one salt, in one step where they fit.

        Each is what it is alone, and, with all recomputed, what it is by full prefill.
        """
        prompt = make(served, 240)
        sampling = {"max_tokens": 5, "temperature": 1.0, "logprobs": 3}
        params = blend_params(prompt, Policy.SINKS, ratio)
        choices = served.driver.ask(prompt.ids, params, n=3, seed=7, **sampling).outputs
        assert checked(served.driver.report(params.plan_id)).prompt_tokens == len(prompt.ids)
        assert served.driver.scheduler.store_stats().num_leases == 0
        for index, choice in enumerate(choices):
            other = blend_params(prompt, Policy.SINKS, ratio) if ratio < 1.0 else None
            (alone,) = served.driver.ask(prompt.ids, other, seed=7 + index, **sampling).outputs
            assert choice.index == index
            assert_equal_choices(alone, choice, served.noise)
        assert len({tuple(choice.token_ids) for choice in choices}) == 3

    def test_a_seed_draws_the_same_however_many_steps_a_prompt_takes(self, served: Served) -> None:
        """Many steps, or one where vLLM finds it in its cache; vLLM alone dies of it on CPUs."""
        ids, salt = served.ids(250, LONG), "seeded"
        sampling = {"max_tokens": 5, "temperature": 1.0, "logprobs": 3, "seed": 11, "salt": salt}
        (in_steps,) = served.driver.ask(ids, **sampling).outputs
        (at_once,) = served.driver.ask(ids, **sampling).outputs
        assert_equal_choices(at_once, in_steps, served.noise)

    def test_logprobs_of_every_token_are_full_prefills(self, served: Served) -> None:
        """Of each token sampled and the four likeliest beside it."""
        prompt = short(served, 260)
        sampling = {"max_tokens": 12, "logprobs": 4, "ignore_eos": True}
        (full,) = served.driver.ask(prompt.ids, **sampling).outputs
        params = blend_params(prompt, Policy.HKVD, 1.0)
        (blended,) = served.driver.ask(prompt.ids, params, **sampling).outputs
        assert checked(served.driver.report(params.plan_id)).recomputed_tokens == DOCUMENT
        assert [len(step) for step in blended.logprobs] >= [4] * 12
        assert_equal_choices(full, blended, served.noise)

    @pytest.mark.parametrize("make", [short, long])
    def test_a_json_schema_is_kept(self, served: Served, make: Any) -> None:
        """While a grammar is compiled, the request waits; its pass is planned after that."""
        prompt = make(served, 280)
        grammar = StructuredOutputsParams(json=SCHEMA)
        sampling = {"max_tokens": 60, "logprobs": 1, "structured_outputs": grammar}
        (full,) = served.driver.ask(prompt.ids, **sampling).outputs
        for policy, ratio in ((Policy.SINKS, 1.0), (Policy.SINKS, 0.1)):
            params = blend_params(prompt, policy, ratio)
            (blended,) = served.driver.ask(prompt.ids, params, **sampling).outputs
            # Not vLLM's text, which begins with the prompt's end where that is half a character.
            said = json.loads(
                served.driver.tokenizer.decode(blended.token_ids, skip_special_tokens=True)
            )
            assert said.keys() == set(SCHEMA["required"])
            assert said["colour"] in COLOURS
            assert checked(served.driver.report(params.plan_id)).loaded_tokens >= DOCUMENT
            if ratio == 1.0:
                assert_equal_choices(full, blended, served.noise)

    def test_prompt_logprobs_turn_blending_off(self, served: Served) -> None:
        """They need the hidden state of every token, which reuse skips; the report says why."""
        prompt = short(served, 300)
        driver, salt = served.driver, "prompt logprobs"
        driver.blend(prompt, Policy.NONE, 0.0, salt=salt)
        loaded = driver.scheduler.store_stats().loaded_tokens
        full = driver.ask(prompt.ids, prompt_logprobs=2)
        params = blend_params(prompt, Policy.NONE, 0.0)
        answer = driver.ask(prompt.ids, params, salt=salt, prompt_logprobs=2)
        report = checked(driver.report(params.plan_id))
        assert report.fallback_reason is FallbackReason.PROMPT_LOGPROBS
        assert (report.computed_tokens, report.approximate) == (len(prompt.ids), False)
        assert driver.scheduler.store_stats().loaded_tokens == loaded
        assert len(answer.prompt_logprobs) == len(prompt.ids)
        torch.testing.assert_close(
            values_of(answer.prompt_logprobs[1:], prompt.ids[1:]),
            values_of(full.prompt_logprobs[1:], prompt.ids[1:]),
            atol=served.noise,
            rtol=0,
        )
        assert_equal_choices(full.outputs[0], answer.outputs[0], served.noise)


def values_of(steps: Any, token_ids: Any) -> Tensor:
    """The log-probability of every token."""
    pairs = zip(steps, token_ids, strict=True)
    return torch.tensor([step[token].logprob for step, token in pairs])


def assert_equal_choices(one: Any, other: Any, noise: float) -> None:
    """The same tokens, as likely as each other, after the same alternatives."""
    assert list(one.token_ids) == list(other.token_ids)
    for expected, found in zip(one.logprobs, other.logprobs, strict=True):
        assert expected.keys() == found.keys()
        difference = values_of([expected] * len(expected), expected) - values_of(
            [found] * len(expected), expected
        )
        assert difference.abs().max() < noise


def step_lengths(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that vLLM schedules, per step from here on."""
    lengths: list[int] = []
    scheduler = served.driver.llm.llm_engine.engine_core.engine_core.scheduler
    original = scheduler.schedule

    def recording(*arguments: Any, **options: Any) -> Any:
        output = original(*arguments, **options)
        lengths.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", recording)
    return lengths
