"""Plans: which part of a prompt a pass covers and what it does with each span. Pure.

    [0, num_computed)            in vLLM's own cache already
    [num_computed, covered_end)  the pass: hits are loaded, the gaps between them computed
    [covered_end, prompt_len)    vLLM's own prefill; at least one token, since it samples from it

Everything is planned from what is left of a hit after `num_computed`, never from the segment's
start: a local prefix hit may end inside a document.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blend_engine.segments import SegmentContext, SegmentKey, SegmentSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The part of a resident segment that a pass loads.

    Args:
        start: First prompt position loaded.
        end: One past the last.
        offset: Segment-relative index of `start`.
        segment_tokens: Length of the whole segment.
        key: Where its KV is.
        context: What its KV was compiled behind.
        segment_index: Index of the span in the request.
    """

    start: int
    end: int
    offset: int
    segment_tokens: int
    key: SegmentKey
    context: SegmentContext
    segment_index: int

    @property
    def num_tokens(self) -> int:
        """Tokens loaded."""
        return self.end - self.start

    @property
    def is_blended(self) -> bool:
        """Whether its KV is approximate where it stands; a prefix's is full prefill's own."""
        return self.context is not SegmentContext.PREFIX

    def num_sinks(self, ratio: float) -> int:
        """How many of its tokens are among the first ``ceil(ratio * length)`` of the segment."""
        return min(self.num_tokens, max(0, math.ceil(ratio * self.segment_tokens) - self.offset))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A covered range and the hits inside it; empty where ``covered_end == num_computed``."""

    num_computed: int
    covered_end: int
    hits: tuple[Hit, ...]

    @property
    def num_external_tokens(self) -> int:
        """What the connector reports to vLLM's scheduler."""
        return self.covered_end - self.num_computed


def make_plan(
    spans: Sequence[SegmentSpan],
    keys: Sequence[SegmentKey | None],
    *,
    num_computed: int,
    prompt_len: int,
    covered_end: int | None = None,
) -> Plan:
    """Plan one request.

    Args:
        spans: The request's segments, sorted and disjoint.
        keys: Per span its key where it is resident, else None.
        num_computed: Tokens in vLLM's own cache; hits inside are not loaded again.
        prompt_len: Tokens in the prompt; the last is always vLLM's.
        covered_end: Where the scheduler has already fixed the range's end.

    Returns:
        The plan. It covers up to the end of the last hit, so misses behind it go through vLLM's own
        chunked prefill and only the gaps between hits are computed inside the pass.
    """
    limit = prompt_len - 1 if covered_end is None else min(covered_end, prompt_len - 1)
    hits = []
    for index, (span, key) in enumerate(zip(spans, keys, strict=True)):
        start, end = max(span.start, num_computed), min(span.end, limit)
        if key is None or end <= start:
            continue
        hits.append(
            Hit(
                start=start,
                end=end,
                offset=start - span.start,
                segment_tokens=span.num_tokens,
                key=key,
                context=span.context,
                segment_index=index,
            )
        )
    if covered_end is None:
        covered_end = hits[-1].end if hits else num_computed
    return Plan(num_computed=num_computed, covered_end=covered_end, hits=tuple(hits))
