"""SegmentPool: this worker's bytes of every stored segment, in host memory.

Owns the slabs. The scheduler role's index decides what enters and leaves; the pool only obeys, so
it has no budget of its own. Shapes: L layers, T tokens, H KV heads of this rank, D head dim.
"""

from dataclasses import dataclass
from typing import Self

import torch
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
        checksum: Of keys and values, as they were when the compile ended.
    """

    k_LTHD: Tensor
    v_LTHD: Tensor
    start: int
    checksum: tuple[int, int]

    @classmethod
    def seal(cls, k_LTHD: Tensor, v_LTHD: Tensor, start: int) -> Self:
        """A segment whose slabs are full; changes from here on are damage."""
        return cls(k_LTHD=k_LTHD, v_LTHD=v_LTHD, start=start, checksum=_checksum(k_LTHD, v_LTHD))

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self.k_LTHD.shape[1]

    def is_intact(self, num_tokens: int) -> bool:
        """Whether it is as it was sealed, and as long as the index says."""
        shapes = (self.k_LTHD.shape[:3], self.v_LTHD.shape[:3])
        return (
            shapes[0] == shapes[1]
            and self.num_tokens == num_tokens
            and _checksum(self.k_LTHD, self.v_LTHD) == self.checksum
        )


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


def _checksum(k_LTHD: Tensor, v_LTHD: Tensor) -> tuple[int, int]:
    """Sums of keys and of values as 64-bit words: at memory speed, without temporaries."""
    return _word_sum(k_LTHD), _word_sum(v_LTHD)


def _word_sum(slab: Tensor) -> int:
    flat = slab.reshape(-1).view(torch.uint8)
    whole = len(flat) - len(flat) % 8
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())
