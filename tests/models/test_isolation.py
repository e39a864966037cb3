"""What others do, or have done, changes neither a tenant's KV nor its answers."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from tests.models.engine import CONFIG, Served, found_in_cache, serving
from tests.models.families import BLENDED
from tests.models.stepping import Stepper, compile_of, prompt_of, same_bytes, stepping
from tests.real.driver import Prompt, blend_params

from blend_engine import tracking
from blend_engine.pool import StoredSegment
from blend_engine.protocol import BlendReport, DropParams, Policy, SegmentStatus
from blend_engine.segments import SegmentContext, SegmentKey, SegmentSpan, segment_key

FREE, PREFIX = SegmentContext.FREE, SegmentContext.PREFIX
ALICE, BOB = "alice", "bob"
LENGTH = 60
NEW_TOKENS = 6
BLOCK_SIZE = 32


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Short compiles are one call here, those behind the ballast are cut into pieces."""
    family = replace(BLENDED[0], engine={"block_size": BLOCK_SIZE, "max_num_batched_tokens": 256})
    config = replace(CONFIG, pass_budget_tokens=128)
    with serving(family, tmp_path_factory.mktemp("model"), config) as started:
        assert started.refusal is None
        yield started


@pytest.fixture
def stepper(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepper]:
    with stepping(served, monkeypatch) as started:
        yield started


@dataclass(frozen=True)
class Tenant:
    """One tenant's requests to an engine, each by itself."""

    stepper: Stepper
    name: str

    def compile(
        self, document: list[int], context: SegmentContext = FREE, *, salt: str | None = None
    ) -> None:
        prompt_ids, params = compile_of(
            self.stepper.served, document, tenant=self.name, context=context
        )
        self.stepper.alone(prompt_ids, params, salt=salt)

    def stored(self, document: list[int], context: SegmentContext = FREE) -> StoredSegment | None:
        key = tracking.segment_key(self.name, context, document)
        return self.stepper.served.driver.worker.pool.get(key)

    def drop(self, document: list[int], context: SegmentContext = FREE) -> None:
        key = tracking.segment_key(self.name, context, document)
        self.stepper.alone([0], DropParams(plan_id=uuid.uuid4().hex, keys=(key,)))

    def ask(self, prompt: Prompt) -> tuple[list[int], BlendReport]:
        """Reuse all that there is."""
        params = replace(blend_params(prompt, Policy.NONE, 0.0), tenant=self.name)
        answer = self.stepper.alone(prompt.ids, params, NEW_TOKENS)
        report = self.stepper.served.driver.report(params.plan_id)
        assert report is not None
        return answer, report


def copied(segment: StoredSegment | None) -> StoredSegment:
    """As it is now, whatever becomes of it."""
    assert segment is not None
    return replace(segment, k_LTHD=segment.k_LTHD.clone(), v_LTHD=segment.v_LTHD.clone())


def test_one_tenants_kv_is_nothing_to_another(stepper: Stepper, served: Served) -> None:
    """Whatever hers holds, he misses it, computes his own, and gets the answers of his own."""
    alice, bob = Tenant(stepper, ALICE), Tenant(stepper, BOB)
    document = served.ids(1, LENGTH)
    prompt = prompt_of(served, 2, LENGTH, document=1)
    exact = stepper.alone(prompt.ids, max_tokens=NEW_TOKENS)
    bob.compile(document)
    expected, his = bob.ask(prompt)[0], copied(bob.stored(document))
    bob.drop(document)

    noise = torch.randn_like(his.k_LTHD)
    hers = StoredSegment.seal(noise, noise.flip(1).contiguous(), his.start)
    alice.compile(document)
    served.driver.worker.pool.put(segment_key(ALICE, FREE, document), hers)
    assert alice.ask(prompt)[0] not in (exact, expected)
    answer, report = bob.ask(prompt)
    assert answer == exact
    assert report.segments == (SegmentStatus.MISS,)
    assert (report.loaded_tokens, report.prefix_tokens) == (0, 0)
    bob.compile(document)
    assert same_bytes(bob.stored(document), his)
    assert bob.ask(prompt)[0] == expected

    bob.drop(document)
    assert bob.stored(document) is None
    assert alice.stored(document) is hers
    alice.drop(document)


