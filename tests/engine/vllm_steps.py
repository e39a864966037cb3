"""vLLM's scheduler and workers as the scheduler role meets them: small, typed, step by step.

`Steps` asks, admits and acknowledges in the order in which vLLM 0.32 does; the stand-ins carry the
fields that the connector reads and no others.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blend_engine.budget import PassBudget
from blend_engine.config import BlendConfig
from blend_engine.messages import BlendAck, BlendMetadata, PassOrder, PassOutcome
from blend_engine.protocol import (
    BlendParams,
    BlendReport,
    CompileParams,
    DropParams,
    Policy,
    RequestParams,
    StoreEvent,
    StoreEventKind,
)
from blend_engine.scheduler import BlendScheduler
from blend_engine.segments import SegmentContext, SegmentKey, SegmentSpan, segment_key
from blend_engine.selection import blended_hits, select_sinks

BLOCK_SIZE = 16
BYTES_PER_TOKEN = 2
NUM_LAYERS = 4
MIN_SEGMENT_TOKENS = 4
TENANT = "acme"
QUESTION = (901, 902, 903)
PREAMBLE = (801, 802)


@dataclass
class Request:
    """`vllm.v1.request.Request`."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: Any = None
    skip_reading_prefix_cache: bool = False
    lora_request: object | None = None
    cache_salt: str | None = "a salt of those that blend"


@dataclass
class NewRequest:
    """`vllm.v1.core.sched.output.NewRequestData`."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequests:
    """`vllm.v1.core.sched.output.CachedRequestData`."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)

    def add(self, request_id: str, block_ids: list[int] | None, num_computed: int) -> None:
        self.req_ids.append(request_id)
        self.new_block_ids.append(None if block_ids is None else (block_ids,))
        self.num_computed_tokens.append(num_computed)


