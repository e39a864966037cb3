"""Coreference across documents: one says "the town of the document before this one"."""

import random

from blend_gateway.evaluation.generators.layout import Draft, Group, Page
from blend_gateway.evaluation.generators.vocabulary import PLACES, Count, alike, codes
from blend_gateway.evaluation.tasks import Variant

_NUM_TOWNS = 3


def draft(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """Pairs of documents: the first names a town, the second says how many people live there.

    Direct: the second names the town too. Derived: it refers to the first.
    """
    towns = alike(rng, PLACES, _NUM_TOWNS, count)
    numbers = codes(rng, _NUM_TOWNS)
    pairs = [_pair(*fields, variant) for fields in zip(towns, numbers, strict=True)]
    if variant is Variant.DIRECT:
        naming, telling = pairs[0]
        needed: tuple[Group, ...] = ((telling,),)
        others: tuple[Group, ...] = ((naming,), *pairs[1:])
    else:
        needed, others = (pairs[0],), tuple(pairs[1:])
    begun = f"The number of people in the town of {towns[0]} is"
    return Draft(
        needed=needed,
        others=others,
        question=f"How many people live in the town of {towns[0]}?",
        answer=f"{begun} {numbers[0]}",
        distractors=tuple(f"{begun} {number}" for number in numbers[1:]),
    )


def _pair(town: str, people: str, variant: Variant) -> Group:
    if variant is Variant.DIRECT:
        told = f"In the town of {town} live {people} people."
    else:
        told = f"In the town that the document before this one describes live {people} people."
    return Page(facts=(f"This document describes the town of {town}.",)), Page(facts=(told,))
