"""A worker's memory with a witness: per slot of the paged cache which token's KV it holds.

`TracedPass` stands where the real worker has its `ModelPass`: what to load, to select, to compute
and to keep is decided by the real code, and only the arithmetic is left out. The worker takes any
exception for a failed load, so what is wrong is noted in `TracedMemory.broken` and asserted later.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from blend_engine.messages import BlendMetadata
from blend_engine.model_pass import Work
from blend_engine.plan import Hit
from blend_engine.pool import SegmentPool, StoredSegment
from blend_engine.segments import SegmentContext, SegmentKey


@dataclass(frozen=True, slots=True)
class Written:
    """The KV in one slot: whose token it is, and where the token stands."""

    token_id: int
    position: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose KV it is."""

    request_id: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Prompt range ``[start, end)`` of a request, for the forward to compute."""

    owner: "Owner"
    block_ids: Sequence[int]
    token_ids: Sequence[int]
    start: int
    end: int


@dataclass(slots=True)
class PassTrace:
    """What one pass did, by prompt position.

    Args:
        exact: Loaded, and what full prefill would have made.
        blended: Loaded, and not quite that.
        computed: Fresh.
        foreign: Written into blocks that were given to others.
        is_faulted: Whether it was told to fail.
    """

    exact: set[int] = field(default_factory=set)
    blended: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    foreign: set[int] = field(default_factory=set)
    is_faulted: bool = False

    @property
    def written(self) -> set[int]:
        return self.exact | self.blended | self.computed


class TracedMemory:
    """Slots, what passes did to them, and which stored KV is still alive.

    Stands for the worker's `AttachedModel` as well: the part of it that the worker itself reads.

    Args:
        pool: The worker's.
        block_size: Tokens per block.
        store_tokens: Tokens that the segment pool may hold at any moment.
        tenants: Their places here are what stored KV is marked with.
    """

    num_layers = 4

    def __init__(
        self, pool: SegmentPool, *, block_size: int, store_tokens: int, tenants: Sequence[str]
    ) -> None:
        self.broken: list[str] = []
        self.faults: Counter[str] = Counter()
        self.damaged: set[int] = set()
        self.num_versions = 0
        self.tenants = tenants
        self.owners: dict[tuple[int, ...], Owner] = {}
        self.traces: dict[tuple[int, ...], PassTrace] = {}
        self.pool = pool
        self._block_size = block_size
        self._store_tokens = store_tokens
        self._owner_of_block: dict[int, Owner] = {}
        self._slots: dict[int, Written] = {}
        self._dead: set[int] = set()
        self._held: dict[SegmentKey, int] = {}

    def expect(self, is_so: bool, broken: str) -> None:
        if not is_so:
            self.broken.append(broken)

    def fail_if_told(self, what: str) -> None:
        """Raise what a device without memory would, if a fault was ordered."""
        if self.faults[what] > 0:
            self.faults[what] -= 1
            raise RuntimeError(what)

    # The paged cache.

    def give(self, block_ids: Iterable[int], owner: Owner) -> None:
        """The blocks have a new owner: what they hold counts no more."""
        for block in block_ids:
            self._owner_of_block[block] = owner
            for slot in range(block * self._block_size, (block + 1) * self._block_size):
                self._slots.pop(slot, None)

    def take_back(self, block_ids: Iterable[int], owner: Owner) -> None:
        """The request is gone; others may read its blocks, and nobody may write them."""
        for block in block_ids:
            if self._owner_of_block.get(block) == owner:
                del self._owner_of_block[block]

    def is_owned(self, block_ids: Sequence[int], position: int, owner: Owner) -> bool:
        return self._owner_of_block.get(block_ids[position // self._block_size]) == owner

    def slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self._block_size] * self._block_size + (
            position % self._block_size
        )

    def write(self, block_ids: Sequence[int], written: Written) -> None:
        self._slots[self.slot(block_ids, written.position)] = written

    def read(self, rows: Rows, who: str) -> None:
        """Attention of the rows up to `rows.end`: every position before it must be there."""
        for position in range(rows.end):
            want = Written(rows.token_ids[position], position, rows.owner.tenant)
            got = self._slots.get(self.slot(rows.block_ids, position))
            self.expect(got == want, f"{who} reads {got} for {want}")

    def forward(self, batch: Sequence[Rows]) -> None:
        """vLLM's own forward: in every layer all rows are written before any is read."""
        for rows in batch:
            for position in range(rows.start, rows.end):
                is_owned = self.is_owned(rows.block_ids, position, rows.owner)
                self.expect(is_owned, f"the forward writes position {position} in another's block")
                written = Written(rows.token_ids[position], position, rows.owner.tenant)
                self.write(rows.block_ids, written)
        for rows in batch:
            self.read(rows, "the forward")

    # The store.

    def before_orders(self, metadata: BlendMetadata) -> None:
        """Note what the orders free, before the worker obeys them."""
        for key in metadata.freed_keys:
            self._dead.add(self._held.pop(key, 0))

    def after_orders(self, captured: Iterable[SegmentKey]) -> None:
        """Note what was stored by a step's passes."""
        for key in captured:
            stored = self.pool.get(key)
            self.expect(stored is not None, "a captured segment is not in the pool")
            if stored is not None:
                self.expect(key not in self._held, "a store met KV that was never freed")
                self._held[key] = version_of(stored)

    @property
    def held_keys(self) -> set[SegmentKey]:
        """Segments stored and not freed since, by the orders."""
        return set(self._held)

    def damage(self, key: SegmentKey) -> None:
        """Change stored KV behind the store's back."""
        stored = pool_segments(self.pool)[key]
        with torch.inference_mode():
            stored.k_LTHD[0, 0, 0, 0] += 1
        self.damaged.add(version_of(stored))

    def version(self, key: SegmentKey) -> int:
        return version_of(pool_segments(self.pool)[key])

    def is_damaged(self, key: SegmentKey) -> bool:
        stored = self.pool.get(key)
        return stored is not None and version_of(stored) in self.damaged

    def check_load(
        self, hit: Hit, stored: StoredSegment, wanted: Sequence[int], tenant: str
    ) -> None:
        version, start = version_of(stored), stored.start + hit.offset
        rows = slice(hit.offset, hit.offset + hit.num_tokens)
        got = stored.k_LTHD[0, rows, 0].tolist()
        want = [[token, start + index] for index, token in enumerate(wanted)]
        self.expect(got == want, f"{hit} finds {got}, not {want}")
        self.expect(self.tenants[int(stored.v_LTHD[0, 0, 0, 0])] == tenant, "another tenant's KV")
        is_first = hit.context is SegmentContext.PREFIX
        self.expect(is_first == (stored.start == 0), "KV compiled behind something else")
        self.expect(version not in self._dead, "evicted KV is read")
        self.expect(version not in self.damaged, "damaged KV is read")

    def check_room(self, num_tokens: int) -> None:
        held = sum(stored.num_tokens for stored in pool_segments(self.pool).values())
        self.expect(held + num_tokens <= self._store_tokens, "the pool holds more than its budget")


