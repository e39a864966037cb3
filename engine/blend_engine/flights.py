"""Passes between their admission and their acknowledgement. Scheduler role; pure.

A synchronous pass is ordered with the step that admits it. An asynchronous one is ordered in slices
from the next step on: by then every block that its local hit counts on has been written.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from blend_engine.hazards import ForwardWrite, fresh_ranges
from blend_engine.messages import Cancellation, Capture, PassOrder, PassSlice
from blend_engine.plan import Plan
from blend_engine.protocol import BlendParams, CompileParams, SegmentStatus
from blend_engine.segments import SegmentKey
from blend_engine.tracking import TrackedRequest

_MAX_ASYNCHRONOUS_USES = 4
"""Each holds blocks for its whole prompt while it waits for its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedPass:
    """A pass of the step being built.

    Args:
        request_id: Whose it is.
        tracked: The request.
        plan: What is covered and loaded; final.
        block_ids: The request's blocks.
        statuses: Per segment, as they come true if every load succeeds.
        leased: Segments that stay until the pass is acknowledged.
        capture: Set for a compile that has room.
        is_asynchronous: Whether it is spread over steps.
    """

    request_id: str
    tracked: TrackedRequest
    plan: Plan
    block_ids: tuple[int, ...]
    statuses: tuple[SegmentStatus, ...]
    leased: tuple[SegmentKey, ...] = ()
    capture: Capture | None = None
    is_asynchronous: bool = False

    @property
    def is_compile(self) -> bool:
        """Whether it makes KV instead of using it."""
        return isinstance(self.tracked.params, CompileParams)


@dataclass(slots=True)
class Flight:
    """A pass that the workers have not acknowledged yet.

    Args:
        admitted: The pass.
        order: What the workers were told, or will be.
        is_started: Whether the order has left.
        is_cancelled: Whether its request has ended before it.
    """

    admitted: AdmittedPass
    order: PassOrder
    is_started: bool = False
    is_cancelled: bool = False

    @property
    def local_tokens(self) -> int:
        """Tokens of vLLM's own prefix hit that the pass relies on."""
        fresh = sum(end - start for start, end in self.order.fresh_ranges)
        return self.order.plan.num_computed - fresh


class Flights:
    """All passes in flight, in order of admission.

    Args:
        block_size: Tokens per block of vLLM's cache.
        piece_tokens: Length of an asynchronous pass's calls.
    """

    def __init__(self, *, block_size: int, piece_tokens: int) -> None:
        self._block_size = block_size
        self._piece_tokens = piece_tokens
        self._flights: dict[int, Flight] = {}
        self._cancelled: list[Cancellation] = []
        self._pass_ids = itertools.count()

    def __len__(self) -> int:
        """Passes in flight."""
        return len(self._flights)

    def has_room(self, *, is_compile: bool) -> bool:
        """Whether another asynchronous pass may be admitted: of compiles, one at a time."""
        alike = sum(
            flight.admitted.is_asynchronous and flight.admitted.is_compile == is_compile
            for flight in self._flights.values()
        )
        return alike < (1 if is_compile else _MAX_ASYNCHRONOUS_USES)

    def leased_keys(self) -> set[SegmentKey]:
        """Segments that passes in flight use."""
        return {key for flight in self._flights.values() for key in flight.admitted.leased}

    def launch(self, admitted: AdmittedPass, writes: dict[str, ForwardWrite]) -> PassOrder | None:
        """Take up a pass.

        Args:
            admitted: The pass.
            writes: What this step's forward writes, by request.

        Returns:
            The order for this step; None where slices follow from the next step on.
        """
        fresh: tuple[tuple[int, int], ...] = ()
        plan = admitted.plan
        if admitted.is_compile:
            # Canonical KV comes from one computation; cached blocks would leave holes in the
            # capture.
            fresh = ((0, plan.num_computed),) if plan.num_computed else ()
        elif not admitted.is_asynchronous:
            fresh = fresh_ranges(
                admitted.block_ids,
                num_computed=plan.num_computed,
                block_size=self._block_size,
                writes=[write for key, write in writes.items() if key != admitted.request_id],
            )
        order = self._order(admitted, fresh)
        is_started = not admitted.is_asynchronous
        self._flights[order.pass_id] = Flight(admitted, order, is_started)
        return order if is_started else None

    def slices(self) -> list[PassSlice]:
        """Every asynchronous pass, users' before compiles, first come first.

        All are named in every step, for the workers hand on what one leaves of the step's tokens.
        """
        waiting = [
            (pass_id, flight)
            for pass_id, flight in self._flights.items()
            if flight.admitted.is_asynchronous and not flight.is_cancelled
        ]
        waiting.sort(key=lambda item: item[1].admitted.is_compile)
        slices = []
        for pass_id, flight in waiting:
            order = None if flight.is_started else flight.order
            flight.is_started = True
            slices.append(
                PassSlice(pass_id=pass_id, request_id=flight.admitted.request_id, order=order)
            )
        return slices

    def cancel(self, request_id: str) -> None:
        """The request has ended; its asynchronous pass, if it has one, is stopped."""
        for pass_id, flight in self._flights.items():
            admitted = flight.admitted
            if admitted.is_asynchronous and admitted.request_id == request_id:
                flight.is_cancelled = True
                self._cancelled.append(
                    Cancellation(
                        pass_id=pass_id, request_id=request_id, is_started=flight.is_started
                    )
                )

    def take_cancelled(self) -> list[Cancellation]:
        """Passes to stop in this step."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def land(self, pass_id: int) -> Flight | None:
        """The workers have acknowledged a pass; None where it is not known."""
        return self._flights.pop(pass_id, None)

    def _order(self, admitted: AdmittedPass, fresh: tuple[tuple[int, int], ...]) -> PassOrder:
        params = admitted.tracked.params
        selection: dict[str, Any] = {}
        if isinstance(params, BlendParams):
            selection = {
                "policy": params.policy,
                "recompute_ratio": params.recompute_ratio,
                "check_layer": params.check_layer,
            }
        return PassOrder(
            pass_id=next(self._pass_ids),
            token_ids=admitted.tracked.prompt[: admitted.plan.covered_end],
            block_ids=admitted.block_ids,
            plan=admitted.plan,
            fresh_ranges=fresh,
            capture=admitted.capture,
            piece_tokens=self._piece_tokens if admitted.is_asynchronous else None,
            **selection,
        )
