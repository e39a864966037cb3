"""Segments: spans of token ids reused as a whole, and the keys they are stored under.

Pure; imports neither torch nor vLLM, so the gateway and both connector roles share it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

SegmentKey = NewType("SegmentKey", str)

WRAPPER_VERSION = "1"
"""Names what a `free` segment is compiled behind. A change of the ballast or of the separators is a
new version, since KV compiled behind another text is other KV."""


class SegmentContext(StrEnum):
    """What a segment's KV was compiled behind (docs/decisions/0002)."""

    PREFIX = "prefix"
    """Nothing. Reuse in first place is exact."""
    FREE = "free"
    """The constant ballast of `WRAPPER_VERSION`. Reuse anywhere, approximate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpan:
    """A segment's place in a prompt: the half-open token range ``[start, end)``."""

    start: int
    end: int
    context: SegmentContext

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start


def segment_key(
    tenant: str, context: SegmentContext, token_ids: Sequence[int] | NDArray[np.integer[Any]]
) -> SegmentKey:
    """Hash what identifies a segment's KV within one engine.

    Length-prefixed fields, so no tenant name can imitate another's. The model, its revision and the
    KV dtype are constant within an engine and its store lives in memory, so they are not part of
    it. The store compares token ids besides, so a collision is a miss, never another segment's KV.

    Args:
        tenant: Owner of the KV; two tenants never share a key.
        context: What the KV is compiled behind.
        token_ids: The segment's own token ids.

    Returns:
        64 hexadecimal characters.
    """
    digest = hashlib.blake2b(digest_size=32)
    for field in (tenant.encode(), context.value.encode(), WRAPPER_VERSION.encode()):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    digest.update(np.asarray(token_ids, dtype=np.int64).tobytes())
    return SegmentKey(digest.hexdigest())
