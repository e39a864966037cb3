"""Tables in different documents: names of projects to units, units to budgets."""

import random

from blend_gateway.evaluation.generators.layout import Draft, Group, page
from blend_gateway.evaluation.generators.vocabulary import ANIMALS, WORDS, Count, alike, codes
from blend_gateway.evaluation.tasks import Variant

_NUM_ROWS = 4
"""Rows of a table; there are two tables of each kind."""


def draft(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """Direct: the budget of a unit. Derived: the budget of a project, through its unit."""
    projects = alike(rng, ANIMALS, 2 * _NUM_ROWS, count)
    units = alike(rng, WORDS, 2 * _NUM_ROWS, count)
    budgets = codes(rng, 2 * _NUM_ROWS)
    listed = [f"project {p} is unit {u}" for p, u in zip(projects, units, strict=True)]
    paid = [f"unit {u} has {b} crowns" for u, b in zip(units, budgets, strict=True)]
    # Units are mixed between the tables of budgets, or a table would tell which one to look at.
    by_budget = [paid[0], *rng.sample(paid[1:], len(paid) - 1)]
    alias_page, alias_rivals = (
        page(_table("List of projects", rows, rng))
        for rows in (listed[:_NUM_ROWS], listed[_NUM_ROWS:])
    )
    budget_page, budget_rivals = (
        page(_table("List of budgets", rows, rng))
        for rows in (by_budget[:_NUM_ROWS], by_budget[_NUM_ROWS:])
    )
    if variant is Variant.DIRECT:
        asked = f"unit {units[0]}"
        needed: tuple[Group, ...] = (budget_page,)
        others: tuple[Group, ...] = (alias_page, alias_rivals, budget_rivals)
    else:
        asked = f"project {projects[0]}"
        needed = (alias_page, budget_page)
        others = (alias_rivals, budget_rivals)
    begun = f"The budget of {asked} in crowns is"
    return Draft(
        needed=needed,
        others=others,
        question=f"How many crowns is the budget of {asked}?",
        answer=f"{begun} {budgets[0]}",
        distractors=tuple(f"{begun} {budget}" for budget in budgets[1:4]),
    )


def _table(heading: str, rows: list[str], rng: random.Random) -> str:
    return f"{heading}: {'; '.join(rng.sample(rows, len(rows)))}."
