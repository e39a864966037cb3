"""A small model of vLLM around both real roles: blocks, prefix cache, admission, preemption, acks.

Workers run a step when it is built, since nothing that the scheduler does later reaches them; what
comes late, as under async scheduling, is what the scheduler hears of it.
"""

from collections import deque

from tests.engine.traced_memory import PassTrace, Rows, TracedMemory
from tests.engine.vllm_state import Admitted, BlockPool, Ended, Live, Step
from tests.engine.vllm_steps import (
    CachedRequests,
    ConnectorOutput,
    NewRequest,
    SchedulerOutput,
)

from blend_engine.messages import BlendAck, BlendMetadata, PassOrder
from blend_engine.reporting import BlendStats
from blend_engine.scheduler import BlendScheduler
from blend_engine.worker import BlendWorker

_MAX_RUNNING = 4


class VllmModel:
    """One engine: vLLM's scheduler, the connector's two roles, one worker.

    Args:
        scheduler: The scheduler role.
        worker: The worker role, over `memory`.
        memory: Its witness.
        num_blocks: Blocks of the paged cache.
        block_size: Tokens per block.
        max_tokens: Tokens of a step's forward.
    """

    def __init__(
        self,
        scheduler: BlendScheduler,
        worker: BlendWorker,
        memory: TracedMemory,
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
    ) -> None:
        self.scheduler, self.worker, self.memory = scheduler, worker, memory
        self.blocks = BlockPool(num_blocks, block_size)
        self.waiting: list[Live] = []
        self.running: list[Live] = []
        self.unheard: deque[Step] = deque()
        self.known: dict[str, Live] = {}
        self.open: dict[int, tuple[Live, PassOrder]] = {}
        self.resumes_as_new = False
        self.loads_first = False
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._finished: set[str] = set()
        self._preempted = False

    # What clients do.

    def submit(self, live: Live) -> None:
        self.waiting.append(live)
        self.known[live.request.request_id] = live

    def abort(self, live: Live) -> None:
        self._end(live)

    @property
    def alive(self) -> list[Live]:
        return [*self.running, *self.waiting]

    # One step.

    def preempt(self) -> None:
        """Take the blocks of the request that came last, as for want of blocks."""
        live = self.running.pop()
        self._release(live)
        live.num_computed = 0
        self.waiting.insert(0, live)
        self._preempted = True

    def step(self, *, keeps_external: bool = True) -> "BuiltStep":
        """Schedule a step and run it."""
        built = BuiltStep(self, self._max_tokens)
        built.output.finished_req_ids, self._finished = self._finished, set()
        self._schedule_running(built)
        if not self._preempted:
            self._schedule_waiting(built, keeps_external)
        self._preempted = False
        built.run()
        return built

    def _schedule_running(self, built: "BuiltStep") -> None:
        index = 0
        while index < len(self.running):
            live = self.running[index]
            index += 1
            num_new = min(live.num_to_compute, built.tokens_left)
            if num_new == 0:
                continue
            new = self._grow(live, live.num_computed + num_new)
            while new is None:
                self.preempt()
                if live not in self.running:
                    return
                new = self._grow(live, live.num_computed + num_new)
            built.continues(live, new, num_new)

    def _schedule_waiting(self, built: "BuiltStep", keeps_external: bool) -> None:
        # Those that hold blocks come first, or the others would wait for these blocks for ever.
        for live in sorted(self.waiting, key=lambda live: not live.num_computed):
            if not built.tokens_left or len(self.running) == _MAX_RUNNING:
                return
            # Until what is in flight has been heard, a preempted request stays where it is.
            if live.is_loading or live.num_in_flight:
                continue
            if not (
                self._take_up(live, built)
                if live.num_computed
                else self._admit(live, built, keeps_external)
            ):
                return

    def _admit(self, live: Live, built: "BuiltStep", keeps_external: bool) -> bool:
        """Whether there was room, or nothing to decide."""
        reads_cache = not live.request.skip_reading_prefix_cache
        shared = self.blocks.hit(live.salt, live.tokens) if reads_cache else []
        num_local = len(shared) * self._block_size
        num_external, is_async = self.scheduler.get_num_new_matched_tokens(live.request, num_local)
        if num_external is None:
            return True
        assert reads_cache or not num_external
        if not keeps_external and not is_async:
            num_external -= num_external % self._block_size
        num_computed = num_local + num_external
        num_new = min(len(live.tokens) - num_computed, built.tokens_left)
        assert num_new >= 1, "nothing is left to sample from"
        if is_async:
            num_new = 0
            if self._num_reserved() + self._num_missing(live) > self.blocks.num_free:
                return False
        num_blocks = -(-(num_computed + num_new) // self._block_size)
        new = self.blocks.take(shared, num_blocks - len(shared))
        if new is None:
            return False
        self.memory.give(new, live.owner)
        live.block_ids = [*shared, *new]
        live.num_local, live.num_computed = num_local, num_computed
        self.memory.owners[tuple(live.block_ids)] = live.owner
        self.scheduler.update_state_after_alloc(live.request, live.block_ids, num_external)
        built.admitted.append(Admitted(live, num_external, is_async))
        if is_async:
            live.is_loading = True
        else:
            self._run(live, built, num_new)
        return True

    def _take_up(self, live: Live, built: "BuiltStep") -> bool:
        """Go on with a request whose asynchronous pass has ended."""
        num_new = min(live.num_to_compute, built.tokens_left)
        if self._grow(live, live.num_computed + num_new) is None:
            return False
        self.scheduler.update_state_after_alloc(live.request, live.block_ids, 0)
        self._run(live, built, num_new)
        return True

    def _run(self, live: Live, built: "BuiltStep", num_new: int) -> None:
        self.waiting.remove(live)
        self.running.append(live)
        built.begins(live, num_new)

    def _num_missing(self, live: Live) -> int:
        num_tokens = live.num_prompt + live.num_outputs
        return -(-num_tokens // self._block_size) - len(live.block_ids)

    def _num_reserved(self) -> int:
        """Blocks that those under way may still need: who waits for a load cannot be preempted."""
        return sum(self._num_missing(live) for live in self.alive if live.block_ids)

    def _grow(self, live: Live, num_tokens: int) -> list[int] | None:
        new = self.blocks.take((), -(-num_tokens // self._block_size) - len(live.block_ids))
        if new is not None:
            self.memory.give(new, live.owner)
            live.block_ids += new
        return new

    # What the scheduler hears.

    def hear(self) -> tuple[Step, BlendStats | None]:
        """Take in the oldest step: outputs first, then the connector, as vLLM does."""
        step = self.unheard.popleft()
        for live in step.scheduled:
            live.num_in_flight -= 1
        for live in step.sampled:
            live.num_heard += 1
            if live.num_heard - live.num_prompt == live.num_outputs and not live.is_over:
                self._end(live)
        self.scheduler.update_connector_output(ConnectorOutput(step.ack))
        for ended in step.ended:
            self.open.pop(ended.outcome.pass_id, None)
        for request_id in step.received:
            self._receive(self.known[request_id])
        return step, self.scheduler.take_stats()

    def _receive(self, live: Live) -> None:
        assert live.is_loading
        live.is_loading = False
        if live.is_over:
            self._release(live)
        else:
            self.blocks.publish(live.salt, live.tokens[: live.num_computed], live.block_ids)

    def _end(self, live: Live) -> None:
        live.is_over = True
        for queue in (self.waiting, self.running):
            if live in queue:
                queue.remove(live)
        self.scheduler.request_finished(live.request)
        # A pass may be writing the blocks; they are free when it is said to have stopped.
        if not live.is_loading:
            self._release(live)
        self._finished.add(live.request.request_id)

    def _release(self, live: Live) -> None:
        self.blocks.release(live.block_ids)
        self.memory.take_back(live.block_ids, live.owner)
        live.block_ids = []


class BuiltStep:
    """A step in the making.

    Args:
        engine: Whose step it is.
        tokens_left: What its forward may still compute.
    """

    def __init__(self, engine: VllmModel, tokens_left: int) -> None:
        self._engine = engine
        self.tokens_left = tokens_left
        self.output = SchedulerOutput(scheduled_cached_reqs=CachedRequests())
        self.admitted: list[Admitted] = []
        self.batch: dict[Live, Rows] = {}
        self.orders: list[tuple[Live, PassOrder]] = []
        self.ended: list[Ended] = []
        self.never_begun: dict[int, Live] = {}

    def continues(self, live: Live, new_blocks: list[int], num_new: int) -> None:
        cached = self.output.scheduled_cached_reqs
        cached.add(live.request.request_id, new_blocks or None, live.num_computed)
        self._schedule(live, num_new)

    def begins(self, live: Live, num_new: int) -> None:
        request_id, block_ids = live.request.request_id, list(live.block_ids)
        if live.is_known and not self._engine.resumes_as_new:
            cached = self.output.scheduled_cached_reqs
            cached.resumed_req_ids.add(request_id)
            cached.add(request_id, block_ids, live.num_computed)
        else:
            self.output.scheduled_new_reqs.append(
                NewRequest(request_id, (block_ids,), live.num_computed)
            )
        live.is_known = True
        self._schedule(live, num_new)

    def _schedule(self, live: Live, num_new: int) -> None:
        start, end = live.num_computed, live.num_computed + num_new
        self.batch[live] = Rows(
            owner=live.owner,
            block_ids=live.block_ids,
            token_ids=live.tokens,
            start=start,
            end=end,
        )
        self.output.num_scheduled_tokens[live.request.request_id] = num_new
        self.tokens_left -= num_new
        live.num_computed = end
        # Published now, filled later: others may hit these blocks in this very step.
        known = live.tokens[: min(end, live.num_heard)]
        self._engine.blocks.publish(live.salt, known, live.block_ids)

    def run(self) -> None:
        engine = self._engine
        metadata = engine.scheduler.build_connector_meta(self.output)
        self._open_orders(metadata)
        has_sync_loads = any(each.num_external and not each.is_async for each in self.admitted)
        if not (has_sync_loads or engine.loads_first):
            engine.memory.forward(list(self.batch.values()))
        ack = self._obey(metadata)
        if has_sync_loads or engine.loads_first:
            engine.memory.forward(list(self.batch.values()))
        sampled = [live for live in self.batch if live.num_computed == len(live.tokens)]
        for live in self.batch:
            live.num_in_flight += 1
        received = engine.worker.take_received()
        engine.unheard.append(Step([*self.batch], sampled, self.ended, received, ack))
        for live in sampled:
            live.tokens.append(9000 + len(live.tokens))

    def _open_orders(self, metadata: BlendMetadata) -> None:
        by_blocks = {tuple(each.live.block_ids): each.live for each in self.admitted}
        for order in metadata.passes:
            self.orders.append((by_blocks[order.block_ids], order))
        for turn in metadata.slices:
            if turn.order is not None:
                self.orders.append((self._engine.known[turn.request_id], turn.order))
        for live, order in self.orders:
            self._engine.open[order.pass_id] = live, order
        for cancelled in metadata.cancelled:
            if not cancelled.is_started:
                self.never_begun[cancelled.pass_id] = self._engine.known[cancelled.request_id]

    def _obey(self, metadata: BlendMetadata) -> BlendAck:
        engine, memory = self._engine, self._engine.memory
        memory.before_orders(metadata)
        engine.worker.run(metadata)
        ack = engine.worker.take_ack()
        for outcome in ack.outcomes:
            if outcome.pass_id in self.never_begun:
                live = self.never_begun[outcome.pass_id]
                self.ended.append(Ended(live, None, outcome, PassTrace()))
                continue
            live, order = engine.open[outcome.pass_id]
            self.ended.append(Ended(live, order, outcome, memory.traces.pop(order.block_ids)))
        memory.after_orders(
            ended.order.capture.key
            for ended in self.ended
            if ended.outcome.captured
            and ended.order is not None
            and ended.order.capture is not None
        )
        return ack
