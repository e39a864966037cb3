"""Documents that no other test has: each seed gives another text."""

import random

_WORDS = (
    *("river", "stone", "cloud", "paper", "engine", "bridge", "garden", "window", "market"),
    *("copper", "lantern", "violet", "harbor", "winter", "signal", "forest", "letter", "meadow"),
    *("silver", "ribbon", "kettle", "orchard", "thunder", "compass"),
)


def document(seed: str, num_words: int = 60) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(num_words)) + "."
