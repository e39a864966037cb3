"""Short documents with facts in them, and questions about the facts, made from lists."""

import random

_PLACES = ["Arden", "Belmora", "Corvale", "Dunmere", "Eastwick", "Farrow", "Glenhaven", "Harrow"]
_TRADES = ["glassblower", "cartographer", "beekeeper", "shipwright", "weaver", "clockmaker"]
_NAMES = ["Ines", "Tobias", "Marta", "Leopold", "Sanna", "Viktor", "Olga", "Emil", "Rosa", "Anton"]
_THINGS = ["a copper bell", "a green lantern", "a silver compass", "an oak chest", "a red kite"]


def fact_document(seed: int, num_sentences: int = 8) -> str:
    """A document of invented facts; the seed decides them."""
    rng = random.Random(seed)
    sentences = []
    for _ in range(num_sentences):
        name, place, trade = rng.choice(_NAMES), rng.choice(_PLACES), rng.choice(_TRADES)
        sentences.append(
            f"{name} lives in {place} and works as a {trade}. In {rng.randint(1900, 2020)} "
            f"{name} found {rng.choice(_THINGS)} near the river and kept it for "
            f"{rng.randint(2, 40)} years."
        )
    return " ".join(sentences)


def question(seed: int) -> str:
    """A question about the facts of some document."""
    rng = random.Random(seed + 10_000)
    name = rng.choice(_NAMES)
    return rng.choice(
        [
            f"Where does {name} live?",
            f"What did {name} find near the river?",
            f"Which trade does {name} follow?",
            f"For how many years did {name} keep what was found?",
        ]
    )
