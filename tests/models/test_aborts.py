"""A request is aborted at every stage of its life: nothing is kept of it, and the next is right."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.models.engine import CONFIG, Served, serving
from tests.models.families import BLENDED
from tests.models.stepping import (
    Stepper,
    check_at_rest,
    compile_of,
    prompt_of,
    same_bytes,
    stepping,
)
from tests.real.driver import TENANT, blend_params

from blend_engine.model_pass import ModelPass
from blend_engine.protocol import BlendParams, DropParams, Policy, RequestParams
from blend_engine.segments import SegmentContext, segment_key
from blend_engine.tracking import TrackedRequest
from blend_engine.worker import BlendWorker

BUDGET, STEP_TOKENS, MAX_NUM_SEQS = 64, 128, 3
SHORT, LONG, VERY_LONG = 40, 150, 300
NEW_TOKENS = 6
DOCUMENTS = {SHORT: 1, LONG: 2}


@dataclass
class Life:
    """One request that is going to be aborted, and the engine around it.

    Args:
        stepper: The engine.
        ids: The request's prompt.
        params: What it asks for.
        request_id: Its name, once it is handed in.
        beside: Others that run meanwhile.
        is_aborted: Whether it was.
        patch: What makes the engine abort it in a step; undone after it.
    """

    stepper: Stepper
    ids: list[int]
    params: RequestParams
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    request_id: str = ""
    beside: list[tuple[str, list[int], BlendParams | None]] = field(default_factory=list)
    is_aborted: bool = False
    patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    def begin(self) -> None:
        self.request_id = self.stepper.add(
            self.ids, self.params, max_tokens=NEW_TOKENS, salt=self.salt
        )

    def abort(self) -> None:
        self.stepper.engine.abort_request([self.request_id])
        self.is_aborted = True

    def abort_in(self, owner: type, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
        """Abort it as soon as the engine calls a method of ours, within the step."""
        original = getattr(owner, name)

        def aborting(this: Any, *arguments: Any, **options: Any) -> Any:
            if not self.is_aborted and when(*arguments):
                self.abort()
            return original(this, *arguments, **options)

        self.patch.setattr(owner, name, aborting)

    def run_beside(
        self, ids: list[int], params: BlendParams | None = None, *, new_tokens: int = NEW_TOKENS
    ) -> None:
        """Another request, which must not feel the abort."""
        request_id = self.stepper.add(ids, params, max_tokens=new_tokens)
        self.beside.append((request_id, ids, params))

    def check_beside(self) -> None:
        """Each is answered as if it were alone."""
        for request_id, ids, params in self.beside:
            answer = self.stepper.tokens[request_id]
            again = None if params is None else replace(params, plan_id=uuid.uuid4().hex)
            assert answer
            assert self.stepper.alone(ids, again, len(answer)) == answer

    @property
    def tracked(self) -> TrackedRequest | None:
        """What the scheduler role knows of it."""
        requests = self.stepper.served.driver.scheduler._requests._requests
        return next((tracked for name, tracked in requests.items() if self._is_mine(name)), None)

    @property
    def vllm_request(self) -> Any:
        """VLLM's own record of it."""
        requests = self.stepper.vllm_scheduler.requests
        return next((each for name, each in requests.items() if self._is_mine(name)), None)

    @property
    def num_leases(self) -> int:
        return self.stepper.served.driver.scheduler.store_stats().num_leases

    @property
    def is_running(self) -> bool:
        return self.vllm_request in self.stepper.vllm_scheduler.running

    def _is_mine(self, name: str) -> bool:
        # vLLM adds a suffix of its own to the name.
        return name.startswith(self.request_id)


Stage = Callable[[Life], None]


def queued(life: Life) -> None:
    """All places are taken, so nobody has asked about it yet."""
    for seed in range(MAX_NUM_SEQS - len(life.beside)):
        life.run_beside(life.stepper.served.ids(700 + seed, 20))
    life.stepper.step()
    life.begin()
    life.stepper.step()
    assert life.vllm_request in life.stepper.vllm_scheduler.waiting
    assert life.tracked is None
    life.abort()


