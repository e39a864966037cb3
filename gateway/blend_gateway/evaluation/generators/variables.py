"""Variable tracking: counters that copy one another, over one to four hops."""

import random
from itertools import pairwise

from blend_gateway.evaluation.generators.layout import Draft, page
from blend_gateway.evaluation.generators.vocabulary import WORDS, Count, alike, codes
from blend_gateway.evaluation.tasks import Variant

MAX_HOPS = 4
_NUM_RIVALS = 3


def draft(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """A chain of counters, one step a document, beside rival chains of the same length.

    Direct: the first counter of the chain is asked for, whose value is stated. Derived: the last.
    The number of hops is ``number % 4 + 1``.
    """
    num_hops = number % MAX_HOPS + 1
    names = alike(rng, WORDS, (num_hops + 1) * (_NUM_RIVALS + 1), count)
    values = codes(rng, _NUM_RIVALS + 1)
    chains = [_chain(names[at :: _NUM_RIVALS + 1], value) for at, value in enumerate(values)]
    own = [page(fact) for fact in chains[0]]
    roots = [chain[0] for chain in chains[1:]]
    copies = [fact for chain in chains[1:] for fact in chain[1:]]
    rng.shuffle(roots)
    rng.shuffle(copies)
    rivals = (page(*roots), page(*copies))
    if variant is Variant.DIRECT:
        asked, needed, others = names[0], own[:1], (*own[1:], *rivals)
    else:
        asked, needed, others = names[num_hops * (_NUM_RIVALS + 1)], own[::-1], rivals
    begun = f"The value of counter {asked} is"
    return Draft(
        needed=tuple(needed),
        others=others,
        question=f"What is the value of counter {asked}?",
        answer=f"{begun} {values[0]}",
        distractors=tuple(f"{begun} {value}" for value in values[1:]),
    )


def _chain(names: list[str], value: str) -> list[str]:
    facts = [f"The value of counter {names[0]} is {value}."]
    for source, target in pairwise(names):
        facts.append(f"The value of counter {target} is that of counter {source}.")
    return facts
