"""Laws of `SegmentIndex`: budget, leases, least recently used first, and every key freed once."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blend_engine.index import SegmentIndex, TokenArray
from blend_engine.segments import SegmentContext, SegmentKey

BYTES_PER_TOKEN = 8
A, B, C, D = (SegmentKey(name) for name in "ABCD")


def tokens(length: int, first: int = 0) -> TokenArray:
    return np.arange(first, first + length, dtype=np.int32)


def index_with(*keys: SegmentKey, room_tokens: int = 12, length: int = 4) -> SegmentIndex:
    """An index in which `keys` are resident, `length` tokens each, the first the oldest."""
    index = SegmentIndex(
        budget_bytes=room_tokens * BYTES_PER_TOKEN, bytes_per_token=BYTES_PER_TOKEN
    )
    for key in keys:
        assert index.reserve(key, tokens(length))
        index.complete(key)
    return index


def test_reserved_segment_is_found_only_when_complete():
    """A lookup never finds KV that is still being made."""
    index = index_with()
    assert index.reserve(A, tokens(4))
    assert index.is_reserved(A)
    assert not index.lookup(A, tokens(4))
    assert len(index) == 0
    index.complete(A)
    assert not index.is_reserved(A)
    assert index.lookup(A, tokens(4))
    assert len(index) == 1


@pytest.mark.parametrize(
    "other", [tokens(4, first=1), tokens(3), tokens(5), tokens(0)], ids=["ids", "-1", "+1", "none"]
)
def test_colliding_key_is_a_miss(other):
    """Equal keys with other token ids never hand out another segment's KV."""
    index = index_with(A)
    assert index.lookup(A, tokens(4))
    assert not index.lookup(A, other)


@pytest.mark.parametrize(
    "other", [("globex", SegmentContext.FREE), ("acme", SegmentContext.PREFIX), None]
)
def test_colliding_key_of_another_owner_is_a_miss(other):
    """Nor do equal keys with equal ids hand out another tenant's KV, or another context's."""
    index, owner = index_with(), ("acme", SegmentContext.FREE)
    assert index.reserve(A, tokens(4), owner)
    index.complete(A)
    assert index.lookup(A, tokens(4), owner)
    assert not index.lookup(A, tokens(4), other)


@pytest.mark.parametrize("state", ["reserved", "resident", "doomed"])
def test_taken_key_is_not_reserved_again(state):
    """A key has one owner, whatever state it is in, and asking again changes nothing."""
    index = index_with()
    assert index.reserve(A, tokens(4))
    if state != "reserved":
        index.complete(A)
    if state == "doomed":
        index.acquire(A)
        index.drop([A])
    assert not index.reserve(A, tokens(4))
    assert index.num_bytes == 4 * BYTES_PER_TOKEN
    assert index.take_evicted() == []


def test_abandoned_segment_gives_its_room_back():
    """A compile that failed leaves nothing but an order to free what the workers may hold."""
    index = index_with()
    assert index.reserve(A, tokens(12))
    index.abandon(A)
    assert index.num_bytes == 0
    assert index.take_evicted() == [A]
    assert index.reserve(B, tokens(12))


def test_least_recently_used_goes_first():
    """Room is made by age of last use; a lease is a use, a lookup is none."""
    index = index_with(A, B, C)
    index.acquire(A)
    index.release(A)
    assert index.lookup(B, tokens(4))
    assert index.reserve(D, tokens(4))
    assert index.take_evicted() == [B]
    assert index.num_evictions == 1


def test_completion_counts_as_use():
    """A segment's age starts when it can be found, not when its compile began."""
    index = index_with(room_tokens=12)
    assert index.reserve(A, tokens(4))
    assert index.reserve(B, tokens(4))
    index.complete(B)
    index.complete(A)
    assert index.reserve(C, tokens(8))
    assert index.take_evicted() == [B]


def test_no_more_is_evicted_than_needed():
    """Eviction stops as soon as the new segment fits."""
    index = index_with(A, B, C)
    assert index.reserve(D, tokens(5))
    assert index.take_evicted() == [A, B]
    assert index.lookup(C, tokens(4))


