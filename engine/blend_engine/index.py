"""SegmentIndex: what is resident, who uses it, and what has to go. Scheduler role; pure.

Owns no KV. The workers hold the bytes and follow: a key that `reserve` hands out is filled by a
worker and then `complete`d; keys in `take_evicted` must be freed by every worker before the next
store of the same step.

    state      lookup finds it   counts against the budget   left by
    RESERVED   no                yes                         complete, abandon
    RESIDENT   yes               yes                         eviction (no lease), drop
    DOOMED     no                yes                         release of the last lease
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from blend_engine.segments import SegmentContext, SegmentKey

TokenArray = NDArray[np.int32]

Owner = tuple[str, SegmentContext]
"""Whose KV it is, and what it was compiled behind."""


class _State(Enum):
    RESERVED = auto()
    RESIDENT = auto()
    DOOMED = auto()


@dataclass(slots=True)
class _Entry:
    token_ids: TokenArray
    owner: Owner | None
    num_bytes: int
    state: _State = _State.RESERVED
    num_leases: int = 0


class SegmentIndex:
    """Segments by key, least recently used first, within a byte budget.

    Args:
        budget_bytes: Bytes that reserved, resident and doomed segments may take together.
        bytes_per_token: KV bytes of one token over all layers, keys and values.
    """

    def __init__(self, *, budget_bytes: int, bytes_per_token: int) -> None:
        self._budget_bytes = budget_bytes
        self._bytes_per_token = bytes_per_token
        self._entries: OrderedDict[SegmentKey, _Entry] = OrderedDict()
        self._evicted: list[SegmentKey] = []
        self._num_bytes = 0
        self.num_evictions = 0

    @property
    def num_bytes(self) -> int:
        """Bytes taken now."""
        return self._num_bytes

    @property
    def num_leases(self) -> int:
        """Leases held now, over all segments."""
        return sum(entry.num_leases for entry in self._entries.values())

    def __len__(self) -> int:
        """Segments that a lookup can find."""
        return sum(entry.state is _State.RESIDENT for entry in self._entries.values())

    def lookup(self, key: SegmentKey, token_ids: TokenArray, owner: Owner | None = None) -> bool:
        """Whether the segment is resident.

        Owner and ids are compared, so where keys collide, another's segment is a miss.
        """
        entry = self._entries.get(key)
        return (
            entry is not None
            and entry.state is _State.RESIDENT
            and entry.owner == owner
            and np.array_equal(entry.token_ids, token_ids)
        )

    def is_reserved(self, key: SegmentKey) -> bool:
        """Whether a compile of the segment is under way."""
        entry = self._entries.get(key)
        return entry is not None and entry.state is _State.RESERVED

    def acquire(self, key: SegmentKey) -> None:
        """Lease a resident segment: it stays until the matching `release`. Marks it used."""
        entry = self._entries[key]
        assert entry.state is _State.RESIDENT
        entry.num_leases += 1
        self._entries.move_to_end(key)

    def release(self, key: SegmentKey) -> SegmentKey | None:
        """Give a lease back.

        Returns:
            The key, if it was doomed and this was its last lease, so that it is gone now.
        """
        entry = self._entries[key]
        assert entry.num_leases > 0, "a lease was released twice"
        entry.num_leases -= 1
        if entry.state is _State.DOOMED and entry.num_leases == 0:
            self._remove(key)
            return key
        return None

    def reserve(self, key: SegmentKey, token_ids: TokenArray, owner: Owner | None = None) -> bool:
        """Make room for a segment about to be compiled, evicting unleased ones, oldest first.

        Returns:
            False where the key is taken, or where room cannot be made; nothing is evicted then.
        """
        if key in self._entries:
            return False
        num_bytes = len(token_ids) * self._bytes_per_token
        missing = self._num_bytes + num_bytes - self._budget_bytes
        victims: list[SegmentKey] = []
        for candidate, entry in self._entries.items():
            if missing <= 0:
                break
            if entry.state is _State.RESIDENT and entry.num_leases == 0:
                victims.append(candidate)
                missing -= entry.num_bytes
        if missing > 0:
            return False
        for victim in victims:
            self._remove(victim)
            self.num_evictions += 1
        self._entries[key] = _Entry(token_ids=token_ids, owner=owner, num_bytes=num_bytes)
        self._num_bytes += num_bytes
        return True

    def fits(self, num_tokens: int) -> bool:
        """Whether a segment of this length can be held at all."""
        return num_tokens * self._bytes_per_token <= self._budget_bytes

    def complete(self, key: SegmentKey) -> None:
        """The workers hold the reserved segment; lookups find it from here on."""
        entry = self._entries[key]
        assert entry.state is _State.RESERVED
        entry.state = _State.RESIDENT
        self._entries.move_to_end(key)

    def abandon(self, key: SegmentKey) -> None:
        """The reserved segment was not made; its room is free again."""
        assert self._entries[key].state is _State.RESERVED
        self._remove(key)

    def discard(self, key: SegmentKey) -> None:
        """Forget a segment that a worker could not load; leased ones go with their last lease."""
        entry = self._entries.get(key)
        if entry is not None and entry.state is _State.RESIDENT:
            self.drop([key])

    def drop(self, keys: Iterable[SegmentKey]) -> tuple[list[SegmentKey], list[SegmentKey]]:
        """Remove segments: at once, or with the last lease.

        Returns:
            The keys gone now, and those that still wait for a lease or for their compile.
        """
        gone: list[SegmentKey] = []
        waiting: list[SegmentKey] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.state is _State.RESERVED:
                waiting.append(key)
            elif entry.num_leases > 0:
                entry.state = _State.DOOMED
                waiting.append(key)
            else:
                self._remove(key)
                gone.append(key)
        return gone, waiting

    def clear(self) -> bool:
        """Remove all segments: at once, or with their last lease.

        Returns:
            Whether no lookup will find any of them; False while one is still being made.
        """
        self.drop(list(self._entries))
        return not any(entry.state is _State.RESERVED for entry in self._entries.values())

    def take_evicted(self) -> list[SegmentKey]:
        """Keys that left since the last call, for the workers to free."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _remove(self, key: SegmentKey) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
        self._evicted.append(key)
