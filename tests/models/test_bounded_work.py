"""Passes have a budget of each step: whoever decodes gets a token from every step meanwhile."""

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.models.engine import CONFIG, Served, serving
from tests.models.families import BLENDED
from tests.models.stepping import (
    Stepper,
    compile_of,
    num_blocks,
    num_free_blocks,
    prompt_of,
    stepping,
)
from tests.real.driver import TENANT, Prompt, blend_params, max_logprob_difference

from blend_engine.protocol import DropParams, Policy
from blend_engine.segments import SegmentContext, SegmentSpan, segment_key

BUDGET = 64
SYNCHRONOUS = BUDGET - BUDGET // 4
LONG = 150
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = replace(CONFIG, pass_budget_tokens=BUDGET)
    family = replace(BLENDED[0], engine={"block_size": 32})
    with serving(family, tmp_path_factory.mktemp("model"), config) as started:
        assert started.refusal is None
        yield started


@pytest.fixture
def stepper(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepper]:
    with stepping(served, monkeypatch) as started:
        yield started


def test_a_long_compile_takes_no_step_from_a_decode(stepper: Stepper, served: Served) -> None:
    """One token a step, and no step computes more of the compile than the budget allows."""
    chat = served.ids(1, 20)
    expected = stepper.alone(chat, max_tokens=80)
    ids = served.ids(2, LONG)
    decoding = stepper.add(chat, max_tokens=80)
    stepper.step()
    stepper.step()
    prompt_ids, params = compile_of(served, ids)
    compiling = stepper.add(prompt_ids, params)
    stepper.pass_tokens.clear()
    while not stepper.tokens[compiling]:
        before = len(stepper.tokens[decoding])
        stepper.step()
        assert len(stepper.tokens[decoding]) == before + 1
    assert sum(stepper.pass_tokens) == len(prompt_ids) - 1
    assert max(stepper.pass_tokens) <= BUDGET
    assert len(stepper.pass_tokens) > (len(prompt_ids) - 1) / BUDGET
    stepper.drain()
    assert stepper.tokens[decoding] == expected
    assert served.driver.stored(SegmentContext.FREE, ids).num_tokens == LONG


@pytest.mark.parametrize(
    ("policy", "ratio"), [(Policy.SINKS, 1.0), (Policy.SINKS, 0.5), (Policy.HKVD, 0.5)]
)
def test_a_long_pass_gives_the_same_answer_over_steps(
    stepper: Stepper, served: Served, policy: Policy, ratio: float
) -> None:
    """Spread over steps beside a decode, bit for bit what it is alone; at ratio 1.0 full prefill's.

    The pieces of a pass do not depend on what else runs.
    """
    prompt = prompt_of(served, 10, LONG, document=2)
    served.driver.compile(prompt)
    solo = served.driver.blend(prompt, policy, ratio, max_tokens=8)
    assert solo.report is not None
    assert solo.report.loaded_tokens == LONG
    if ratio == 1.0:
        full = served.driver.full(prompt.ids, max_tokens=8)
        assert max_logprob_difference(full, solo) < TOLERANCE
        assert full.token_ids == solo.token_ids
    decoding = stepper.add(served.ids(3, 20), max_tokens=60)
    stepper.step()
    stepper.step()
    blending = stepper.add(prompt.ids, blend_params(prompt, policy, ratio), max_tokens=8)
    stepper.pass_tokens.clear()
    while not stepper.tokens[blending]:
        before = len(stepper.tokens[decoding])
        stepper.step()
        assert len(stepper.tokens[decoding]) == before + 1
    assert len(stepper.pass_tokens) > 2
    if policy is Policy.SINKS:
        assert max(stepper.pass_tokens) <= BUDGET
    stepper.drain()
    assert stepper.tokens[blending] == solo.token_ids


def test_small_passes_wait_for_their_step(stepper: Stepper, served: Served) -> None:
    """Ten that come at once are admitted over several steps, each answered as if alone."""
    length = 40
    prompts = [prompt_of(served, 30 + 2 * seed, length, document=4) for seed in range(10)]
    served.driver.compile(prompts[0])
    plans = [blend_params(prompt, Policy.SINKS, 0.25) for prompt in prompts]
    solo = [stepper.alone(prompts[at].ids, plans[at], 4) for at in range(10)]
    stepper.pass_tokens.clear()
    requests = [
        stepper.add(prompt.ids, blend_params(prompt, Policy.SINKS, 0.25), max_tokens=4)
        for prompt in prompts
    ]
    stepper.drain()
    assert [stepper.tokens[request] for request in requests] == solo
    assert max(stepper.pass_tokens) <= SYNCHRONOUS
    assert sum(count > 0 for count in stepper.pass_tokens) > 3


