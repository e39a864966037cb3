"""The same-step hazard: blocks published before they are written.

vLLM puts a request's full blocks into its prefix cache when it schedules the request, before any
forward has filled them. A request admitted later in the same step may hit those blocks. vLLM's own
forward is safe, since every layer writes before it attends; a pass runs before that forward and
would read blocks that nobody has written yet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWrite:
    """The prompt range ``[start, end)`` of a request that this step's forward writes."""

    block_ids: Sequence[int]
    start: int
    end: int


def fresh_ranges(
    block_ids: Sequence[int],
    *,
    num_computed: int,
    block_size: int,
    writes: Iterable[ForwardWrite],
) -> tuple[tuple[int, int], ...]:
    """Parts of a local hit that the coming forward writes, which a pass must compute itself.

    A shared block stands at the same index in both requests, so positions agree.

    Args:
        block_ids: Blocks of the request with the pass.
        num_computed: Length of its local hit in tokens.
        block_size: Tokens per block.
        writes: What the forward writes for every other request of the step.

    Returns:
        Sorted, disjoint ranges within ``[0, num_computed)``.
    """
    num_blocks = -(-num_computed // block_size)
    shared: Mapping[int, int] = {block: index for index, block in enumerate(block_ids[:num_blocks])}
    positions: set[tuple[int, int]] = set()
    for write in writes:
        for index in range(write.start // block_size, -(-write.end // block_size)):
            if index < len(write.block_ids) and shared.get(write.block_ids[index]) == index:
                start = max(write.start, index * block_size)
                end = min(write.end, (index + 1) * block_size, num_computed)
                if start < end:
                    positions.add((start, end))
    return _merge(sorted(positions))


def _merge(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)
