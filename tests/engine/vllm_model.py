"""A small model of vLLM around both real roles: blocks, prefix cache, admission, preemption, acks.

Workers run a step when it is built, since nothing that the scheduler does later reaches them; what
comes late, as under async scheduling, is what the scheduler hears of it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.engine.traced_memory import PassTrace, Rows, TracedMemory
from tests.engine.vllm_steps import (
    CachedRequests,
    ConnectorOutput,
    NewRequest,
    Request,
    SchedulerOutput,
)

from blend_engine.messages import BlendAck, PassOrder
from blend_engine.reporting import BlendStats
from blend_engine.scheduler import BlendScheduler
from blend_engine.worker import BlendWorker

_MAX_RUNNING = 4


class BlockPool:
    """Blocks with counted users; free ones keep their contents until they are given out again.

    Args:
        num_blocks: Blocks in all.
        block_size: Tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._published: dict[tuple[str, tuple[int, ...]], int] = {}
        self._name_of: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.num_users: Counter[int] = Counter()

    def hit(self, salt: str, token_ids: Sequence[int]) -> list[int]:
        """The longest run of published blocks that leaves a token to compute."""
        blocks = []
        for end in range(self._block_size, len(token_ids), self._block_size):
            block = self._published.get((salt, tuple(token_ids[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, shared: Sequence[int], num_new: int) -> list[int] | None:
        """Use blocks that were hit and new ones; None where too few are free."""
        if num_new > sum(block not in shared for block in self._free):
            return None
        for block in shared:
            self._free.pop(block, None)
        new = [self._free.popitem(last=False)[0] for _ in range(num_new)]
        for block in new:
            self._published.pop(self._name_of.pop(block, ("", ())), None)
        self.num_users.update([*shared, *new])
        return new

    def publish(self, salt: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Let others hit the full blocks of `token_ids`."""
        for index in range(len(token_ids) // self._block_size):
            name = salt, tuple(token_ids[: (index + 1) * self._block_size])
            if name not in self._published and block_ids[index] not in self._name_of:
                self._published[name] = block_ids[index]
                self._name_of[block_ids[index]] = name

    def release(self, block_ids: Sequence[int]) -> None:
        for block in reversed(block_ids):
            self.num_users[block] -= 1
            if self.num_users[block] == 0:
                self._free[block] = None


@dataclass(eq=False, slots=True)
class Live:
    """A request inside vLLM.

    Args:
        request: What the connector sees of it.
        tenant: Whose it is.
        salt: Whom it shares blocks with.
        num_outputs: Tokens to sample.
        tokens: Prompt and outputs, those that the scheduler has not heard of included.
        num_heard: How many tokens the scheduler knows.
    """

    request: Request
    tenant: str
    salt: str
    num_outputs: int
    tokens: list[int] = field(default_factory=list)
    num_heard: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_local: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    is_known: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        assert self.request.prompt_token_ids
        self.tokens = list(self.request.prompt_token_ids)
        self.num_heard = len(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids or ())

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is still needed; nothing follows the last output."""
        return min(len(self.tokens), self.num_prompt + self.num_outputs - 1) - self.num_computed


@dataclass(slots=True)
class Step:
    """A step that was run and not heard of."""

    scheduled: list[Live]
    sampled: list[Live]
    orders: list[tuple[Live, PassOrder, PassTrace]]
    ack: BlendAck


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
        self.resumes_as_new = False
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._finished: set[str] = set()
        self._preempted = False

    # What clients do.

    def submit(self, live: Live) -> None:
        self.waiting.append(live)

    def abort(self, live: Live) -> None:
        self._end(live)

    @property
    def alive(self) -> list[Live]:
        return [*self.running, *self.waiting]

    # One step.

    def preempt(self) -> None:
        """Take the blocks of the request that came last, as for want of blocks."""
        live = self.running.pop()
        self.blocks.release(live.block_ids)
        live.block_ids, live.num_computed = [], 0
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
        for live in list(self.waiting):
            if not built.tokens_left or len(self.running) == _MAX_RUNNING:
                return
            # Until what is in flight has been heard, a preempted request stays where it is.
            if live.num_in_flight == 0 and not self._admit(live, built, keeps_external):
                return

    def _admit(self, live: Live, built: "BuiltStep", keeps_external: bool) -> bool:
        """Whether there was room, or nothing to decide."""
        reads_cache = not live.request.skip_reading_prefix_cache
        shared = self.blocks.hit(live.salt, live.tokens) if reads_cache else []
        num_local = len(shared) * self._block_size
        num_external, is_async = self.scheduler.get_num_new_matched_tokens(live.request, num_local)
        assert not is_async
        if num_external is None:
            return True
        if not keeps_external:
            num_external -= num_external % self._block_size
        if not reads_cache:
            num_external = 0
        num_computed = num_local + num_external
        num_new = min(len(live.tokens) - num_computed, built.tokens_left)
        assert num_new >= 1, "nothing is left to sample from"
        num_blocks = -(-(num_computed + num_new) // self._block_size)
        new = self.blocks.take(shared, num_blocks - len(shared))
        if new is None:
            return False
        self.memory.erase(new)
        live.block_ids = [*shared, *new]
        live.num_local, live.num_computed = num_local, num_computed
        self.memory.tenant_of[tuple(live.block_ids)] = live.tenant
        self.scheduler.update_state_after_alloc(live.request, live.block_ids, num_external)
        self.waiting.remove(live)
        self.running.append(live)
        built.admits(live, num_external, num_new)
        return True

    def _grow(self, live: Live, num_tokens: int) -> list[int] | None:
        new = self.blocks.take((), -(-num_tokens // self._block_size) - len(live.block_ids))
        if new is not None:
            self.memory.erase(new)
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
        return step, self.scheduler.take_stats()

    def _end(self, live: Live) -> None:
        live.is_over = True
        for queue in (self.waiting, self.running):
            if live in queue:
                queue.remove(live)
        self.scheduler.request_finished(live.request)
        self.blocks.release(live.block_ids)
        live.block_ids = []
        self._finished.add(live.request.request_id)


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
        self.admitted: list[tuple[Live, int]] = []
        self.batch: dict[Live, Rows] = {}
        self.orders: list[tuple[Live, PassOrder, PassTrace]] = []

    def continues(self, live: Live, new_blocks: list[int], num_new: int) -> None:
        cached = self.output.scheduled_cached_reqs
        cached.add(live.request.request_id, new_blocks or None, live.num_computed)
        self._schedule(live, num_new)

    def admits(self, live: Live, num_external: int, num_new: int) -> None:
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
        self.admitted.append((live, num_external))
        self._schedule(live, num_new)

    def _schedule(self, live: Live, num_new: int) -> None:
        start, end = live.num_computed, live.num_computed + num_new
        self.batch[live] = Rows(
            block_ids=live.block_ids,
            token_ids=live.tokens,
            tenant=live.tenant,
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
        engine, memory = self._engine, self._engine.memory
        metadata = engine.scheduler.build_connector_meta(self.output)
        memory.before_orders(metadata)
        engine.worker.run(metadata)
        ack = engine.worker.take_ack()
        by_blocks = {tuple(live.block_ids): live for live, _ in self.admitted}
        for order in metadata.passes:
            live = by_blocks[order.block_ids]
            self.orders.append((live, order, memory.traces.pop(order.block_ids)))
        captured = {outcome.pass_id for outcome in ack.outcomes if outcome.captured}
        memory.after_orders(
            [
                order.capture.key
                for _, order, _ in self.orders
                if order.capture is not None and order.pass_id in captured
            ],
        )
        memory.forward(list(self.batch.values()))
        sampled = [live for live in self.batch if live.num_computed == len(live.tokens)]
        for live in self.batch:
            live.num_in_flight += 1
        engine.unheard.append(Step([*self.batch], sampled, self.orders, ack))
        for live in sampled:
            live.tokens.append(9000 + len(live.tokens))
