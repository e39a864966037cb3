"""What a state machine expects of plans, reports and store events, from what was really done."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tests.engine.traced_memory import PassTrace
from tests.engine.vllm_model import BuiltStep, VllmModel
from tests.engine.vllm_state import Admitted, Ended, Live, Step

from blend_engine import tracking
from blend_engine.messages import CANCELLED, PassOrder
from blend_engine.mirror import EngineMirror
from blend_engine.protocol import (
    BlendParams,
    BlendReport,
    CompileParams,
    DropParams,
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
    hits: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()


class StoreBooks:
    """Double entry: orders and slots on one side, reports and events on the other.

    Args:
        engine: Whose books they are.
    """

    def __init__(self, engine: VllmModel) -> None:
        self._engine = engine
        self._index = engine.scheduler._index
        self._accounts: dict[str, Account] = {}
        self._reported: set[str] = set()
        self._compiling: dict[SegmentKey, Live] = {}
        self._joined: set[str] = set()
        self._ends: Counter[str] = Counter()
        self._compiled: set[str] = set()
        self._mirror = EngineMirror()
        self._heard_keys: set[SegmentKey] = set()
        self._lost: dict[int, set[int]] = {}
        self.lost: set[int] = set()

    @property
    def num_joined(self) -> int:
        return len(self._joined)

    def leased_keys(self) -> list[SegmentKey]:
        """One per lease that a pass under way should hold."""
        orders = [order for _, order in self._engine.open.values()]
        # An asynchronous pass is under way a step before its first order leaves.
        flights = self._engine.scheduler._flights._flights
        orders += [flight.order for key, flight in flights.items() if not flight.is_started]
        return [hit.key for order in orders for hit in order.plan.hits]

    # A step that was run.

    def enter(self, built: BuiltStep) -> None:
        for place, admitted in enumerate(built.admitted):
            params = _params(admitted.live)
            if isinstance(params, DropParams):
                self._check_drop(params, built, place)
            elif isinstance(params, CompileParams):
                self._enter_compile(params, admitted)
            elif isinstance(params, BlendParams) and not admitted.num_external:
                self._accounts.setdefault(params.plan_id, _unplanned(admitted.live))
        brought = {each.live for each in built.admitted if each.num_external and not each.is_async}
        assert brought <= {live for live, _ in built.orders}, "a range that no pass fills"
        for live, order in built.orders:
            self._check_plan(live, order)
        assert len({ended.outcome.pass_id for ended in built.ended}) == len(built.ended)
        for ended in built.ended:
            self._check_writes(built, ended)
            self._check_failures(ended)

    def _check_drop(self, params: DropParams, built: BuiltStep, place: int) -> None:
        """What is dropped is in nobody's use; a compile behind the drop may bring it back."""
        later = {each.live for each in built.admitted[place + 1 :]}
        for key in params.keys:
            # Compiles of this step that were admitted before the drop are in the books already.
            assert key not in self._compiling or self._compiling[key] in later
            users = [
                live
                for live, order in self._engine.open.values()
                if any(hit.key == key for hit in order.plan.hits)
            ]
            assert not users, "dropped while in use"

    def _enter_compile(self, params: CompileParams, admitted: Admitted) -> None:
        """One that makes KV tells how that went; so does one of which nothing will come."""
        live = admitted.live
        self._compiled.add(params.plan_id)
        covered_end = live.num_local + admitted.num_external
        if not admitted.num_external or covered_end < params.segment.end:
            return
        prompt = live.request.prompt_token_ids or []
        token_ids = prompt[params.segment.start : params.segment.end]
        key = tracking.segment_key(params.tenant, params.segment.context, token_ids)
        if key in self._compiling:
            self._joined.add(params.plan_id)
        elif self._index.is_reserved(key):
            self._compiling[key] = live

    def _check_plan(self, live: Live, order: PassOrder) -> None:
        """Local hit, hits, gaps and rest tile the prompt; hits are of the segments named."""
        plan, params = order.plan, _params(live)
        prompt = live.request.prompt_token_ids or []
        assert order.block_ids == tuple(live.block_ids)
        assert order.token_ids.tolist() == prompt[: plan.covered_end]
        assert plan.num_computed == live.num_local < plan.covered_end < len(prompt)
        last_end = plan.num_computed
        for hit in plan.hits:
            assert isinstance(params, BlendParams)
            span = params.segments[hit.segment_index]
            assert last_end <= hit.start < hit.end <= plan.covered_end
            assert hit.start == max(span.start, plan.num_computed)
            assert hit.end == min(span.end, plan.covered_end)
            assert hit.offset == hit.start - span.start
            assert (hit.segment_tokens, hit.context) == (span.num_tokens, span.context)
            last_end = hit.end
        if order.capture is not None:
            assert isinstance(params, CompileParams)
            span = params.segment
            assert (order.capture.start, order.capture.end) == (span.start, span.end)

    def _check_writes(self, built: BuiltStep, ended: Ended) -> None:
        """A pass fills its range, once, and in blocks of others only what they fill after it."""
        order, trace = ended.order, ended.trace
        if order is None:
            return
        plan = order.plan
        own = set(range(plan.num_computed, plan.covered_end))
        fresh = _positions(order.fresh_ranges)
        assert fresh <= set(range(plan.num_computed))
        assert trace.foreign <= fresh, "a pass writes blocks of others"
        assert not trace.exact & trace.blended
        assert not trace.exact & trace.computed
        if ended.outcome.error == CANCELLED:
            assert trace.written <= own | fresh
            return
        assert trace.written == own | fresh
        memory = self._engine.memory
        written = {memory.slot(order.block_ids, position) for position in own}
        by_others: set[int] = set()
        for live, rows in built.batch.items():
            slots = {memory.slot(rows.block_ids, at) for at in range(rows.start, rows.end)}
            assert not slots & written, "a slot was written by a pass and by the forward"
            if live is not ended.live:
                by_others |= slots
        if isinstance(_params(ended.live), BlendParams):
            shared = {memory.slot(order.block_ids, position) for position in fresh}
            assert shared <= by_others, "fresh although nobody writes it"

    def _check_failures(self, ended: Ended) -> None:
        """KV that is leased can be loaded, unless something was broken on purpose."""
        order, outcome, trace = ended.order, ended.outcome, ended.trace
        if order is None or outcome.error == CANCELLED:
            return
        lost = set(outcome.failed_keys)
        assert all(map(self._engine.memory.is_damaged, lost))
        self._lost[outcome.pass_id] = {self._engine.memory.version(key) for key in lost}
        failed = {hit.segment_index for hit in order.plan.hits if hit.key in lost}
        assert trace.is_faulted or failed == set(outcome.failed_segments)
        if order.capture is not None:
            assert outcome.captured != trace.is_faulted

    # A step that the scheduler has heard of.

    def enter_heard(self, step: Step, stats: BlendStats | None) -> None:
        for ended in step.ended:
            self._close_pass(ended)
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
                assert self._ends[event.plan_id] == 1, "a compile has ended twice"

    def _close_pass(self, ended: Ended) -> None:
        self.lost |= self._lost.pop(ended.outcome.pass_id, set())
        params = _params(ended.live)
        for key in [key for key, live in self._compiling.items() if live is ended.live]:
            del self._compiling[key]
        if isinstance(params, BlendParams) and ended.outcome.error != CANCELLED:
            assert ended.order is not None
            account = _account(ended.live, ended.order, ended.trace)
            self._accounts.setdefault(params.plan_id, account)

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
        assert {plan for plan in self._compiled if not self._ends[plan]} == self._joined
        believed = {key for key in self._heard_keys if self._mirror.is_resident(key)}
        assert believed == set(resident), "the front end believes something else"


def _params(live: Live) -> object:
    return parse_request_params(live.request.kv_transfer_params)


def _positions(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {position for start, end in ranges for position in range(start, end)}


def _unplanned(live: Live) -> Account:
    return Account(prefix=live.num_local, computed=live.num_prompt - live.num_local)


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
        hits=frozenset(index for index, loaded in is_loaded.items() if loaded),
        failed=frozenset(index for index, loaded in is_loaded.items() if not loaded),
    )