def version_of(stored: StoredSegment) -> int:
    """Which compile made it."""
    return int(stored.v_LTHD[0, 0, 0, 1])


def pool_segments(pool: SegmentPool) -> dict[SegmentKey, StoredSegment]:
    """All that a pool holds; nobody but a witness needs to see that."""
    return pool._segments


@dataclass(frozen=True, slots=True)
class _Piece:
    hit: Hit


class TracedPass:
    """`ModelPass` without a model: writes and reads slots as the real one would."""

    def __init__(
        self,
        memory: TracedMemory,
        vllm_config: Any,
        token_ids: NDArray[Any],
        block_ids: tuple[int, ...],
        piece_tokens: int | None = None,
    ) -> None:
        self._memory = memory
        self._token_ids = token_ids.tolist()
        self._block_ids = block_ids
        self._piece_tokens = piece_tokens or len(self._token_ids)
        self._owner = memory.owners[block_ids]
        self._trace = memory.traces[block_ids] = PassTrace()

    def load(self, hit: Hit, stored: StoredSegment, check_layer: int | None) -> _Piece | None:
        self._fail_if_told("load")
        wanted = self._token_ids[hit.start : hit.end]
        self._memory.check_load(hit, stored, wanted, self._owner.tenant)
        is_exact = hit.context is SegmentContext.PREFIX
        loaded = self._trace.exact if is_exact else self._trace.blended
        for position in range(hit.start, hit.end):
            self._write(position)
            loaded.add(position)
        return None if check_layer is None else _Piece(hit)

    def peek(self, positions_T: Tensor, loaded: Sequence[_Piece], check_layer: int) -> Work[Tensor]:
        positions = {position for piece in loaded for position in range(*_range(piece.hit))}
        self._memory.expect(positions <= set(positions_T.tolist()), "a peek leaves out hits")
        for piece_T in positions_T.split(self._piece_tokens):
            yield len(piece_T) * check_layer // self._memory.num_layers
        return torch.tensor([(position * 37) % 11 for position in sorted(positions)]).float()

    def compute(self, positions_T: Tensor, *, max_tokens: int | None = None) -> Work[None]:
        try:
            self._fail_if_told("compute")
        except RuntimeError:
            # The worker begins anew without stored KV, and may find what was loaded overwritten.
            self._trace.exact.clear()
            self._trace.blended.clear()
            raise
        yield from self._compute(positions_T)

    def allocate(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        self._fail_if_told("allocate")
        self._memory.check_room(num_tokens)
        shape = (1, num_tokens, 1, 2)
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)

    def compute_and_capture(
        self, positions_T: Tensor, start: int, slabs: tuple[Tensor, Tensor]
    ) -> Work[StoredSegment]:
        self._fail_if_told("capture")
        yield from self._compute(positions_T)
        end = start + slabs[0].shape[1]
        self._memory.num_versions += 1
        slabs[0][0, :, 0] = torch.tensor(
            [[self._token_ids[position], position] for position in range(start, end)]
        )
        slabs[1][0, :, 0] = torch.tensor(
            [self._memory.tenants.index(self._owner.tenant), self._memory.num_versions]
        )
        return StoredSegment.seal(*slabs, start)

    def _fail_if_told(self, what: str) -> None:
        try:
            self._memory.fail_if_told(what)
        except RuntimeError:
            self._trace.is_faulted = True
            raise

    def _compute(self, positions_T: Tensor) -> Work[None]:
        for piece_T in positions_T.split(self._piece_tokens):
            positions = piece_T.tolist()
            for position in positions:
                self._write(position)
                self._trace.computed.add(position)
            rows = Rows(
                owner=self._owner,
                block_ids=self._block_ids,
                token_ids=self._token_ids,
                start=positions[0],
                end=positions[-1] + 1,
            )
            self._memory.read(rows, "a pass")
            yield len(positions)

    def _write(self, position: int) -> None:
        if not self._memory.is_owned(self._block_ids, position, self._owner):
            self._trace.foreign.add(position)
        written = Written(self._token_ids[position], position, self._owner.tenant)
        self._memory.write(self._block_ids, written)


def _range(hit: Hit) -> tuple[int, int]:
    return hit.start, hit.end
