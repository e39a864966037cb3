"""Laws of planner, index and pool together, in any order of requests, steps, acks and faults."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("vllm")

from tests.engine.store_books import StoreBooks
from tests.engine.traced_memory import TracedMemory, TracedPass, pool_segments, version_of
from tests.engine.vllm_model import VllmModel
from tests.engine.vllm_state import Live
from tests.engine.vllm_steps import (
    MIN_SEGMENT_TOKENS,
    QUESTION,
    Request,
    blend_request,
    compile_request,
    document,
    drop_request,
)

from blend_engine import pass_run, tracking, worker as worker_module
from blend_engine.budget import PassBudget
from blend_engine.config import BlendConfig
from blend_engine.protocol import Policy
from blend_engine.scheduler import BlendScheduler
from blend_engine.segments import SegmentContext, SegmentKey, segment_key
from blend_engine.worker import BlendWorker

pytestmark = pytest.mark.vllm

BLOCK_SIZE, NUM_BLOCKS, STEP_TOKENS = 4, 18, 20
STORE_TOKENS, BYTES_PER_TOKEN = 22, 2
PASS_TOKENS = 12
"""Of which passes that run in one step take 9 at most."""
TENANTS = ("acme", "globex")
TEXTS = tuple(document(number, length) for number, length in enumerate((5, 6, 6, 18, 3, 24)))
"""Of the usual lengths, leaving no room for another, too short, and longer than the store."""
TWINS = (1, 2)
"""Two texts whose keys collide, as keys of real texts never do."""

FEW = settings(
    derandomize=True,
    database=None,
    max_examples=600,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

tenants = st.sampled_from(TENANTS[:1] * 3 + TENANTS[1:])
usual_texts = st.sampled_from((0, 0, 1, 2, 3))
texts = usual_texts | st.integers(0, len(TEXTS) - 1)
leading_texts = st.sampled_from((0, 0, 1, None))
contexts = st.sampled_from((SegmentContext.FREE, SegmentContext.FREE, SegmentContext.PREFIX))
questions = st.sampled_from((QUESTION, QUESTION[:1], ()))
blend_params = st.fixed_dictionaries(
    {"policy": st.sampled_from(Policy), "recompute_ratio": st.sampled_from((0.0, 0.3, 1.0))}
)
segments = st.tuples(tenants, contexts, texts)


def colliding_key(tenant: str, context: SegmentContext, token_ids: Sequence[int]) -> SegmentKey:
    first, second = (TEXTS[index] for index in TWINS)
    return segment_key(tenant, context, first if list(token_ids) == second else token_ids)


KEYS = {
    (tenant, context, number): colliding_key(tenant, context, text)
    for tenant in TENANTS
    for context in SegmentContext
    for number, text in enumerate(TEXTS)
}
IDS = [np.asarray(text, dtype=np.int32) for text in TEXTS]


class StoreMachine(RuleBasedStateMachine):
    """Two tenants, a store of a few segments, a paged cache of a few requests."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        for target, name, double in (
            (tracking, "segment_key", colliding_key),
            (pass_run, "ModelPass", TracedPass),
            (worker_module, "attach", lambda model, *_: model),
            (worker_module, "check_model", lambda *_: None),
        ):
            self.patches.enter_context(mock.patch.object(target, name, double))
        logging.disable(logging.WARNING)
        self.patches.callback(logging.disable, logging.NOTSET)
        self.scheduler = BlendScheduler(
            BlendConfig(
                store_bytes=STORE_TOKENS * BYTES_PER_TOKEN, min_segment_tokens=MIN_SEGMENT_TOKENS
            ),
            block_size=BLOCK_SIZE,
            bytes_per_token=BYTES_PER_TOKEN,
            num_layers=TracedMemory.num_layers,
            budget=PassBudget.of_steps(PASS_TOKENS, STEP_TOKENS),
        )
        worker: Any = BlendWorker(None, SimpleNamespace(num_blocks=NUM_BLOCKS))
        self.memory = TracedMemory(
            worker.pool, block_size=BLOCK_SIZE, store_tokens=STORE_TOKENS, tenants=TENANTS
        )
        worker.attach_model(self.memory)
        self.engine = VllmModel(
            self.scheduler,
            worker,
            self.memory,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_tokens=STEP_TOKENS,
        )
        self.books = StoreBooks(self.engine)
        self.num_plans = 0

    @initialize(
        resumes_as_new=st.booleans(),
        loads_first=st.booleans(),
        stored=st.none() | st.lists(segments, min_size=1, max_size=4),
    )
    def start(
        self,
        resumes_as_new: bool,
        loads_first: bool,
        stored: list[tuple[str, SegmentContext, int]] | None,
    ) -> None:
        """Versions of vLLM differ, and some engines have served before."""
        self.engine.resumes_as_new = resumes_as_new
        self.engine.loads_first = loads_first
        if stored is not None:
            self.step(lag=0, keeps_external=True)
            for tenant, context, text in stored:
                self.compile((tenant, context, text))
            self._drain()

    # Requests.

    @rule(
        tenant=tenants,
        leading=leading_texts,
        parts=st.lists(texts, max_size=2),
        question=questions,
        params=blend_params,
        num_outputs=st.integers(1, 3),
        wants_logprobs=st.sampled_from((False,) * 7 + (True,)),
    )
    def use(
        self,
        tenant: str,
        leading: int | None,
        parts: list[int],
        question: Sequence[int],
        params: dict[str, Any],
        num_outputs: int,
        wants_logprobs: bool,
    ) -> None:
        request = self._prompt(tenant, leading, parts, question, **params)
        request.skip_reading_prefix_cache = wants_logprobs
        self._submit(request, tenant, "blend", num_outputs)

    @precondition(lambda self: any(self._stored_texts(tenant) for tenant in TENANTS))
    @rule(data=st.data(), leading=leading_texts, question=questions, params=blend_params)
    def use_what_is_stored(
        self,
        data: st.DataObject,
        leading: int | None,
        question: Sequence[int],
        params: dict[str, Any],
    ) -> None:
        """Perhaps right behind a plain request that begins alike: it writes what this one hits."""
        stored = [(who, text) for who in TENANTS for text in self._stored_texts(who)]
        tenant, text = data.draw(st.sampled_from(stored))
        # What misses in front of a hit is for the pass to compute, perhaps over several steps.
        parts = [*data.draw(st.lists(texts, max_size=1)), text]
        if data.draw(st.booleans()):
            self.plain(tenant, leading, parts, "blend")
        request = self._prompt(tenant, leading, parts, question, **params)
        self._submit(request, tenant, "blend", 1)

    @rule(
        tenant=tenants,
        leading=leading_texts,
        parts=st.lists(usual_texts, max_size=2),
        salt=st.sampled_from(("blend", "exact")),
    )
    def plain(self, tenant: str, leading: int | None, parts: list[int], salt: str) -> None:
        """A request that asks for nothing, next to those that do."""
        request = self._prompt(tenant, leading, parts, QUESTION)
        request.kv_transfer_params = None
        self._submit(request, tenant, salt, 1)

    @rule(segment=segments)
    def compile(self, segment: tuple[str, SegmentContext, int]) -> None:
        tenant, context, text = segment
        request = compile_request(TEXTS[text], context, tenant=tenant, plan_id=self._plan_id())
        self._submit(request, tenant, "compile", 1)

    @rule(named=st.lists(segments, max_size=2))
    def drop(self, named: list[tuple[str, SegmentContext, int]]) -> None:
        keys = [KEYS[segment] for segment in named]
        self._submit(drop_request(*keys, plan_id=self._plan_id()), TENANTS[0], "drop", 1)

    @precondition(lambda self: self.engine.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.engine.alive)))

    # What the engine does.

    @rule(lags=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def steps(self, lags: list[int]) -> None:
        for lag in lags:
            self.step(lag=lag, keeps_external=True)

    @rule(lag=st.integers(0, 2), keeps_external=st.booleans())
    def step(self, lag: int, keeps_external: bool) -> None:
        """Run a step; the scheduler has heard of all but the last few."""
        self.books.enter(self.engine.step(keeps_external=keeps_external))
        while len(self.engine.unheard) > lag:
            self.hear()

    @precondition(lambda self: self.engine.unheard)
    @rule()
    def hear(self) -> None:
        self.books.enter_heard(*self.engine.hear())

    @precondition(lambda self: self.engine.running)
    @rule(forgets=st.booleans())
    def preempt(self, forgets: bool) -> None:
        """For want of blocks, or to begin with an empty prefix cache."""
        self.engine.preempt()
        if forgets:
            self.engine.blocks.forget()

    # What goes wrong.

    @rule(data=st.data(), what=st.sampled_from(("load", "compute", "allocate", "capture", "read")))
    def fail(self, data: st.DataObject, what: str) -> None:
        stored = sorted(pool_segments(self.memory.pool))
        if what == "read" and stored:
            self.memory.damage(data.draw(st.sampled_from(stored)))
        else:
            # One at a time: a second failure in a row is vLLM's to see.
            self.memory.faults = Counter({what: 1})

    # Laws.

    @invariant()
    def nobody_read_or_wrote_what_is_wrong(self) -> None:
        assert not self.memory.broken

    @invariant()
    def store_keeps_its_budget(self) -> None:
        stats = self.scheduler.store_stats()
        assert 0 <= stats.num_bytes <= stats.budget_bytes
        entries = self.scheduler._index._entries.values()
        assert stats.num_bytes == sum(entry.num_bytes for entry in entries)

    @invariant()
    def leases_are_those_of_passes_under_way(self) -> None:
        counted = Counter(self.books.leased_keys())
        entries = self.scheduler._index._entries
        held = {key: entry.num_leases for key, entry in entries.items() if entry.num_leases}
        assert held == dict(counted)

    @invariant()
    def what_a_lookup_finds_is_held(self) -> None:
        for (tenant, context, number), key in KEYS.items():
            if self.scheduler._index.lookup(key, IDS[number], (tenant, context)):
                stored = self.memory.pool.get(key)
                assert stored is not None
                assert version_of(stored) not in self.books.lost
                # Damage on purpose is to the first token.
                assert stored.k_LTHD[0, 1:, 0, 0].tolist() == TEXTS[number][1:]

    def teardown(self) -> None:
        try:
            self._drain()
            self._check_the_end()
        finally:
            self.patches.close()

    def _drain(self) -> None:
        """Serve what is left, without new faults."""
        for _ in range(200):
            if not (self.engine.alive or self.engine.unheard):
                break
            self.step(lag=0, keeps_external=True)
            self.nobody_read_or_wrote_what_is_wrong()
            self.store_keeps_its_budget()
            self.leases_are_those_of_passes_under_way()
        assert not self.engine.alive, "requests that nobody serves"
        # One more, for orders to free what was removed last.
        self.step(lag=0, keeps_external=True)

    def _check_the_end(self) -> None:
        stats = self.scheduler.store_stats()
        assert stats.num_leases == 0
        entries = self.scheduler._index._entries
        assert set(entries) == set(pool_segments(self.memory.pool)) == self.memory.held_keys
        lookup = self.scheduler._index.lookup
        found = {
            key
            for (tenant, context, number), key in KEYS.items()
            if lookup(key, IDS[number], (tenant, context))
        }
        assert found == set(entries), "reservations or doomed segments are left"
        assert not self.scheduler._requests._requests
        assert not self.scheduler._blocks._blocks
        assert not self.scheduler._flights._flights
        assert not self.engine.open
        self.books.close(resident=found)

    def _stored_texts(self, tenant: str) -> list[int]:
        lookup, owner = self.scheduler._index.lookup, (tenant, SegmentContext.FREE)
        return [
            number
            for number in range(len(TEXTS))
            if lookup(KEYS[*owner, number], IDS[number], owner)
        ]

    def _prompt(
        self,
        tenant: str,
        leading: int | None,
        parts: list[int],
        question: Sequence[int],
        **params: Any,
    ) -> Request:
        if leading is None and not parts:
            question = QUESTION
        return blend_request(
            *(TEXTS[part] for part in parts),
            leading=() if leading is None else TEXTS[leading],
            question=question,
            tenant=tenant,
            plan_id=self._plan_id(),
            **params,
        )

    def _submit(self, request: Request, tenant: str, salt: str, num_outputs: int) -> None:
        self.engine.submit(Live(request, tenant, f"{tenant} {salt}", num_outputs))

    def _plan_id(self) -> str:
        self.num_plans += 1
        return f"plan-{self.num_plans}"


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = FEW
