"""SegmentPool: this worker's bytes of every stored segment, in host memory.

Owns the slabs. The scheduler role's index decides what enters and leaves; the pool only obeys, so
it has no budget of its own. Shapes: L layers, T tokens, H KV heads of this rank, D head dim.
"""

from dataclasses import dataclass

from torch import Tensor

from blend_engine.segments import SegmentKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegment:
    """One segment's KV as it was compiled.

    Args:
        k_LTHD: Keys after RoPE, in the model's dtype; contiguous.
        v_LTHD: Values; contiguous.
        start: Position at which the first token was compiled. Kept with the KV, since
            without it the keys cannot be moved.
    """

    k_LTHD: Tensor
    v_LTHD: Tensor
    start: int

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self.k_LTHD.shape[1]


class SegmentPool:
    """Stored segments by key."""

    def __init__(self) -> None:
        self._segments: dict[SegmentKey, StoredSegment] = {}

    def __len__(self) -> int:
        """Segments held."""
        return len(self._segments)

    def get(self, key: SegmentKey) -> StoredSegment | None:
        """The segment, or None where it is gone."""
        return self._segments.get(key)

    def put(self, key: SegmentKey, segment: StoredSegment) -> None:
        """Keep a segment, replacing an older one of the same key."""
        self._segments[key] = segment

    def free(self, key: SegmentKey) -> None:
        """Forget a segment; unknown keys are fine, since a failed compile never arrived."""
        self._segments.pop(key, None)
