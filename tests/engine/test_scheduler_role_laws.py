"""Laws of the scheduler role whatever the order: no KV lost, no lease left, every token counted."""

import itertools
from collections import deque

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("vllm")

from tests.engine.vllm_steps import (
    BLOCK_SIZE,
    Request,
    Steps,
    blend_request,
    compile_request,
    document,
    drop_request,
    key_of,
)

from blend_engine.messages import BlendMetadata

pytestmark = pytest.mark.vllm


class AnyOrder(RuleBasedStateMachine):
    """Requests of all kinds, asked, admitted and ended at will; workers up to two steps behind."""

    DOCUMENTS = tuple(document(number, length) for number, length in enumerate((5, 9, 16, 33)))
    INDICES = st.integers(0, len(DOCUMENTS) - 1)

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps(store_tokens=48)
        self.built: deque[BlendMetadata] = deque()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_prompt_tokens: dict[str, int] = {}
        self.local_blocks = itertools.count(10_000)

    @rule(index=INDICES)
    def compile(self, index: int) -> None:
        self.waiting.append(compile_request(self.DOCUMENTS[index]))

    @rule(indices=st.lists(INDICES, max_size=3))
    def drop(self, indices: list[int]) -> None:
        self.waiting.append(drop_request(*(key_of(self.DOCUMENTS[index]) for index in indices)))

    @rule(indices=st.lists(INDICES, max_size=4), ratio=st.sampled_from([0.0, 0.1, 1.0]))
    def blend(self, indices: list[int], ratio: float) -> None:
        plan_id = f"plan-{len(self.num_prompt_tokens)}"
        documents = [self.DOCUMENTS[index] for index in indices]
        request = blend_request(*documents, plan_id=plan_id, recompute_ratio=ratio)
        self.num_prompt_tokens[plan_id] = len(request.prompt_token_ids)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def ask_only(self, data: st.DataObject) -> None:
        before = self.steps.scheduler.store_stats()
        self.steps.ask(data.draw(st.sampled_from(self.waiting)))
        assert self.steps.scheduler.store_stats() == before

    @precondition(lambda self: self.waiting)
    @rule(share=st.floats(0.0, 1.0))
    def admit(self, share: float) -> None:
        request = self.waiting.pop(0)
        num_local = int((len(request.prompt_token_ids) - 1) // BLOCK_SIZE * share)
        blocks = [next(self.local_blocks) for _ in range(num_local)]
        if self.steps.admit(request, local_blocks=blocks) is None:
            self.waiting.append(request)
        else:
            self.running.append(request)

    @precondition(lambda self: len(self.built) < 2)
    @rule()
    def build(self) -> None:
        self.built.append(self.steps.build())

    @precondition(lambda self: self.built)
    @rule()
    def run(self) -> None:
        ack = self.steps.worker.run(self.built.popleft())
        assert all(not outcome.failed_keys for outcome in ack.outcomes), "leased KV was freed"
        self.steps.acknowledge(ack)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.steps.finish(request)

    @invariant()
    def every_token_is_counted(self) -> None:
        for report in self.steps.reports:
            assert report.prompt_tokens == self.num_prompt_tokens[report.plan_id]
            assert report.computed_tokens >= 0
            assert report.prompt_tokens == (
                report.cached_tokens + report.recomputed_tokens + report.computed_tokens
            )
        reported = [report.plan_id for report in self.steps.reports]
        assert len(reported) == len(set(reported))

    @invariant()
    def store_keeps_its_budget(self) -> None:
        stats = self.steps.scheduler.store_stats()
        assert 0 <= stats.num_bytes <= stats.budget_bytes

    def teardown(self) -> None:
        while self.built:
            self.run()
        while self.waiting:
            self.admit(0.0)
            self.build()
            self.run()
        self.build()
        self.run()
        assert self.steps.num_leases == 0
        assert {report.plan_id for report in self.steps.reports} == set(self.num_prompt_tokens)
        assert self.steps.scheduler.store_stats().num_segments == len(self.steps.worker.held)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
