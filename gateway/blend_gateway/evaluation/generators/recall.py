"""Associative recall: lists of pairs of words, of which one half is given."""

import random

from blend_gateway.evaluation.generators.layout import Draft, Group, page
from blend_gateway.evaluation.generators.vocabulary import WORDS, Count, alike
from blend_gateway.evaluation.tasks import Variant

_NUM_STARTS = 8
"""Words from which two steps lead on; half of them stand in each of two lists."""


def draft(variant: Variant, number: int, rng: random.Random, count: Count) -> Draft:
    """Words lead to words, and those to others, in lists of four pairs.

    Direct: the word behind a word. Derived: the word behind that word, in another list.
    """
    words = alike(rng, WORDS, 3 * _NUM_STARTS, count)
    starts, middles, ends = (words[at::3] for at in range(3))
    firsts = list(zip(starts, middles, strict=True))
    seconds = list(zip(middles, ends, strict=True))
    second_lists = [seconds[0], *rng.sample(seconds[1:], len(seconds) - 1)]
    # Mixed, or a list of first steps would tell which list of second steps to look at.
    first_page, first_rivals = _lists(firsts, rng)
    second_page, second_rivals = _lists(second_lists, rng)
    given = starts[0]
    if variant is Variant.DIRECT:
        begun, wanted = f"The word paired with {given} is", middles
        question = f"Which word is paired with {given}?"
        needed: tuple[Group, ...] = (first_page,)
        others: tuple[Group, ...] = (second_page, first_rivals, second_rivals)
    else:
        begun, wanted = f"Two steps on from {given} is", ends
        question = (
            f"Begin at the word {given}, go to the word paired with it, and from there to the word"
            " paired with that one. Which word is two steps on?"
        )
        needed = (first_page, second_page)
        others = (first_rivals, second_rivals)
    return Draft(
        needed=needed,
        others=others,
        question=question,
        answer=f"{begun} {wanted[0]}",
        distractors=tuple(f"{begun} {word}" for word in wanted[1:4]),
    )


def _lists(pairs: list[tuple[str, str]], rng: random.Random) -> tuple[Group, Group]:
    """Two lists, the first of which holds the first pair."""
    half = len(pairs) // 2
    first, second = (
        page(f"Pairs of words: {'; '.join(f'{a} with {b}' for a, b in rng.sample(part, half))}.")
        for part in (pairs[:half], pairs[half:])
    )
    return first, second
