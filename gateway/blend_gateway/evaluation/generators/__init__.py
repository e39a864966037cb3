"""Where tasks come from: one module for each kind, every one a pure function of its arguments."""

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from blend_gateway.evaluation.generators import (
    aliases,
    coreference,
    musique,
    needles,
    overrides,
    qa,
    recall,
    topics,
    variables,
)
from blend_gateway.evaluation.generators.layout import Draft, lay_out
from blend_gateway.evaluation.generators.vocabulary import Count
from blend_gateway.evaluation.tasks import Sizes, Task, Variant
from blend_gateway.evaluation.texts import MusiqueRow, python_topics

Drafter = Callable[[Variant, int, random.Random, Count], Draft]
"""Variant, number, randomness and token count to what the documents must state."""

_MADE_UP: Mapping[str, Drafter] = MappingProxyType(
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

VARIANTS: Mapping[str, tuple[Variant, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_MADE_UP, (Variant.DIRECT, Variant.DERIVED)),
        topics.FAMILY: (Variant.DIRECT,),
        musique.FAMILY: (Variant.DERIVED,),
        musique.SHORT_FAMILY: (Variant.DERIVED,),
    }
)
"""All families and the variants each of them has. Only those of made-up text have twins."""

NEEDS_MUSIQUE = frozenset({musique.FAMILY, musique.SHORT_FAMILY})
"""Families whose text is not part of the project; they have as many tasks as there are rows."""


def generate(
    family: str,
    variant: Variant,
    number: int,
    *,
    seed: int,
    sizes: Sizes,
    rows: Sequence[MusiqueRow] = (),
) -> Task:
    """Make a task.

    The same arguments give an equal task, in any process. The two variants of a number are twins:
    they share their names and values, and those do not depend on the length.

    Args:
        family: One of `VARIANTS`.
        variant: One that the family has.
        number: Index within the cell; ``stratum(number)`` is the task's depth and order, but for
            questions of MuSiQue, which go through the file in its own order first.
        seed: Of the whole evaluation.
        sizes: The prompt's length and its documents'. Whole questions of MuSiQue are as long as
            they are, about 5.9K tokens.
        rows: MuSiQue's, for the families that need them.

    Raises:
        ValueError: There is no such family, variant or number, or the length has no room for it.
    """
    if variant not in VARIANTS.get(family, ()):
        raise ValueError(f"`family` {family!r} with `variant` {variant!r} is none of {VARIANTS}")
    if family in NEEDS_MUSIQUE:
        return _ask_musique(family, number, seed, sizes, rows)
    if family == topics.FAMILY:
        return topics.topics_task(python_topics(), number, seed=seed, sizes=sizes)
    rng = random.Random(f"{family}/{seed}/{number}")
    draft = _MADE_UP[family](variant, number, rng, sizes.count)
    return lay_out(draft, family=family, variant=variant, number=number, seed=seed, sizes=sizes)


def _ask_musique(
    family: str, number: int, seed: int, sizes: Sizes, rows: Sequence[MusiqueRow]
) -> Task:
    if not rows:
        raise ValueError(f"`family` {family!r} needs the rows of MuSiQue")
    short = None
    if family == musique.SHORT_FAMILY:
        row = rows[number % len(rows)]
        short = musique.short_form(sizes, row.question, len(row.passages))
    return musique.musique_task(rows, number, seed=seed, count=sizes.count, short=short)
