"""From what a task states to documents of the wanted sizes at the wanted places."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from blend_engine.preamble import document_header
from blend_gateway.evaluation.generators.filler import Filler
from blend_gateway.evaluation.tasks import Sizes, Task, Variant, stratum


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What one document must state; filler comes around it.

    Args:
        facts: Sentences, in this order, anywhere in the document. Empty for filler alone.
        title: The document's.
    """

    facts: tuple[str, ...] = ()
    title: str | None = None


Group = tuple[Page, ...]
"""Pages that stand side by side, in this order."""


def page(*facts: str, title: str | None = None) -> Group:
    """A page that may stand anywhere."""
    return (Page(facts=facts, title=title),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A task before its documents have sizes and places.

    Args:
        needed: What the answer needs, in the order of the reasoning.
        others: Pages of rivals.
        question: The user's message.
        answer: The right one.
        distractors: Wrong ones.
        is_sequence: Whether the documents of `needed` must keep their order in any permutation.
    """

    needed: tuple[Group, ...]
    others: tuple[Group, ...]
    question: str
    answer: str
    distractors: tuple[str, ...]
    is_sequence: bool = False


def lay_out(
    draft: Draft, *, family: str, variant: Variant, number: int, seed: int, sizes: Sizes
) -> Task:
    """Place a draft's pages by the number's stratum and fill them up.

    The first needed group stands at the stratum's depth, and needed groups that keep their order
    behind it, so that many of them begin earlier than a depth of 0.9 says. The order of the other
    needed groups is as in the reasoning, reversed, or shuffled.

    Args:
        draft: What to place.
        family: The task's.
        variant: The task's.
        number: The task's.
        seed: Decides, with all other arguments, filler and places.
        sizes: The prompt's length and its documents'.

    Raises:
        ValueError: The length has no room for what must be stated.
    """
    depth, order = stratum(number)
    room = sizes.length - sizes.base_tokens - sizes.count(draft.question)
    rng = random.Random(f"{family}/{variant}/{seed}/{number}/{sizes.length}/places")
    pages_at, needed = _arrange(draft, _num_blank(draft, room, sizes), depth, order, rng)
    texts = _fill(pages_at, room, sizes, rng)
    return Task(
        family=family,
        variant=variant,
        number=number,
        depth=depth,
        order=order,
        documents=texts,
        titles=tuple(placed.title for placed in pages_at),
        question=draft.question,
        answer=draft.answer,
        candidates=(draft.answer, *draft.distractors),
        needed=needed,
    )


def header_tokens(titles: Sequence[str | None], sizes: Sizes) -> int:
    """What documents bring along, whose titles these are, in tokens."""
    shortest = sizes.count(document_header(1))
    return sum(
        sizes.header_tokens + sizes.count(document_header(number, title)) - shortest
        for number, title in enumerate(titles, 1)
    )


def _num_blank(draft: Draft, room: int, sizes: Sizes) -> int:
    """How many documents of nothing but filler there are."""
    num_stated = sum(len(group) for group in (*draft.needed, *draft.others))
    num_fitting = round(room / (sizes.document_tokens + sizes.header_tokens))
    return max(num_fitting - num_stated, 0)


def _arrange(
    draft: Draft, num_blank: int, depth: float, order: int, rng: random.Random
) -> tuple[list[Page], tuple[int, ...]]:
    """The pages in the prompt's order, and the places of the needed ones."""
    rest = [*draft.others, *(page() for _ in range(num_blank))]
    rng.shuffle(rest)
    num_groups = len(rest) + len(draft.needed)
    places = _needed_places(draft, num_groups, depth, order, rng)
    group_at = dict(zip(places, draft.needed, strict=True))
    arranged: list[Page] = []
    starts: dict[int, int] = {}
    for place in range(num_groups):
        starts[place] = len(arranged)
        arranged += group_at[place] if place in group_at else rest.pop()
    needed = tuple(
        starts[place] + offset
        for place, group in zip(places, draft.needed, strict=True)
        for offset in range(len(group))
    )
    return arranged, needed


def _needed_places(
    draft: Draft, num_groups: int, depth: float, order: int, rng: random.Random
) -> list[int]:
    """A place among the groups for each needed group, the first at the depth."""
    first = round(depth * (num_groups - 1))
    num_later = len(draft.needed) - 1
    if draft.is_sequence:
        first = min(first, num_groups - 1 - num_later)
        later = sorted(rng.sample(range(first + 1, num_groups), num_later))
        return [first, *later]
    later = sorted(rng.sample([at for at in range(num_groups) if at != first], num_later))
    if order == 1:
        later.reverse()
    elif order == 2:
        rng.shuffle(later)
    return [first, *later]


def _fill(pages: Sequence[Page], room: int, sizes: Sizes, rng: random.Random) -> tuple[str, ...]:
    """Texts that together take the room; what one document lacks or exceeds, the next evens out."""
    left = room - header_tokens([placed.title for placed in pages], sizes)
    filler = Filler(rng)
    texts: list[str] = []
    for index, placed in enumerate(pages):
        text = _fill_page(placed, left / (len(pages) - index), sizes, filler, rng)
        left -= sizes.count(text)
        texts.append(text)
    if left < -0.05 * sizes.length:
        raise ValueError(
            f"`length` {sizes.length} has no room for {len(pages)} documents with what they must"
            f" state: {-left} tokens too many"
        )
    return tuple(texts)


def _fill_page(
    placed: Page, target: float, sizes: Sizes, filler: Filler, rng: random.Random
) -> str:
    """Facts among sentences of filler; as near to the target as whole sentences come."""
    left = target - sum(sizes.count(f" {fact}") for fact in placed.facts)
    sentences: list[str] = []
    while left > 0:
        sentence = filler.sentence()
        num_tokens = sizes.count(f" {sentence}")
        if num_tokens > 2 * left:
            break
        sentences.append(sentence)
        left -= num_tokens
    if not sentences and not placed.facts:
        sentences.append(filler.sentence())
    spots = sorted(rng.randrange(len(sentences) + 1) for _ in placed.facts)
    for offset, (spot, fact) in enumerate(zip(spots, placed.facts, strict=True)):
        sentences.insert(spot + offset, fact)
    return " ".join(sentences)
