"""Gemma 3 270M as trained: windowed and full layers, two RoPE bases, prompts beyond the window."""

import random
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
from tests.gateway.assembler.templates import GEMMA
from tests.models.engine import Served, serving_folder
from tests.models.families import Family
from tests.models.gemma_weights import PackagesUnavailable, prepare_gemma
from tests.models.moved_keys import moved_key_error
from tests.real.driver import Driver, Prompt, blend_params
from tests.real.texts import fact_document, question
from torch import Tensor

from blend_engine.preamble import ballast_ids, compile_prompt
from blend_engine.protocol import BlendReport, Policy, RequestParams
from blend_engine.segments import SegmentContext, SegmentSpan

WINDOW = 512
NUM_LAYERS, NUM_FULL = 18, 3
RATIOS = (0.15, 0.5, 1.0)
NUM_PROMPTS = 8
EQUAL = 1e-4
VISIBLE = 1e-2


class Gemma:
    """The loaded model, asked for first tokens alone."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.attached = driver.worker._attached
        assert self.attached is not None
        self.bos: int = driver.tokenizer.bos_token_id

    @cached_property
    def documents(self) -> list[list[int]]:
        return [self.driver.encode(fact_document(seed, 5)) for seed in range(6)]

    def prompt(self, seed: int) -> Prompt:
        """A leading segment, four documents in an order of the seed's, a question; compiled."""
        encode = self.driver.encode
        ids = [self.bos, *encode("Facts about some people, and what was asked about them.\n\n")]
        spans = [SegmentSpan(start=0, end=len(ids), context=SegmentContext.PREFIX)]
        for document in random.Random(seed).sample(self.documents, 4):
            start = len(ids)
            ids += document
            spans.append(SegmentSpan(start=start, end=len(ids), context=SegmentContext.FREE))
            ids += encode("\n\n")
        prompt = Prompt([*ids, *encode(f"Question: {question(seed)}\nAnswer:")], tuple(spans))
        self.driver.compile(prompt)
        return prompt

    def full(self, prompt: Prompt) -> Tensor:
        """Log-probabilities of the first token, by vLLM alone."""
        return self._first_token(prompt.ids, None)

    def blend(self, prompt: Prompt, policy: Policy, ratio: float) -> tuple[Tensor, BlendReport]:
        """Log-probabilities of the first token, and what was reused."""
        params = blend_params(prompt, policy, ratio)
        logprobs_V = self._first_token(prompt.ids, params)
        report = self.driver.report(params.plan_id)
        assert report is not None
        return logprobs_V, report

    def _first_token(self, ids: list[int], params: RequestParams | None) -> Tensor:
        """From the logits themselves: vLLM would make objects of 262,144 log-probabilities."""
        assert self.attached is not None
        model: Any = self.attached.model
        seen: list[Tensor] = []
        original = model.compute_logits

        def recording(*arguments: Any, **options: Any) -> Tensor:
            logits: Tensor = original(*arguments, **options)
            seen.append(logits[-1].float().clone())
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "compute_logits", recording)
            self.driver.ask(ids, params, salt=uuid.uuid4().hex, logprobs=None)
        return seen[-1].log_softmax(dim=-1)


def kl(full_V: Tensor, other_V: Tensor) -> float:
    """In nats."""
    return float((full_V.double().exp() * (full_V.double() - other_V.double())).sum())


def difference(one_V: Tensor, other_V: Tensor) -> float:
    return float((one_V - other_V).abs().max())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    try:
        folder = prepare_gemma()
    except PackagesUnavailable as error:
        pytest.skip(f"no weights of Gemma 3 270M: {error}")
    family = Family("gemma-3-270m", "gemma3_text", {}, num_ropes=2, engine={"max_model_len": 2048})
    with serving_folder(family, folder) as started:
        yield started


@pytest.fixture(scope="module")
def gemma(served: Served) -> Gemma:
    return Gemma(served.driver)


