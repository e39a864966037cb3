"""Prompts of random ids for the matrix."""

import uuid

from tests.models.engine import Served
from tests.real.driver import Answer, Prompt, blend_params

from blend_engine.protocol import Policy
from blend_engine.segments import SegmentContext, SegmentSpan

DOCUMENT = 96
LEADING = 200


def moved(served: Served, seed: int) -> Prompt:
    """Two documents, compiled, behind fresh text and with more between and after them."""
    ids = served.ids(100 * seed, 2 * DOCUMENT + 70)
    spans = tuple(
        SegmentSpan(start=start, end=start + DOCUMENT, context=SegmentContext.FREE)
        for start in (30, 50 + DOCUMENT)
    )
    prompt = Prompt(ids, spans)
    served.driver.compile(prompt)
    return prompt


def with_leading_segment(served: Served) -> Prompt:
    """A segment in first place, and a little fresh text."""
    ids = served.ids(7, LEADING + 24)
    return Prompt(ids, (SegmentSpan(start=0, end=LEADING, context=SegmentContext.PREFIX),))


def blend_together(served: Served) -> tuple[Answer, Answer]:
    """A plain and a blended request that begin alike, in one step; and the second one alone."""
    shared, document = served.ids(8, 130), served.ids(9, DOCUMENT)
    begin = len(shared) + 20
    span = SegmentSpan(start=begin, end=begin + DOCUMENT, context=SegmentContext.FREE)
    blended = Prompt([*shared, *served.ids(10, 20), *document, *served.ids(11, 12)], (span,))
    served.driver.compile(blended)
    _, together = served.driver.generate_together(
        [
            (shared + served.ids(12, 9), None),
            (blended.ids, blend_params(blended, Policy.SINKS, 0.25)),
        ],
        salt=uuid.uuid4().hex,
    )
    return together, served.driver.blend(blended, Policy.SINKS, 0.25)