def test_leased_segment_is_not_evicted():
    """Whoever holds a lease finds the segment when its pass runs."""
    index = index_with(A, B, C)
    index.acquire(A)
    assert index.reserve(D, tokens(4))
    assert index.take_evicted() == [B]
    assert index.lookup(A, tokens(4))


def test_nothing_is_evicted_where_room_cannot_be_made():
    """A segment that does not fit costs the others nothing."""
    index = index_with(A, B, C)
    index.acquire(C)
    assert not index.reserve(D, tokens(9))
    assert index.take_evicted() == []
    assert index.num_evictions == 0
    assert len(index) == 3
    assert not index.reserve(D, tokens(13))


def test_segment_as_large_as_the_budget_fits():
    """The budget is a bound that may be reached."""
    index = index_with(A, B, C)
    assert index.reserve(D, tokens(12))
    assert index.num_bytes == 12 * BYTES_PER_TOKEN


def test_reserved_room_is_not_evicted():
    """A compile under way keeps its room."""
    index = index_with(room_tokens=8)
    assert index.reserve(A, tokens(8))
    assert not index.reserve(B, tokens(1))


def test_dropped_segment_goes_at_once():
    """A drop without leases frees the room and is no eviction."""
    index = index_with(A, B)
    assert index.drop([A, C]) == ([A], [])
    assert not index.lookup(A, tokens(4))
    assert index.num_bytes == 4 * BYTES_PER_TOKEN
    assert index.take_evicted() == [A]
    assert index.num_evictions == 0


def test_doomed_segment_goes_with_its_last_lease():
    """A dropped segment in use is hidden at once and freed when its last user is done."""
    index = index_with(A)
    index.acquire(A)
    index.acquire(A)
    assert index.drop([A]) == ([], [A])
    assert not index.lookup(A, tokens(4))
    assert len(index) == 0
    assert index.release(A) is None
    assert index.take_evicted() == []
    assert index.num_bytes == 4 * BYTES_PER_TOKEN
    assert index.release(A) == A
    assert index.take_evicted() == [A]
    assert index.num_bytes == 0


def test_drop_waits_for_a_compile():
    """What is being made cannot be removed yet, and the caller is told."""
    index = index_with()
    assert index.reserve(A, tokens(4))
    assert index.drop([A]) == ([], [A])
    assert index.is_reserved(A)
    assert index.take_evicted() == []


def test_discard_touches_resident_segments_only():
    """A failed load removes what it was about, not a compile that has begun since."""
    index = index_with(A)
    index.discard(A)
    assert index.take_evicted() == [A]
    index.discard(A)
    assert index.reserve(A, tokens(4))
    index.discard(A)
    assert index.is_reserved(A)
    assert index.take_evicted() == []


def test_lease_is_not_released_twice():
    """A second release is a mistake of ours, and loud."""
    index = index_with(A)
    index.acquire(A)
    assert index.release(A) is None
    with pytest.raises(AssertionError, match="released twice"):
        index.release(A)


def test_clearing_forgets_what_is_there_and_tells_of_what_is_not_there_yet():
    """Nothing of before is found after it; KV that is still being made would be, so it says so."""
    index = index_with(A, B)
    index.acquire(A)
    assert index.clear()
    assert not index.lookup(A, tokens(4))
    assert index.take_evicted() == [B]
    assert index.release(A) == A
    assert index.reserve(C, tokens(4))
    assert not index.clear()
    index.complete(C)
    assert index.clear()
    assert index.num_bytes == 0


@dataclass
class Expected:
    """What the index should hold under one key."""

    token_ids: TokenArray
    state: str
    last_use: int
    num_leases: int = 0