def test_it_is_blended_layer_by_layer(served: Served, gemma: Gemma) -> None:
    """Not refused; windowed and full layers keep metadata and a RoPE of their own."""
    assert served.refusal is None
    attached = gemma.attached
    assert attached is not None
    windows = {len(group.names): group.builder.window_size for group in attached.groups}
    assert windows.keys() == {NUM_LAYERS - NUM_FULL, NUM_FULL}
    # vLLM's kernel takes the number of earlier keys, or -1.
    assert windows[NUM_FULL] == -1
    assert WINDOW - 1 <= windows[NUM_LAYERS - NUM_FULL] <= WINDOW
    tables = attached.table_of_layer
    assert [tables.count(each) for each in (tables[0], tables[5])] == [
        NUM_LAYERS - NUM_FULL,
        NUM_FULL,
    ]


def test_the_weights_are_read_right(gemma: Gemma) -> None:
    """A model with one tensor or constant wrong goes on with anything."""
    ids = [gemma.bos, *gemma.driver.encode("Monday, Tuesday, Wednesday, Thursday,")]
    answer = gemma.driver.ask(ids, max_tokens=6, logprobs=None).outputs[0].text
    assert answer.startswith(" Friday, Saturday, Sunday")


@pytest.mark.parametrize("context", list(SegmentContext))
def test_beginning_of_sequence_stands_once(gemma: Gemma, context: SegmentContext) -> None:
    """First in what is compiled, in what a document is compiled behind, and in a chat."""
    from blend_gateway.assembler import Assembler

    tokenizer = gemma.driver.tokenizer
    template = pytest.MonkeyPatch()
    for chat_template in (None, GEMMA):
        template.setattr(tokenizer, "chat_template", chat_template)
        segment = gemma.documents[0]
        if context is SegmentContext.PREFIX:
            segment = ballast_ids(tokenizer)
        ids, _ = compile_prompt(tokenizer, context, segment)
        assert (ids[0], ids.count(gemma.bos)) == (gemma.bos, 1)
    chat = Assembler(tokenizer).assemble([{"role": "user", "content": "Where?"}])
    template.undo()
    assert chat is not None
    assert (chat.token_ids[0], chat.token_ids.count(gemma.bos)) == (gemma.bos, 1)


@pytest.mark.slow
def test_divergence_falls_to_nothing_with_the_ratio(gemma: Gemma) -> None:
    """Mean first-token KL, beyond the window; at ratio 1.0 each prompt gives full prefill's
    logits."""
    policies = (Policy.SINKS, Policy.HKVD)
    means = {policy: [0.0] * (1 + len(RATIOS)) for policy in policies}
    for seed in range(NUM_PROMPTS):
        prompt = gemma.prompt(seed)
        assert prompt.spans[-1].start > WINDOW
        full_V = gemma.full(prompt)
        reused_V, report = gemma.blend(prompt, Policy.NONE, 0.0)
        assert (report.recomputed_tokens, report.fallback_reason) == (0, None)
        for policy, sums in means.items():
            sums[0] += kl(full_V, reused_V) / NUM_PROMPTS
            for index, ratio in enumerate(RATIOS, 1):
                blended_V, report = gemma.blend(prompt, policy, ratio)
                sums[index] += kl(full_V, blended_V) / NUM_PROMPTS
            assert report.reused_tokens == 0
            assert difference(full_V, blended_V) < EQUAL
    print({policy.value: [round(mean, 5) for mean in sums] for policy, sums in means.items()})
    for policy, sums in means.items():
        assert sums == sorted(sums, reverse=True), f"{policy}: {sums}"
        assert sums[0] > VISIBLE, "full reuse must be visibly worse"


def test_a_pass_without_the_window_is_caught(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    """These prompts are long enough for it to matter."""
    prompt = gemma.prompt(0)
    full_V = gemma.full(prompt)
    assert gemma.attached is not None
    for layer in gemma.attached.layers.values():
        monkeypatch.setattr(layer.impl, "sliding_window", -1)
    assert difference(full_V, gemma.blend(prompt, Policy.SINKS, 1.0)[0]) > VISIBLE


def test_keys_of_every_layer_move_by_their_own_base(
    served: Served, gemma: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one base for all layers would be noticed, whichever it were."""
    attached = gemma.attached
    assert attached is not None
    right = moved_key_error(served)
    for table in set(attached.table_of_layer):
        one = replace(attached, table_of_layer=(table,) * NUM_LAYERS)
        monkeypatch.setattr(served.driver.worker, "_attached", one)
        assert moved_key_error(served) > 100 * right
    assert right < served.machine.key_noise
