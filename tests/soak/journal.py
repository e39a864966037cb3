"""The journal: whose KV every block of vLLM's cache holds, and what every pass was told.

A request's answer depends on its own plan and, where vLLM finds its first blocks in its own cache,
on the plans of those that filled these blocks: under a blend salt they may be blended. So every
admission notes per block found by which admission it was filled, and is replayed on those.
"""

from typing import Any

from tests.soak.records import Admission, LoadedHit, PassRecord

from blend_engine.messages import PassOrder
from blend_engine.protocol import CompileParams, parse_request_params
from blend_engine.scheduler import BlendScheduler


class Journal:
    """Listens to what vLLM's scheduler asks of ours. One per engine."""

    def __init__(self) -> None:
        self.role: BlendScheduler | None = None
        self.problems: list[str] = []
        self.num_preemptions = 0
        self._admissions: list[Admission] = []
        self._open: dict[str, Admission] = {}
        self._asked: dict[str, int] = {}
        self._pending: list[Admission] = []
        self._owner_of_block: dict[int, int] = {}
        self._passes: dict[int, PassRecord] = {}
        self._next_number = 0

    def take(self) -> list[Admission]:
        """Admissions since the last call; call it when nothing runs."""
        taken, self._admissions = self._admissions, []
        self.problems += [f"{each.request_id} has not ended" for each in self._open.values()]
        return taken

    @property
    def kept(self) -> set[int]:
        """Admissions of which a block still holds KV."""
        return set(self._owner_of_block.values())

    def asked(self, request: Any, num_computed: int) -> None:
        """VLLM has found that many tokens in its own cache."""
        self._asked[request.request_id] = num_computed

    def admitted(self, request: Any, block_ids: list[int], num_external: int) -> None:
        """The request has its blocks. Called again when its asynchronous pass has ended."""
        known = self._open.get(request.request_id)
        if known is not None:
            if known.num_preemptions == request.num_preemptions:
                return
            self._end(known, request)
            self.num_preemptions += 1
        ids = list(request.all_token_ids)
        admission = Admission(
            number=self._next_number,
            request_id=request.request_id,
            salt=str(request.cache_salt),
            num_preemptions=request.num_preemptions,
            token_ids=ids,
            num_known=len(ids),
            num_local=self._asked.pop(request.request_id, 0),
            num_external=num_external,
            blocks=list(block_ids),
            compiles=_compiles(request),
        )
        self._next_number += 1
        self._admissions.append(admission)
        self._open[request.request_id] = admission
        self._pending.append(admission)

    def stepped(self, scheduler_output: Any, metadata: Any, block_size: int) -> None:
        """The step is made up: what running requests were given counts before who came in."""
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_ids:
                # Resumed requests come with whole lists, running ones with increments.
                is_whole = request_id in cached.resumed_req_ids
                self._grow(request_id, list(new_ids[0]), is_whole=is_whole)
        for new in scheduler_output.scheduled_new_reqs:
            # Whose asynchronous pass has ended has been given blocks for what follows.
            self._grow(new.req_id, list(new.block_ids[0]), is_whole=True)
        pending, self._pending = self._pending, []
        for admission in pending:
            self._settle_blocks(admission, block_size)
        for new in scheduler_output.scheduled_new_reqs:
            self._check_start(new, pending)
        for order in metadata.passes:
            owner = [each for each in pending if tuple(each.blocks) == tuple(order.block_ids)]
            self._ordered(owner[-1] if owner else None, order)
        for turn in metadata.slices:
            if turn.order is not None:
                self._ordered(self._open.get(turn.request_id), turn.order)

    def acknowledged(self, outcomes: list[Any]) -> None:
        """Passes have ended."""
        for outcome in outcomes:
            record = self._passes.pop(outcome.pass_id, None)
            if record is not None:
                record.captured, record.error = outcome.captured, outcome.error
                record.failed = outcome.failed_segments
                record.counts = (
                    outcome.reused_tokens,
                    outcome.recomputed_tokens,
                    outcome.loaded_exact_tokens,
                )

    def finished(self, request: Any) -> None:
        """The request has ended, whatever of."""
        self._asked.pop(request.request_id, None)
        known = self._open.pop(request.request_id, None)
        if known is not None:
            self._end(known, request)

    def _end(self, admission: Admission, request: Any) -> None:
        admission.token_ids = list(request.all_token_ids)
        admission.is_over = True

    def _grow(self, request_id: str, block_ids: list[int], *, is_whole: bool) -> None:
        admission = self._open[request_id]
        if is_whole:
            block_ids = block_ids[len(admission.blocks) :]
        for block in block_ids:
            self._owner_of_block[block] = admission.number
        admission.blocks += block_ids

    def _settle_blocks(self, admission: Admission, block_size: int) -> None:
        whole, rest = divmod(admission.num_local, block_size)
        if rest:
            self.problems.append(f"{admission.request_id}: a local hit ends inside a block")
        admission.origins = [self._owner_of_block[each] for each in admission.blocks[:whole]]
        for block in admission.blocks[whole:]:
            self._owner_of_block[block] = admission.number

    def _check_start(self, new: Any, pending: list[Admission]) -> None:
        for each in pending:
            start = each.num_local + each.num_external
            if each.request_id == new.req_id and new.num_computed_tokens != start:
                self.problems.append(f"{each.request_id} starts at {new.num_computed_tokens}")

    def _ordered(self, admission: Admission | None, order: PassOrder) -> None:
        if admission is None:
            self.problems.append(f"pass {order.pass_id} is nobody's")
            return
        record = PassRecord(
            pass_id=order.pass_id,
            covered_end=order.plan.covered_end,
            num_hazards=sum(end - start for start, end in order.fresh_ranges),
            hits=[
                LoadedHit(
                    start=hit.start,
                    end=hit.end,
                    offset=hit.offset,
                    segment_tokens=hit.segment_tokens,
                    segment_index=hit.segment_index,
                    context=hit.context,
                )
                for hit in order.plan.hits
            ],
            policy=order.policy,
            ratio=order.recompute_ratio,
            check_layer=order.check_layer,
            is_compile=order.capture is not None,
        )
        admission.pass_record = self._passes[order.pass_id] = record


def _compiles(request: Any) -> Any:
    params = parse_request_params(getattr(request, "kv_transfer_params", None))
    if not isinstance(params, CompileParams):
        return None
    span = params.segment
    ids = tuple(request.prompt_token_ids[span.start : span.end])
    return params.tenant, span.context, ids