class IndexAgreesWithModel(RuleBasedStateMachine):
    """A list of entries with the time of their last use, searched from scratch each time."""

    BUDGET_TOKENS = 10
    KEYS = st.sampled_from([SegmentKey(f"key-{number}") for number in range(6)])
    TOKENS = st.builds(tokens, st.integers(0, 6), st.sampled_from([0, 100]))

    def __init__(self) -> None:
        super().__init__()
        self.index = index_with(room_tokens=self.BUDGET_TOKENS)
        self.model: dict[SegmentKey, Expected] = {}
        self.freed: list[SegmentKey] = []
        self.num_evictions = 0
        self.clock = 0

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def used_tokens(self) -> int:
        return sum(len(entry.token_ids) for entry in self.model.values())

    def remove(self, key: SegmentKey) -> None:
        del self.model[key]
        self.freed.append(key)

    def keys_in(self, *states: str) -> list[SegmentKey]:
        return sorted(key for key, entry in self.model.items() if entry.state in states)

    @rule(key=KEYS, token_ids=TOKENS)
    def reserve(self, key: SegmentKey, token_ids: TokenArray) -> None:
        fits = key not in self.model
        victims: list[SegmentKey] = []
        if fits:
            missing = self.used_tokens() + len(token_ids) - self.BUDGET_TOKENS
            idle = [name for name in self.keys_in("resident") if self.model[name].num_leases == 0]
            idle.sort(key=lambda name: self.model[name].last_use)
            while missing > 0 and idle:
                victims.append(idle.pop(0))
                missing -= len(self.model[victims[-1]].token_ids)
            fits = missing <= 0
        assert self.index.reserve(key, token_ids) is fits
        if fits:
            for victim in victims:
                self.remove(victim)
            self.num_evictions += len(victims)
            self.model[key] = Expected(token_ids, "reserved", self.now())

    @precondition(lambda self: self.keys_in("reserved"))
    @rule(data=st.data(), made=st.booleans())
    def end_compile(self, data: st.DataObject, made: bool) -> None:
        key = data.draw(st.sampled_from(self.keys_in("reserved")))
        if made:
            self.index.complete(key)
            self.model[key].state = "resident"
            self.model[key].last_use = self.now()
        else:
            self.index.abandon(key)
            self.remove(key)

    @precondition(lambda self: self.keys_in("resident"))
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.keys_in("resident")))
        self.index.acquire(key)
        self.model[key].num_leases += 1
        self.model[key].last_use = self.now()

    @precondition(lambda self: any(entry.num_leases for entry in self.model.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        leased = sorted(key for key, entry in self.model.items() if entry.num_leases)
        key = data.draw(st.sampled_from(leased))
        entry = self.model[key]
        entry.num_leases -= 1
        is_gone = entry.state == "doomed" and entry.num_leases == 0
        assert self.index.release(key) == (key if is_gone else None)
        if is_gone:
            self.remove(key)

    @rule(keys=st.lists(KEYS, max_size=3, unique=True))
    def drop(self, keys: list[SegmentKey]) -> None:
        gone = [
            key
            for key in keys
            if key in self.keys_in("resident") and not self.model[key].num_leases
        ]
        waiting = [key for key in keys if key in self.model and key not in gone]
        assert self.index.drop(keys) == (gone, waiting)
        for key in gone:
            self.remove(key)
        for key in waiting:
            if self.model[key].state == "resident":
                self.model[key].state = "doomed"

    @rule(key=KEYS)
    def discard(self, key: SegmentKey) -> None:
        self.index.discard(key)
        if key in self.keys_in("resident"):
            if self.model[key].num_leases:
                self.model[key].state = "doomed"
            else:
                self.remove(key)

    @rule(key=KEYS, token_ids=TOKENS)
    def lookup(self, key: SegmentKey, token_ids: TokenArray) -> None:
        is_hit = key in self.keys_in("resident") and np.array_equal(
            self.model[key].token_ids, token_ids
        )
        assert self.index.lookup(key, token_ids) is is_hit

    @rule()
    def each_key_is_freed_once(self) -> None:
        assert self.index.take_evicted() == self.freed
        assert self.index.take_evicted() == []
        self.freed = []

    @invariant()
    def counts_agree(self) -> None:
        assert self.index.num_bytes == self.used_tokens() * BYTES_PER_TOKEN
        assert 0 <= self.index.num_bytes <= self.BUDGET_TOKENS * BYTES_PER_TOKEN
        assert self.index.num_leases == sum(entry.num_leases for entry in self.model.values())
        assert self.index.num_evictions == self.num_evictions
        assert len(self.index) == len(self.keys_in("resident"))

    @invariant()
    def states_agree(self) -> None:
        for key, entry in self.model.items():
            assert self.index.lookup(key, entry.token_ids) is (entry.state == "resident")
            assert self.index.is_reserved(key) is (entry.state == "reserved")


TestIndexAgreesWithModel = IndexAgreesWithModel.TestCase
TestIndexAgreesWithModel.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