def test_long_and_small_passes_share_a_step(stepper: Stepper, served: Served) -> None:
    """What a small one leaves is not a whole number of pieces; the sum stays in the budget."""
    length = 40
    prompts = [prompt_of(served, 130 + 2 * seed, length, document=4) for seed in range(4)]
    served.driver.compile(prompts[0])
    compiling = stepper.add(*compile_of(served, served.ids(140, LONG)))
    stepper.pass_tokens.clear()
    stepper.step()
    for prompt in prompts:
        stepper.add(prompt.ids, blend_params(prompt, Policy.SINKS, 0.25))
        stepper.step()
    assert not stepper.tokens[compiling]
    assert max(stepper.pass_tokens) > SYNCHRONOUS
    assert max(stepper.pass_tokens) <= BUDGET


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_a_long_pass_can_be_aborted_in_any_step(
    stepper: Stepper, served: Served, steps: int
) -> None:
    """Its leases, its blocks and its room in the store come back, and the next one succeeds."""
    prompt = prompt_of(served, 60, LONG, document=2)
    served.driver.compile(prompt)
    ids = served.ids(70 + steps, LONG)
    prompt_ids, params = compile_of(served, ids)
    bytes_before = served.driver.scheduler.store_stats().num_bytes
    requests = [
        stepper.add(prompt.ids, blend_params(prompt, Policy.SINKS, 1.0)),
        stepper.add(prompt_ids, params),
    ]
    for _ in range(steps):
        stepper.step()
    assert (stepper.in_flight > 0) == (steps > 0)
    stepper.engine.abort_request(requests)
    stepper.drain()
    assert num_free_blocks(served) == num_blocks(served)
    assert served.driver.scheduler.store_stats().num_bytes == bytes_before
    assert served.driver.worker._sliced == {}
    assert served.driver.stored(SegmentContext.FREE, ids) is None
    prompt_ids, params = compile_of(served, ids)
    stepper.add(prompt_ids, params)
    stepper.drain()
    assert served.driver.stored(SegmentContext.FREE, ids) is not None


def test_a_long_pass_may_hit_blocks_written_in_the_step_that_admits_it(
    stepper: Stepper, served: Served
) -> None:
    """vLLM publishes them before it writes them; the pass starts a step later."""
    head, document = served.ids(90, 64), served.ids(2, LONG)
    span = SegmentSpan(start=70, end=70 + LONG, context=SegmentContext.FREE)
    prompt = Prompt([*head, *served.ids(91, 6), *document, *served.ids(92, 9)], (span,))
    served.driver.compile(prompt)
    expected = stepper.alone(prompt.ids, blend_params(prompt, Policy.SINKS, 0.5), 6)
    salt = uuid.uuid4().hex
    stepper.add([*head, *served.ids(93, 5)], salt=salt)
    params = blend_params(prompt, Policy.SINKS, 0.5)
    second = stepper.add(prompt.ids, params, max_tokens=6, salt=salt)
    stepper.drain()
    report = served.driver.report(params.plan_id)
    assert report is not None
    assert report.prefix_tokens == 64
    assert stepper.tokens[second] == expected


def test_compiles_take_turns_and_users_go_first(stepper: Stepper, served: Served) -> None:
    """Of two long compiles one waits for the other, and a long pass that comes last ends first."""
    prompt = prompt_of(served, 110, LONG, document=2)
    served.driver.compile(prompt)
    compiles = [stepper.add(*compile_of(served, served.ids(seed, LONG))) for seed in (120, 121)]
    stepper.step()
    assert stepper.in_flight == 1
    blending = stepper.add(prompt.ids, blend_params(prompt, Policy.SINKS, 0.5))
    while not stepper.tokens[blending]:
        stepper.step()
    assert not stepper.tokens[compiles[0]]
    stepper.drain()
    assert all(stepper.tokens[request] for request in compiles)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_a_growing_block_table_loads_nothing_again(
    stepper: Stepper, served: Served, ratio: float
) -> None:
    """A decode only adds blocks, even once what its prompt loaded is gone from the store."""
    driver, prompt = served.driver, prompt_of(served, 80, 60, document=82)
    driver.compile(prompt)
    expected = stepper.alone(prompt.ids, blend_params(prompt, Policy.SINKS, ratio), max_tokens=80)
    before = driver.scheduler.store_stats()
    params = blend_params(prompt, Policy.SINKS, ratio)
    growing = stepper.add(prompt.ids, params, max_tokens=80)
    while not stepper.tokens[growing]:
        stepper.step()
    free = num_free_blocks(served)
    key = segment_key(TENANT, SegmentContext.FREE, prompt.segment(0))
    dropping = stepper.add([0], DropParams(plan_id=uuid.uuid4().hex, keys=(key,)))
    while not stepper.tokens[dropping]:
        stepper.step()
    assert driver.stored(SegmentContext.FREE, prompt.segment(0)) is None
    while len(stepper.tokens[growing]) < 75:
        stepper.step()
    assert free - num_free_blocks(served) >= 2
    stepper.drain()
    assert stepper.tokens[growing] == expected
    after = driver.scheduler.store_stats()
    assert after.loaded_tokens - before.loaded_tokens == 60
    assert after.num_load_failures == before.num_load_failures
