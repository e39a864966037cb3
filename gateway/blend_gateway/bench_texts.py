"""Documents and questions for the benchmark: invented facts, decided by a seed."""

import random

_PLACES = ("Arden", "Belmora", "Corvale", "Dunmere", "Eastwick", "Farrow", "Glenhaven", "Harrow")
_TRADES = ("glassblower", "cartographer", "beekeeper", "shipwright", "weaver", "clockmaker")
_NAMES = ("Ines", "Tobias", "Marta", "Leopold", "Sanna", "Viktor", "Olga", "Emil", "Rosa", "Anton")
_THINGS = ("a copper bell", "a green lantern", "a silver compass", "an oak chest", "a red kite")


def document_text(seed: int, num_sentences: int) -> str:
    """A document of invented facts, about 26 tokens a sentence."""
    rng = random.Random(seed)
    return " ".join(
        f"In {rng.randint(1900, 2020)} the {rng.choice(_TRADES)} {rng.choice(_NAMES)} of "
        f"{rng.choice(_PLACES)} found {rng.choice(_THINGS)} and kept it for "
        f"{rng.randint(2, 40)} years."
        for _ in range(num_sentences)
    )


def question_text(seed: int) -> str:
    """A question about them; no two seeds below 400 give the same."""
    rng = random.Random(seed)
    return f"What did {rng.choice(_NAMES)} find in {1900 + seed % 121}, and where? ({seed})"
