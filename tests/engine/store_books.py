"""What a state machine expects of plans, reports and store events, from what was really done."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tests.engine.traced_memory import PassTrace
from tests.engine.vllm_model import BuiltStep, Live, Step, VllmModel

from blend_engine.messages import PassOrder, PassOutcome
from blend_engine.mirror import EngineMirror
from blend_engine.protocol import (
    BlendParams,
    BlendReport,
    CompileParams,
    SegmentStatus,
    StoreEvent,
    StoreEventKind,
    parse_request_params,
)
from blend_engine.reporting import BlendStats
from blend_engine.segments import SegmentKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """How many tokens of a prompt came from where, counted in the slots they were written to."""

    prefix: int
    reused: int = 0
    recomputed: int = 0
    computed: int
    loaded: int = 0
    local: int = 0
    hits: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()


class StoreBooks:
    """Double entry: orders and slots on one side, reports and events on the other.

    Args:
        engine: Whose books they are.
    """

    def __init__(self, engine: VllmModel) -> None:
        self._engine = engine
        self._accounts: dict[str, Account] = {}
        self._reported: set[str] = set()
        self._compiled: set[str] = set()
        self._joined: set[str] = set()
        self._ends: Counter[str] = Counter()
        self._mirror = EngineMirror()
        self._heard_keys: set[SegmentKey] = set()

    def leased_keys(self) -> list[SegmentKey]:
        """One per lease that a pass under way should hold."""
        orders = [order for step in self._engine.unheard for _, order, _ in step.orders]
        return [hit.key for order in orders for hit in order.plan.hits]

    # A step that was run.

    def enter(self, built: BuiltStep) -> None:
        step = self._engine.unheard[-1]
        outcomes = {outcome.pass_id: outcome for outcome in step.ack.outcomes}
        assert set(outcomes) == {order.pass_id for _, order, _ in built.orders}
        ordered = {live for live, _, _ in built.orders}
        for live, num_external in built.admitted:
            assert (live in ordered) == (num_external > 0)
            if live not in ordered:
                self._enter_unplanned(live)
        for live, order, trace in built.orders:
            self._check_plan(live, order)
            self._check_writes(built, live, order, trace)
            self._check_failures(order, outcomes[order.pass_id], trace)
            self._enter_capture(built, live, order)

    def _enter_unplanned(self, live: Live) -> None:
        params = parse_request_params(live.request.kv_transfer_params)
        if isinstance(params, BlendParams):
            self._accounts.setdefault(
                params.plan_id,
                Account(
                    prefix=live.num_local,
                    local=live.num_local,
                    computed=live.num_prompt - live.num_local,
                ),
            )
        elif isinstance(params, CompileParams):
            self._compiled.add(params.plan_id)

    def _check_plan(self, live: Live, order: PassOrder) -> None:
        """Local hit, hits, gaps and rest tile the prompt; hits are of the segments named."""
        plan = order.plan
        prompt = live.request.prompt_token_ids or []
        assert order.block_ids == tuple(live.block_ids[: len(order.block_ids)])
        assert order.token_ids.tolist() == prompt[: plan.covered_end]
        assert plan.num_computed == live.num_local < plan.covered_end < len(prompt)
        last_end = plan.num_computed
        params = parse_request_params(live.request.kv_transfer_params)
        for hit in plan.hits:
            assert isinstance(params, BlendParams)
            span = params.segments[hit.segment_index]
            assert last_end <= hit.start < hit.end <= plan.covered_end
            assert hit.start == max(span.start, plan.num_computed)
            assert hit.end == min(span.end, plan.covered_end)
            assert hit.offset == hit.start - span.start
            assert (hit.segment_tokens, hit.context) == (span.num_tokens, span.context)
            last_end = hit.end

    def _check_writes(
        self, built: BuiltStep, live: Live, order: PassOrder, trace: PassTrace
    ) -> None:
        """A pass fills its range, once, and in blocks of others only what they fill after it."""
        memory, plan = self._engine.memory, order.plan
        own = set(range(plan.num_computed, plan.covered_end))
        fresh = _positions(order.fresh_ranges)
        assert fresh <= set(range(plan.num_computed))
        assert trace.written == own | fresh
        assert not trace.exact & trace.blended
        assert not trace.exact & trace.computed
        written = {memory.slot(order.block_ids, position) for position in own}
        shared = {memory.slot(order.block_ids, position) for position in fresh}
        by_forward: set[int] = set()
        for other, rows in built.batch.items():
            slots = {memory.slot(rows.block_ids, at) for at in range(rows.start, rows.end)}
            assert not slots & written, "a slot was written by a pass and by the forward"
            if other is not live:
                by_forward |= slots
        if order.capture is None and isinstance(_params(live), BlendParams):
            assert shared <= by_forward, "fresh although nobody writes it"

    def _check_failures(self, order: PassOrder, outcome: PassOutcome, trace: PassTrace) -> None:
        """KV that is leased can be loaded, unless something was broken on purpose."""
        memory = self._engine.memory
        lost = set(outcome.failed_keys)
        assert lost == {hit.key for hit in order.plan.hits if memory.is_damaged(hit.key)}
        failed = {hit.segment_index for hit in order.plan.hits} & set(outcome.failed_segments)
        assert trace.is_faulted or failed == {
            hit.segment_index for hit in order.plan.hits if hit.key in lost
        }
        if order.capture is not None:
            assert outcome.captured != trace.is_faulted

    def _enter_capture(self, built: BuiltStep, live: Live, order: PassOrder) -> None:
        params = _params(live)
        if not isinstance(params, CompileParams):
            assert order.capture is None
            return
        self._compiled.add(params.plan_id)
        if order.capture is not None:
            assert (order.capture.start, order.capture.end) == (
                params.segment.start,
                params.segment.end,
            )
            return
        others = [*self._engine.unheard]
        if any(
            theirs.capture is not None and theirs.pass_id != order.pass_id
            for step in others
            for _, theirs, _ in step.orders
        ):
            self._joined.add(params.plan_id)

    # A step that the scheduler has heard of.

    def enter_heard(self, step: Step, stats: BlendStats | None) -> None:
        for live, order, trace in step.orders:
            params = _params(live)
            if isinstance(params, BlendParams):
                self._accounts.setdefault(params.plan_id, _account(live, order, trace))
        if stats is None:
            return
        self._mirror.observe(stats.data)
        for report in map(BlendReport.from_wire, stats.data["reports"]):
            self._check_report(report)
        for event in map(StoreEvent.from_wire, stats.data["events"]):
            self._heard_keys.add(event.key)
            if event.kind in (StoreEventKind.STORED, StoreEventKind.FAILED):
                assert event.plan_id is not None
                self._ends[event.plan_id] += 1

    def _check_report(self, report: BlendReport) -> None:
        assert report.plan_id not in self._reported, "a plan was reported twice"
        self._reported.add(report.plan_id)
        account = self._accounts[report.plan_id]
        assert report.prompt_tokens == (
            account.prefix + account.reused + account.recomputed + account.computed
        )
        assert (report.prefix_tokens, report.computed_tokens) == (account.prefix, account.computed)
        assert report.reused_tokens == account.reused
        assert report.recomputed_tokens == account.recomputed
        assert report.loaded_tokens == account.loaded
        for index, status in enumerate(report.segments):
            assert (status is SegmentStatus.FAILED) == (index in account.failed)
            assert index not in account.hits or status is SegmentStatus.HIT

    def close(self, *, resident: Iterable[SegmentKey]) -> None:
        """Nothing is served any more: all that was begun has been told, once."""
        assert self._reported == set(self._accounts)
        for plan_id in self._compiled:
            is_joined = plan_id in self._joined
            assert self._ends[plan_id] == 1 or (is_joined and not self._ends[plan_id])
        believed = {key for key in self._heard_keys if self._mirror.is_resident(key)}
        assert believed == set(resident), "the front end believes something else"


def _params(live: Live) -> object:
    return parse_request_params(live.request.kv_transfer_params)


def _positions(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {position for start, end in ranges for position in range(start, end)}


def _account(live: Live, order: PassOrder, trace: PassTrace) -> Account:
    local = order.plan.num_computed - len(_positions(order.fresh_ranges))
    loaded = trace.exact | trace.blended
    by_forward = live.num_prompt - order.plan.covered_end
    is_loaded = {hit.segment_index: hit.start in loaded for hit in order.plan.hits}
    return Account(
        prefix=local + len(trace.exact),
        reused=len(trace.blended - trace.computed),
        recomputed=len(trace.blended & trace.computed),
        computed=len(trace.computed - trace.blended) + by_forward,
        loaded=len(loaded),
        local=local,
        hits=frozenset(index for index, loaded in is_loaded.items() if loaded),
        failed=frozenset(index for index, loaded in is_loaded.items() if not loaded),
    )