def deferred(life: Life) -> None:
    """Another pass has taken the step's budget."""
    driver = life.stepper.served.driver
    other = prompt_of(life.stepper.served, 710, SHORT, document=DOCUMENTS[SHORT])
    params = blend_params(other, Policy.SINKS, 0.5)
    life.run_beside(other.ids, params)
    life.begin()
    life.stepper.step()
    assert life.tracked is not None
    assert life.tracked.plan is not None
    assert life.tracked.plan.num_external_tokens > 0
    assert not life.is_running
    assert driver.report(life.params.plan_id) is None
    life.abort()


def planned(life: Life) -> None:
    """The scheduler has made up the step, the worker has yet to load."""
    leases = []

    def is_ordered(metadata: Any) -> bool:
        leases.append(life.num_leases)
        return bool(metadata.passes)

    life.abort_in(BlendWorker, "run", is_ordered)
    life.begin()
    life.stepper.step()
    assert leases[-1] == int(isinstance(life.params, BlendParams))


def planned_over_steps(life: Life) -> None:
    """Its leases are taken, its first slice leaves with the next step."""
    life.begin()
    life.stepper.step()
    assert life.stepper.in_flight == 1
    assert life.stepper.pass_tokens[-1] == 0
    life.abort()


def in_the_pass(life: Life) -> None:
    """The worker is computing it."""
    life.abort_in(ModelPass, "_call")
    life.begin()
    life.stepper.step()


def in_the_pass_over_steps(life: Life) -> None:
    """Some of its slices are computed."""
    life.begin()
    for _ in range(2):
        life.stepper.step()
    assert life.stepper.pass_tokens[-1] > 0
    assert life.stepper.in_flight == 1
    life.abort()


def in_the_last_slice(life: Life) -> None:
    """The pass ends in the step that it is aborted in."""
    life.abort_in(BlendWorker, "_end")
    life.begin()
    while not life.is_aborted:
        life.stepper.step()


def in_prefill(life: Life) -> None:
    """The pass is done, what follows the last hit is being prefilled in chunks."""
    life.begin()
    life.stepper.step()
    assert life.num_leases == 0
    assert life.stepper.served.driver.report(life.params.plan_id) is not None
    life.stepper.step()
    request = life.vllm_request
    assert SHORT < request.num_computed_tokens < request.num_prompt_tokens
    life.abort()


def in_decode(life: Life) -> None:
    """Some of its tokens are out."""
    life.begin()
    while len(life.stepper.tokens[life.request_id]) < 2:
        life.stepper.step()
    life.abort()


def finished(life: Life) -> None:
    """There is nothing left to abort."""
    life.begin()
    life.stepper.drain()
    assert life.stepper.tokens[life.request_id]
    life.abort()


def another_ones_turn(life: Life) -> None:
    """A compile over steps waits for the one before it."""
    other = compile_of(life.stepper.served, life.stepper.served.ids(41, LONG))
    life.stepper.add(*other)
    life.begin()
    for _ in range(2):
        life.stepper.step()
    assert life.tracked is not None
    assert not life.is_running
    life.abort()


def abort_at(stage: Stage, life: Life) -> None:
    """Take a request to a stage and abort it there, beside one that decodes."""
    life.run_beside(life.stepper.served.ids(30, 20), new_tokens=30)
    try:
        stage(life)
    finally:
        life.patch.undo()
    assert life.is_aborted
    life.stepper.drain()
    check_at_rest(life.stepper)
    life.check_beside()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family = replace(
        BLENDED[0],
        engine={
            "block_size": 32,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": STEP_TOKENS,
        },
    )
    config = replace(CONFIG, pass_budget_tokens=BUDGET)
    with serving(family, tmp_path_factory.mktemp("model"), config) as started:
        assert started.refusal is None
        for length, seed in DOCUMENTS.items():
            started.driver.compile_ids(SegmentContext.FREE, started.ids(seed, length))
        yield started


@pytest.fixture
def stepper(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepper]:
    with stepping(served, monkeypatch) as started:
        yield started


