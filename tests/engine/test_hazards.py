"""Laws of `fresh_ranges`: which part of a local hit nobody has written before the pass runs."""

from hypothesis import HealthCheck, given, settings, strategies as st

from blend_engine.hazards import ForwardWrite, fresh_ranges

RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BLOCK_SIZE = 16


@st.composite
def block_lists(draw: st.DrawFn) -> list[int]:
    """Distinct blocks out of few, so that lists share some, at equal and at other places."""
    return draw(st.permutations(range(6)))[: draw(st.integers(0, 6))]


@st.composite
def forward_writes(draw: st.DrawFn, block_ids: list[int], block_size: int) -> ForwardWrite:
    """A write to blocks of which the first are those of `block_ids`, or to unrelated ones."""
    num_shared = draw(st.integers(0, len(block_ids)))
    others = [block for block in draw(block_lists()) if block not in block_ids[:num_shared]]
    start, end = sorted(draw(st.tuples(*[st.integers(0, 6 * block_size)] * 2)))
    return ForwardWrite(block_ids=(*block_ids[:num_shared], *others), start=start, end=end)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, int, list[ForwardWrite]]:
    block_size = draw(st.sampled_from([1, 3, 16]))
    block_ids = draw(block_lists())
    num_computed = draw(st.integers(0, len(block_ids) * block_size))
    writes = draw(st.lists(forward_writes(block_ids, block_size), max_size=4))
    return block_ids, num_computed, block_size, writes


@RELAXED
@given(steps())
def test_token_is_fresh_where_the_forward_writes_the_block_it_was_hit_in(step):
    """A position needs computing exactly where another request's write lands in a shared block."""
    block_ids, num_computed, block_size, writes = step
    want = {
        position
        for position in range(num_computed)
        for write in writes
        if write.start <= position < write.end
        and position // block_size < len(write.block_ids)
        and write.block_ids[position // block_size] == block_ids[position // block_size]
    }
    got = fresh_ranges(block_ids, num_computed=num_computed, block_size=block_size, writes=writes)
    assert {position for start, end in got for position in range(start, end)} == want


@RELAXED
@given(steps())
def test_ranges_are_sorted_disjoint_and_not_empty(step):
    """Ranges can be counted and walked without looking at their neighbours."""
    block_ids, num_computed, block_size, writes = step
    previous_end = -1
    for start, end in fresh_ranges(
        block_ids, num_computed=num_computed, block_size=block_size, writes=writes
    ):
        assert previous_end < start < end <= num_computed
        previous_end = end


def test_blocks_written_in_this_step_are_fresh():
    """A prefix that another request's forward writes only after the pass has no KV yet."""
    write = ForwardWrite(block_ids=(7, 8, 9), start=0, end=40)
    ranges = fresh_ranges([7, 8, 5], num_computed=32, block_size=BLOCK_SIZE, writes=[write])
    assert ranges == ((0, 32),)


def test_what_was_written_in_earlier_steps_is_not_fresh():
    """Only the part that this step's forward writes is missing, not the part before it."""
    write = ForwardWrite(block_ids=(7, 8, 9), start=20, end=48)
    ranges = fresh_ranges([7, 8, 9, 5], num_computed=48, block_size=BLOCK_SIZE, writes=[write])
    assert ranges == ((20, 48),)


def test_block_at_another_place_is_not_shared():
    """A block that was freed and handed out again has nothing to do with the hit."""
    write = ForwardWrite(block_ids=(8, 7), start=0, end=32)
    assert fresh_ranges([7, 8], num_computed=32, block_size=BLOCK_SIZE, writes=[write]) == ()


def test_blocks_behind_the_local_hit_are_left_alone():
    """What the pass or the forward fills anyway is never counted as part of the hit."""
    write = ForwardWrite(block_ids=(7, 8, 9), start=0, end=48)
    ranges = fresh_ranges([7, 8, 9], num_computed=16, block_size=BLOCK_SIZE, writes=[write])
    assert ranges == ((0, 16),)


def test_write_inside_another_leaves_the_longer_one():
    """Of two forwards that write one block, the shorter does not hide the rest of the longer."""
    writes = [
        ForwardWrite(block_ids=(7,), start=0, end=14),
        ForwardWrite(block_ids=(7,), start=3, end=5),
    ]
    ranges = fresh_ranges([7], num_computed=16, block_size=BLOCK_SIZE, writes=writes)
    assert ranges == ((0, 14),)


def test_no_writes_no_hazard():
    """A step in which nobody else runs leaves the local hit as it is."""
    assert fresh_ranges([7, 8], num_computed=32, block_size=BLOCK_SIZE, writes=[]) == ()
