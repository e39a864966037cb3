"""Needles: codes of archives that stand somewhere in the documents."""

import random

from blend_gateway.evaluation.generators.layout import Draft, Group, page
from blend_gateway.evaluation.generators.vocabulary import PLACES, Count, alike, codes, people
from blend_gateway.evaluation.tasks import Variant

_NUM_KEYS = 4


def _code_of(place: str, code: str) -> str:
    return f"The access code of the {place} archive is {code}."


def single(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """One code. Derived: its halves stand in two documents."""
    (place,) = alike(rng, PLACES, 1, count)
    first, second, third, fourth = codes(rng, 4, digits=3)
    needed: tuple[Group, ...]
    if variant is Variant.DIRECT:
        needed = (page(_code_of(place, first + second)),)
    else:
        needed = (
            page(f"The access code of the {place} archive begins with {first}."),
            page(f"The access code of the {place} archive ends with {second}."),
        )
    begun = f"The access code of the {place} archive is"
    return Draft(
        needed=needed,
        others=(),
        question=f"What is the whole access code of the {place} archive, all six digits?",
        answer=f"{begun} {first}{second}",
        distractors=(
            f"{begun} {second}{first}",
            f"{begun} {first}{third}",
            f"{begun} {fourth}{second}",
        ),
    )


def multi_key(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """Several archives. Derived: asked for through the badge that opens one of them."""
    places = alike(rng, PLACES, _NUM_KEYS, count)
    numbers = codes(rng, _NUM_KEYS)
    holders = people(rng, _NUM_KEYS, count)
    code_pages = [page(_code_of(*pair)) for pair in zip(places, numbers, strict=True)]
    badges = [
        f"The badge of {holder} opens the {place} archive."
        for holder, place in zip(holders, places, strict=True)
    ]
    with_rival = [badges[0], badges[1]]
    rng.shuffle(with_rival)
    badge_page, rival_badges = page(*with_rival), page(*badges[2:])
    if variant is Variant.DIRECT:
        asked = f"the {places[0]} archive"
        needed: tuple[Group, ...] = (code_pages[0],)
        others = (badge_page, rival_badges, *code_pages[1:])
    else:
        asked = f"the archive that the badge of {holders[0]} opens"
        needed = (badge_page, code_pages[0])
        others = (rival_badges, *code_pages[1:])
    begun = f"The access code of {asked} is"
    return Draft(
        needed=needed,
        others=others,
        question=f"What is the access code of {asked}?",
        answer=f"{begun} {numbers[0]}",
        distractors=tuple(f"{begun} {code}" for code in numbers[1:]),
    )


def multi_value(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """All codes of an archive in the prompt's order. Derived: each stands in another document."""
    place, rival = alike(rng, PLACES, 2, count)
    one, two, three, *rivals = codes(rng, 5)
    facts = [f"One access code of the {place} archive is {code}." for code in (one, two, three)]
    needed: tuple[Group, ...]
    if variant is Variant.DIRECT:
        needed = (page(*facts),)
    else:
        needed = tuple(page(fact) for fact in facts)
    others = tuple(page(f"One access code of the {rival} archive is {code}.") for code in rivals)
    begun = f"The access codes of the {place} archive are"
    return Draft(
        needed=needed,
        others=others,
        question=(
            f"What are the three access codes of the {place} archive, in the order in which the"
            " documents state them?"
        ),
        answer=f"{begun} {one}, {two} and {three}",
        distractors=(
            f"{begun} {three}, {two} and {one}",
            f"{begun} {two}, {one} and {three}",
            f"{begun} {one}, {rivals[0]} and {three}",
        ),
        is_sequence=True,
    )


def multi_query(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """Three codes at once. Derived: each stands in another document."""
    places = alike(rng, PLACES, _NUM_KEYS, count)
    one, two, three, four = codes(rng, _NUM_KEYS)
    *facts, rival = [_code_of(*pair) for pair in zip(places, (one, two, three, four), strict=True)]
    needed: tuple[Group, ...]
    if variant is Variant.DIRECT:
        told = facts.copy()
        rng.shuffle(told)
        needed = (page(*told),)
    else:
        needed = tuple(page(fact) for fact in facts)

    def listed(*values: str) -> str:
        pairs = [f"{value} for {place}" for place, value in zip(places[:3], values, strict=True)]
        return f"The access codes are {pairs[0]}, {pairs[1]} and {pairs[2]}"

    return Draft(
        needed=needed,
        others=(page(rival),),
        question=(
            f"What are the access codes of the {places[0]} archive, the {places[1]} archive and the"
            f" {places[2]} archive?"
        ),
        answer=listed(one, two, three),
        distractors=(listed(two, one, three), listed(three, two, one), listed(four, two, three)),
    )
