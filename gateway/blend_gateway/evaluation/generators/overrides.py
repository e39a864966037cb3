"""Overrides: notices that replace one another; the latest in the prompt holds."""

import random

from blend_gateway.evaluation.generators.layout import Draft, page
from blend_gateway.evaluation.generators.vocabulary import PLACES, Count, alike, codes
from blend_gateway.evaluation.tasks import Variant

_NUM_RIVALS = 2


def draft(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """Two to four notices on one bridge, ``number % 3 + 2``, and two on another.

    Direct: what a certain notice says. Derived: what holds now, so that every order of the same
    documents has an answer of its own.
    """
    num_notices = number % 3 + 2
    bridge, rival = alike(rng, PLACES, 2, count)
    limits = codes(rng, num_notices + _NUM_RIVALS, digits=3)
    names = codes(rng, num_notices + _NUM_RIVALS, digits=3)
    facts = [
        f"Notice {name}: from now on the weight limit on the {at} bridge is {limit} tons."
        for name, limit, at in zip(
            names, limits, [bridge] * num_notices + [rival] * _NUM_RIVALS, strict=True
        )
    ]
    notices = [page(fact) for fact in facts[:num_notices]]
    rivals = [page(fact) for fact in facts[num_notices:]]
    if variant is Variant.DIRECT:
        asked = rng.randrange(num_notices)
        begun = f"According to notice {names[asked]} the weight limit is"
        return Draft(
            needed=(notices[asked],),
            others=(*notices[:asked], *notices[asked + 1 :], *rivals),
            question=f"According to notice {names[asked]}, what is the weight limit in tons?",
            answer=f"{begun} {limits[asked]}",
            distractors=_wrong(begun, [limit for limit in limits if limit != limits[asked]]),
        )
    begun = f"The weight limit on the {bridge} bridge is now"
    stale = limits[: num_notices - 1][::-1]
    return Draft(
        needed=tuple(notices),
        others=tuple(rivals),
        question=(
            "The documents are in the order of time, and a later notice on a bridge replaces the"
            f" earlier ones. What is the weight limit on the {bridge} bridge now, in tons?"
        ),
        answer=f"{begun} {limits[num_notices - 1]}",
        distractors=_wrong(begun, [*stale, *limits[num_notices:]]),
        is_sequence=True,
    )


def _wrong(begun: str, limits: list[str]) -> tuple[str, ...]:
    """The value that was valid last comes first."""
    return tuple(f"{begun} {limit}" for limit in limits[:3])
