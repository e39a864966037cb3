"""Questions over several documents about invented people and towns."""

import random
from dataclasses import dataclass

from blend_gateway.evaluation.generators.layout import Draft, Group, page
from blend_gateway.evaluation.generators.vocabulary import PLACES, Count, alike, people
from blend_gateway.evaluation.tasks import Variant

_NUM_PEOPLE = 4
_TRADES = ("weaver", "sailor", "baker", "lawyer", "doctor", "painter", "farmer", "teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """Who was born where and when, and who is mayor there; one page for each person and town."""

    persons: list[str]
    years: list[str]
    towns: list[str]
    mayors: list[str]
    lives: list[Group]
    offices: list[Group]


def draft(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """Even numbers lead over a bridge, odd ones compare.

    Bridge: who is mayor of a town; derived: of the town in which a person was born. Comparison:
    in which year a person was born; derived: which of two was born first.
    """
    world = _world(rng, count)
    return _bridge(world, variant) if number % 2 == 0 else _comparison(world, variant)


def _world(rng: random.Random, count: Count) -> _World:
    names = people(rng, 2 * _NUM_PEOPLE, count)
    persons, mayors = names[:_NUM_PEOPLE], names[_NUM_PEOPLE:]
    towns = alike(rng, PLACES, _NUM_PEOPLE, count)
    years = [str(year) for year in rng.sample(range(1900, 2000), _NUM_PEOPLE)]
    trades = rng.sample(_TRADES, _NUM_PEOPLE)
    return _World(
        persons=persons,
        years=years,
        towns=towns,
        mayors=mayors,
        lives=[
            page(
                f"{person} was born in the town of {town}.",
                f"{person} was born in the year {year} and became a {trade}.",
            )
            for person, town, year, trade in zip(persons, towns, years, trades, strict=True)
        ],
        offices=[
            page(f"The mayor of {town} is {mayor}.")
            for town, mayor in zip(towns, mayors, strict=True)
        ],
    )


def _bridge(world: _World, variant: Variant) -> Draft:
    if variant is Variant.DIRECT:
        asked = world.towns[0]
        needed: tuple[Group, ...] = (world.offices[0],)
        others = (*world.lives, *world.offices[1:])
    else:
        asked = f"the town in which {world.persons[0]} was born"
        needed = (world.lives[0], world.offices[0])
        others = (*world.lives[1:], *world.offices[1:])
    begun = f"The mayor of {asked} is"
    return Draft(
        needed=needed,
        others=others,
        question=f"Who is the mayor of {asked}?",
        answer=f"{begun} {world.mayors[0]}",
        distractors=tuple(f"{begun} {mayor}" for mayor in world.mayors[1:]),
    )


def _comparison(world: _World, variant: Variant) -> Draft:
    first, second = world.persons[:2]
    if variant is Variant.DIRECT:
        begun = f"{first} was born in the year"
        return Draft(
            needed=(world.lives[0],),
            others=(*world.lives[1:], *world.offices),
            question=f"In which year was {first} born?",
            answer=f"{begun} {world.years[0]}",
            distractors=tuple(f"{begun} {year}" for year in world.years[1:]),
        )
    begun = "The one who was born first is"
    early, late = (first, second) if world.years[0] < world.years[1] else (second, first)
    return Draft(
        needed=(world.lives[0], world.lives[1]),
        others=(*world.lives[2:], *world.offices),
        question=f"Who was born first, {first} or {second}?",
        answer=f"{begun} {early}",
        distractors=(f"{begun} {late}",),
    )