@pytest.mark.parametrize(
    ("stage", "document", "after"),
    [
        (queued, SHORT, 9),
        (deferred, SHORT, 9),
        (planned, SHORT, 9),
        (planned_over_steps, LONG, 9),
        (in_the_pass, SHORT, 9),
        (in_the_pass_over_steps, LONG, 9),
        (in_the_last_slice, LONG, 9),
        (in_prefill, SHORT, VERY_LONG),
        (in_decode, SHORT, 9),
        (in_decode, LONG, 9),
        (finished, SHORT, 9),
        (finished, LONG, 9),
    ],
)
def test_an_aborted_request_leaves_nothing_behind(
    stepper: Stepper, served: Served, stage: Stage, document: int, after: int
) -> None:
    """Neither leases nor blocks; those beside it and the next one are answered as if alone."""
    prompt = prompt_of(served, 20, document, document=DOCUMENTS[document], after=after)
    params = blend_params(prompt, Policy.SINKS, 0.5)
    expected = stepper.alone(prompt.ids, params, NEW_TOKENS)
    life = Life(stepper, prompt.ids, replace(params, plan_id=uuid.uuid4().hex))
    abort_at(stage, life)
    for salt in (life.salt, None):
        again = replace(params, plan_id=uuid.uuid4().hex)
        assert stepper.alone(prompt.ids, again, NEW_TOKENS, salt=salt) == expected
        report = served.driver.report(again.plan_id)
        assert report is not None
        assert report.loaded_tokens + report.prefix_tokens >= document


@pytest.mark.parametrize(
    ("stage", "context"),
    [
        (queued, SegmentContext.PREFIX),
        (planned, SegmentContext.PREFIX),
        (in_the_pass, SegmentContext.PREFIX),
        (finished, SegmentContext.PREFIX),
        (another_ones_turn, SegmentContext.FREE),
        (planned_over_steps, SegmentContext.FREE),
        (in_the_pass_over_steps, SegmentContext.FREE),
        (in_the_last_slice, SegmentContext.FREE),
        (finished, SegmentContext.FREE),
    ],
)
def test_an_aborted_compile_stores_all_or_nothing(
    stepper: Stepper, served: Served, stage: Stage, context: SegmentContext
) -> None:
    """What it leaves, and what the next one makes, is what a compile alone makes."""
    ids = served.ids(40, SHORT)
    driver = served.driver
    driver.compile_ids(context, ids)
    expected = driver.stored(context, ids)
    stepper.alone([0], DropParams(plan_id="before", keys=(segment_key(TENANT, context, ids),)))
    prompt_ids, params = compile_of(served, ids, context=context)
    abort_at(stage, Life(stepper, prompt_ids, params))
    left = driver.stored(context, ids)
    assert left is None or same_bytes(left, expected)
    stepper.alone(*compile_of(served, ids, context=context))
    assert same_bytes(driver.stored(context, ids), expected)
    stepper.alone([0], DropParams(plan_id="after", keys=(segment_key(TENANT, context, ids),)))


def test_an_aborted_removal_removes_nothing(stepper: Stepper, served: Served) -> None:
    """While it waits for a pass that uses the segment; asked again, it removes it."""
    ids = served.ids(50, LONG)
    driver = served.driver
    driver.compile_ids(SegmentContext.FREE, ids)
    prompt = prompt_of(served, 51, LONG, document=50)
    params = blend_params(prompt, Policy.SINKS, 0.5)
    expected = stepper.alone(prompt.ids, params, NEW_TOKENS)
    key = segment_key(TENANT, SegmentContext.FREE, ids)
    again = replace(params, plan_id=uuid.uuid4().hex)
    using = stepper.add(prompt.ids, again, max_tokens=NEW_TOKENS)
    stepper.step()
    removing = stepper.add([0], DropParams(plan_id="first", keys=(key,)))
    stepper.step()
    stepper.engine.abort_request([removing])
    stepper.drain()
    assert stepper.tokens[using] == expected
    assert driver.stored(SegmentContext.FREE, ids) is not None
    check_at_rest(stepper)
    stepper.alone([0], DropParams(plan_id="second", keys=(key,)))
    assert driver.stored(SegmentContext.FREE, ids) is None
