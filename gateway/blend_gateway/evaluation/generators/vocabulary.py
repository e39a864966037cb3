"""The invented names that made-up tasks are about. Filler sentences use none of them."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

Count = Callable[[str], int]
"""Tokens of a text that stands alone."""

PLACES = (
    "Arden", "Belmora", "Corvale", "Dunmere", "Eastwick", "Farrow", "Glenhaven", "Harrow",
    "Inverlea", "Jorvik", "Kestrel", "Larkhill", "Marwick", "Norwell", "Oakham", "Penrose",
    "Quarley", "Redmoor", "Selwick", "Thornby", "Ulverton", "Vandale", "Westmere", "Yarrow",
    "Ashford", "Brackley", "Camden", "Dorset", "Elmwood", "Fairfax", "Granby", "Hilton",
)  # fmt: skip
FIRST_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry", "Irene", "James",
    "Karen", "Louis", "Maria", "Nora", "Oscar", "Paula", "Robert", "Sarah", "Thomas", "Victor",
)  # fmt: skip
LAST_NAMES = (
    "Adams", "Baker", "Carter", "Dixon", "Ellis", "Foster", "Grant", "Hayes", "Irving", "Jensen",
    "Keller", "Larsen", "Mason", "Nelson", "Owens", "Parker", "Quinn", "Reed", "Stone", "Turner",
)  # fmt: skip
WORDS = (
    "amber", "basil", "cedar", "denim", "ember", "fern", "ginger", "hazel", "iris", "jade", "kelp",
    "lilac", "maple", "nectar", "olive", "pearl", "quartz", "ruby", "saffron", "topaz", "umber",
    "velvet", "willow", "zinc", "copper", "coral", "cotton", "ivory", "marble", "silk", "linen",
    "bronze", "silver", "violet", "walnut", "lemon", "honey", "cherry", "pepper", "onyx", "apple",
    "anchor", "arrow", "barrel", "basket", "button", "candle", "canvas", "carpet", "castle",
    "circle", "cloud", "compass", "crystal", "curtain", "diamond", "dragon", "drum", "engine",
    "feather", "flag", "flower", "forest", "garden", "glass", "guitar", "hammer", "island",
    "jacket", "kettle", "ladder", "lantern", "leaf", "magnet", "mirror", "needle", "ocean", "paper",
    "pencil", "piano", "pillow", "planet", "pocket", "rabbit", "ribbon", "river", "rocket",
    "saddle", "shadow", "shell", "shield", "spider", "sponge", "spring", "square", "stone", "sugar",
    "sword", "table", "thread", "tiger", "timber", "tower", "trumpet", "tunnel", "turtle", "valley",
    "wagon", "wheel",
)  # fmt: skip
ANIMALS = (
    "Falcon", "Heron", "Badger", "Otter", "Raven", "Salmon", "Tiger", "Walrus", "Beaver", "Condor",
    "Dolphin", "Eagle", "Ferret", "Gecko", "Jaguar", "Lynx", "Moose", "Panther", "Rabbit", "Wolf",
)  # fmt: skip


def alike(rng: random.Random, pool: Sequence[str], number: int, count: Count) -> list[str]:
    """Pick different members that have the same number of tokens, as they stand in a sentence.

    Args:
        rng: Decides which.
        pool: What there is.
        number: How many are wanted.
        count: Tokens of a text.

    Returns:
        Members of the largest group of one length; if it is too small, those of nearest length.
    """
    groups: dict[int, list[str]] = defaultdict(list)
    for text in pool:
        groups[count(f" {text}")].append(text)
    usual = max(groups, key=lambda length: (len(groups[length]), -length))
    by_distance = sorted(groups, key=lambda length: (abs(length - usual), length))
    nearest: list[str] = []
    for length in by_distance:
        nearest += groups[length]
        if len(nearest) >= number:
            break
    return rng.sample(nearest, number)


def people(rng: random.Random, number: int, count: Count) -> list[str]:
    """Full names, no part of which occurs twice."""
    firsts = alike(rng, FIRST_NAMES, number, count)
    lasts = alike(rng, LAST_NAMES, number, count)
    return [f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)]


def codes(rng: random.Random, number: int, digits: int = 5) -> list[str]:
    """Different numbers of so many digits, each as far as possible with a first digit of its own.

    So the first token that can tell candidates apart mostly does.
    """
    leading = rng.sample("123456789", 9)
    found: list[str] = []
    while len(found) < number:
        rest = "".join(rng.choice("0123456789") for _ in range(digits - 1))
        code = leading[len(found) % len(leading)] + rest
        if code not in found:
            found.append(code)
    return found