@pytest.mark.parametrize("other", [ALICE, BOB])
def test_documents_whose_keys_collide_are_not_taken_for_each_other(
    stepper: Stepper, served: Served, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Whose they are, and however they come: one after the other, or in one step."""
    key = SegmentKey("0" * 64)
    monkeypatch.setattr(tracking, "segment_key", lambda *_arguments: key)
    first, second = Tenant(stepper, ALICE), Tenant(stepper, other)
    documents = served.ids(10, LENGTH), served.ids(11, LENGTH)
    prompts = [prompt_of(served, 12, LENGTH, document=seed) for seed in (10, 11)]
    exact = [stepper.alone(prompt.ids, max_tokens=NEW_TOKENS) for prompt in prompts]
    first.compile(documents[0])
    hers = copied(first.stored(documents[0]))
    expected = first.ask(prompts[0])[0]
    assert expected != exact[0]
    for _ in range(2):
        answer, report = second.ask(prompts[1])
        assert (answer, report.segments) == (exact[1], (SegmentStatus.MISS,))
        assert report.loaded_tokens == 0
        second.compile(documents[1])
        assert same_bytes(first.stored(documents[0]), hers)
        assert first.ask(prompts[0])[0] == expected
    first.drop(documents[0])

    for owner, document in zip((first, second), documents, strict=True):
        stepper.add(*compile_of(served, document, tenant=owner.name))
    stepper.drain()
    assert same_bytes(first.stored(documents[0]), hers)
    assert first.ask(prompts[0])[0] == expected
    assert second.ask(prompts[1])[0] == exact[1]
    first.drop(documents[0])


Neighbour = Callable[[Stepper, list[int], list[int], str], None]
"""Does its worst, given a document, the prompt that compiles it next, and that prompt's salt."""


def poisoned_blocks(
    stepper: Stepper, _document: list[int], compiling: list[int], salt: str
) -> None:
    """The whole prompt is in vLLM's cache, under its salt, and its KV is noise."""
    driver, mallory, text = stepper.served.driver, Tenant(stepper, "mallory"), compiling[:-1]
    mallory.compile(text, PREFIX)
    right = mallory.stored(text, PREFIX)
    assert right is not None
    noise = torch.randn_like(right.k_LTHD)
    wrong = StoredSegment.seal(noise, noise.flip(1).contiguous(), right.start)
    driver.worker.pool.put(segment_key(mallory.name, PREFIX, text), wrong)
    span = SegmentSpan(start=0, end=len(text), context=PREFIX)
    params = blend_params(Prompt(compiling, (span,)), Policy.NONE, 0.0)
    stepper.alone(compiling, replace(params, tenant=mallory.name), salt=salt)
    poisoned = stepper.alone(compiling, max_tokens=NEW_TOKENS, salt=salt)
    assert poisoned != stepper.alone(compiling, max_tokens=NEW_TOKENS)


def a_full_step(stepper: Stepper, document: list[int], _compiling: list[int], _salt: str) -> None:
    """Decoding, chunked prefill, passes and another compile, all of them under way."""
    served = stepper.served
    prompt = prompt_of(served, 22, LENGTH, document=20)
    Tenant(stepper, "mallory").compile(served.ids(20, LENGTH))
    params = blend_params(prompt, Policy.HKVD, 0.5)
    stepper.add(served.ids(23, 40), max_tokens=40)
    stepper.step()
    stepper.step()
    stepper.add(served.ids(24, 500), max_tokens=2)
    for _ in range(2):
        asked = replace(params, tenant="mallory", plan_id=uuid.uuid4().hex)
        stepper.add(prompt.ids, asked, max_tokens=20)
    stepper.add(*compile_of(served, [*document[:-1], 7], tenant="mallory"))
    stepper.step()


def used_memory(stepper: Stepper, document: list[int], compiling: list[int], _salt: str) -> None:
    """Every block and much of the store was another's: texts that begin or end alike."""
    mallory = Tenant(stepper, "mallory")
    for text in (document[:-1], document[1:], document[::-1], compiling[:LENGTH]):
        mallory.compile(text)
    for number in range(8):
        stepper.add(stepper.served.ids(30 + number, 700), max_tokens=8)
    stepper.drain()


@pytest.mark.parametrize("context", [FREE, PREFIX])
@pytest.mark.parametrize("neighbour", [poisoned_blocks, a_full_step, used_memory])
def test_a_documents_kv_is_the_same_bits_whatever_was_served_before(
    stepper: Stepper,
    served: Served,
    neighbour: Neighbour,
    context: SegmentContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even blocks under the compile's own salt, which nobody can guess, are believed."""
    alice, document = Tenant(stepper, ALICE), served.ids(40, LENGTH)
    alice.compile(document, context)
    alone = copied(alice.stored(document, context))
    alice.drop(document, context)
    compiling, params = compile_of(served, document, tenant=ALICE, context=context)
    salt = uuid.uuid4().hex
    neighbour(stepper, document, compiling, salt)
    found = found_in_cache(served, monkeypatch)
    stepper.alone(compiling, params, salt=salt)
    assert (found[0] > 0) is (neighbour is poisoned_blocks)
    assert same_bytes(alice.stored(document, context), alone)
    alice.drop(document, context)
