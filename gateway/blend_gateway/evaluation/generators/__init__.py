"""Where tasks come from: one module for each kind, every one a pure function of its arguments."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from blend_gateway.evaluation.generators import (
    aliases,
    coreference,
    needles,
    overrides,
    qa,
    recall,
    variables,
)
from blend_gateway.evaluation.generators.layout import Draft, lay_out
from blend_gateway.evaluation.generators.vocabulary import Count
from blend_gateway.evaluation.tasks import Sizes, Task, Variant

Drafter = Callable[[Variant, int, random.Random, Count], Draft]
"""Variant, number, randomness and token count to what the documents must state."""

MADE_UP: Mapping[str, Drafter] = MappingProxyType(
    {
        "needle_single": needles.single,
        "needle_multi_key": needles.multi_key,
        "needle_multi_value": needles.multi_value,
        "needle_multi_query": needles.multi_query,
        "variable_tracking": variables.draft,
        "alias": aliases.draft,
        "override": overrides.draft,
        "coreference": coreference.draft,
        "recall": recall.draft,
        "multi_document_qa": qa.draft,
    }
)
"""Families of made-up text; each has both variants."""


def make_up(family: str, variant: Variant, number: int, *, seed: int, sizes: Sizes) -> Task:
    """Make a task of an invented world.

    The same arguments give an equal task, in any process. The two variants of a number are twins:
    they share their names and values, and those do not depend on the length.

    Args:
        family: One of `MADE_UP`.
        variant: Whether one document suffices.
        number: Index within the cell; ``stratum(number)`` is the task's depth and order.
        seed: Of the whole evaluation.
        sizes: The prompt's length and its documents'.

    Raises:
        ValueError: There is no such family, or the length has no room for it.
    """
    if family not in MADE_UP:
        raise ValueError(f"`family` must be one of {sorted(MADE_UP)}, got {family!r}")
    rng = random.Random(f"{family}/{seed}/{number}")
    draft = MADE_UP[family](variant, number, rng, sizes.count)
    return lay_out(draft, family=family, variant=variant, number=number, seed=seed, sizes=sizes)