@dataclass
class SchedulerOutput:
    """`vllm.v1.core.sched.output.SchedulerOutput`."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)


@dataclass
class ConnectorOutput:
    """`vllm.v1.outputs.KVConnectorOutput`."""

    kv_connector_worker_meta: BlendAck | None = None


class Worker:
    """Obeys orders as the worker role does, keeping the keys of segments instead of their KV."""

    def __init__(self) -> None:
        self.held: set[SegmentKey] = set()
        self.fails_captures = False

    def run(self, metadata: BlendMetadata) -> BlendAck:
        self.held.difference_update(metadata.freed_keys)
        return BlendAck(ready=True, outcomes=[self._run_pass(order) for order in metadata.passes])

    def _run_pass(self, order: PassOrder) -> PassOutcome:
        plan = order.plan
        assert len(order.token_ids) == plan.covered_end > plan.num_computed
        assert len(order.block_ids) * BLOCK_SIZE >= plan.covered_end
        if order.capture is not None:
            if self.fails_captures:
                return PassOutcome(pass_id=order.pass_id, error="out_of_memory")
            self.held.add(order.capture.key)
            return PassOutcome(pass_id=order.pass_id, captured=True)
        found = [hit for hit in plan.hits if hit.key in self.held]
        failed = [hit for hit in plan.hits if hit.key not in self.held]
        num_blended = sum(hit.num_tokens for hit in blended_hits(found))
        num_selected = 0
        if order.policy is Policy.SINKS:
            num_selected = len(select_sinks(found, order.recompute_ratio))
        return PassOutcome(
            pass_id=order.pass_id,
            reused_tokens=num_blended - num_selected,
            recomputed_tokens=num_selected,
            loaded_exact_tokens=sum(hit.num_tokens for hit in found) - num_blended,
            failed_segments=tuple(hit.segment_index for hit in failed),
            failed_keys=tuple(hit.key for hit in failed),
        )


class Steps:
    """An engine around one scheduler role.

    Args:
        store_tokens: Tokens that the store has room for.
        is_ready: Whether the workers have said already that they hold the model.
        budget_tokens: Fresh tokens that passes may compute in a step.
    """

    def __init__(
        self, *, store_tokens: int = 1000, is_ready: bool = True, budget_tokens: int = 1000
    ) -> None:
        self.scheduler = BlendScheduler(
            BlendConfig(
                store_bytes=store_tokens * BYTES_PER_TOKEN, min_segment_tokens=MIN_SEGMENT_TOKENS
            ),
            block_size=BLOCK_SIZE,
            bytes_per_token=BYTES_PER_TOKEN,
            num_layers=NUM_LAYERS,
            budget=PassBudget.of_steps(budget_tokens, budget_tokens),
        )
        self.worker = Worker()
        self.reports: list[BlendReport] = []
        self.events: list[StoreEvent] = []
        self.output = SchedulerOutput()
        self._next_block = itertools.count(1)
        if is_ready:
            self.run_step()

    # What vLLM's scheduler does with a waiting request.

    def ask(self, request: Request, local_tokens: int = 0) -> int | None:
        num_external, is_async = self.scheduler.get_num_new_matched_tokens(request, local_tokens)
        assert not is_async
        return num_external

    def admit(
        self,
        request: Request,
        *,
        local_blocks: Sequence[int] = (),
        num_external: int | None = None,
        resumed: bool = False,
    ) -> list[int] | None:
        """Ask, allocate and schedule the rest of the prompt.

        Args:
            request: Waiting, or preempted and back.
            local_blocks: Full blocks that vLLM's own prefix cache has.
            num_external: What vLLM makes of the answer; the answer itself if None.
            resumed: Whether the workers know the request from before it was preempted.

        Returns:
            Its blocks; None where the request was deferred.
        """
        assert request.prompt_token_ids is not None
        local_tokens = len(local_blocks) * BLOCK_SIZE
        answer = self.ask(request, local_tokens)
        if answer is None:
            return None
        num_external = answer if num_external is None else num_external
        num_computed = local_tokens + num_external
        num_tokens = len(request.prompt_token_ids) - num_computed
        assert num_tokens >= 1, "vLLM has nothing to sample from"
        num_blocks = -(-len(request.prompt_token_ids) // BLOCK_SIZE) - len(local_blocks)
        block_ids = [*local_blocks, *(next(self._next_block) for _ in range(num_blocks))]
        self.scheduler.update_state_after_alloc(request, block_ids, num_external)
        if resumed:
            self.output.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
            self.continue_request(request, block_ids, num_computed, num_tokens)
        else:
            self.output.scheduled_new_reqs.append(
                NewRequest(request.request_id, (block_ids,), num_computed)
            )
            self.output.num_scheduled_tokens[request.request_id] = num_tokens
        return block_ids

    def continue_request(
        self, request: Request, block_ids: list[int] | None, num_computed: int, num_tokens: int = 1
    ) -> None:
        """Schedule a running request."""
        self.output.scheduled_cached_reqs.add(request.request_id, block_ids, num_computed)
        self.output.num_scheduled_tokens[request.request_id] = num_tokens

    def finish(self, request: Request) -> None:
        """The request has ended, or was aborted."""
        self.scheduler.request_finished(request)
        self.output.finished_req_ids.add(request.request_id)

    # What happens with a step.

    def build(self) -> BlendMetadata:
        output, self.output = self.output, SchedulerOutput()
        return self.scheduler.build_connector_meta(output)

    def acknowledge(self, ack: BlendAck | None) -> None:
        self.scheduler.update_connector_output(ConnectorOutput(ack))
        stats = self.scheduler.take_stats()
        if stats is not None:
            self.reports += map(BlendReport.from_wire, stats.data["reports"])
            self.events += map(StoreEvent.from_wire, stats.data["events"])

    def run_step(self) -> BlendMetadata:
        """Build a step, run it, acknowledge it."""
        metadata = self.build()
        self.acknowledge(self.worker.run(metadata))
        return metadata

    # Whole requests.

    def serve(self, request: Request, **admission: Any) -> BlendReport | None:
        """Run a request alone to its end; returns the report it made."""
        before = len(self.reports)
        assert self.admit(request, **admission) is not None
        self.run_step()
        self.finish(request)
        return self.reports[-1] if len(self.reports) > before else None

    def store(self, *documents: Sequence[int], tenant: str = TENANT) -> None:
        """Compile documents that must fit."""
        for document in documents:
            self.serve(compile_request(document, tenant=tenant))
            assert self.scheduler.store_stats().num_segments
            self.events.clear()

    def events_of(self, kind: StoreEventKind) -> list[SegmentKey]:
        return [event.key for event in self.events if event.kind is kind]

    @property
    def num_leases(self) -> int:
        return self.scheduler.store_stats().num_leases


_request_ids = map("request-{}".format, itertools.count())


def request_of(prompt: Sequence[int], params: RequestParams | None) -> Request:
    return Request(
        request_id=next(_request_ids),
        prompt_token_ids=list(prompt),
        kv_transfer_params=params.to_kv_transfer_params() if params is not None else None,
    )


def document(number: int, length: int = 20) -> list[int]:
    return [1000 * (number + 1) + index for index in range(length)]


def key_of(
    token_ids: Sequence[int], context: SegmentContext = SegmentContext.FREE, tenant: str = TENANT
) -> SegmentKey:
    return segment_key(tenant, context, token_ids)


def blend_request(
    *documents: Sequence[int],
    leading: Sequence[int] = (),
    question: Sequence[int] = QUESTION,
    **params: Any,
) -> Request:
    """A leading segment if there is one, documents with a separator before each, a question."""
    prompt, spans = list(leading), []
    if leading:
        spans.append(SegmentSpan(start=0, end=len(leading), context=SegmentContext.PREFIX))
    for each in documents:
        prompt.append(7)
        end = len(prompt) + len(each)
        spans.append(SegmentSpan(start=len(prompt), end=end, context=SegmentContext.FREE))
        prompt.extend(each)
    prompt.extend(question)
    defaults = {"plan_id": f"plan-{next(_request_ids)}", "tenant": TENANT}
    return request_of(prompt, BlendParams(**{**defaults, "segments": tuple(spans), **params}))


def compile_request(
    token_ids: Sequence[int],
    context: SegmentContext = SegmentContext.FREE,
    *,
    tenant: str = TENANT,
    plan_id: str = "compile",
) -> Request:
    preamble = PREAMBLE if context is SegmentContext.FREE else ()
    span = SegmentSpan(start=len(preamble), end=len(preamble) + len(token_ids), context=context)
    return request_of(
        [*preamble, *token_ids, token_ids[-1]],
        CompileParams(plan_id=plan_id, tenant=tenant, segment=span),
    )


def drop_request(*keys: SegmentKey, plan_id: str = "drop") -> Request:
    return request_of([0], DropParams(plan_id=plan_id, keys=keys))
