"""MuSiQue: real questions over several hops, whole (about 5.9K tokens) or cut short."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blend_gateway.evaluation.generators.layout import header_tokens
from blend_gateway.evaluation.tasks import NUM_ORDERS, Sizes, Task, Variant
from blend_gateway.evaluation.texts import MusiqueRow, bare

FAMILY = "musique"
SHORT_FAMILY = "musique_short"
_NUM_DISTRACTORS = 3
_KINDS = ("who", "whom", "where", "when", "what", "which")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortForm:
    """Fewer and shorter passages.

    Args:
        passages: How many are kept, those that hold the answer first.
        tokens: At most so many tokens of each, around the answer where it holds it.
    """

    passages: int
    tokens: int


def musique_task(
    rows: Sequence[MusiqueRow],
    number: int,
    *,
    seed: int,
    count: Callable[[str], int],
    short: ShortForm | None = None,
) -> Task:
    """Make the task of one row.

    The first pass over the rows keeps the file's order of passages; the two after it permute them.

    Args:
        rows: The whole file.
        number: Row and order: ``number % len(rows)`` and ``number // len(rows)``.
        seed: Decides permutations and distractors.
        count: Tokens of a text, to pick distractors of the answer's length and to cut.
        short: None for whole passages, all of them.

    Raises:
        ValueError: The number is beyond the last order.
    """
    order, index = divmod(number, len(rows))
    if not 0 <= order < NUM_ORDERS:
        raise ValueError(f"`number` must be below {NUM_ORDERS * len(rows)}, got {number}")
    row = rows[index]
    places = _kept(row, short)
    rng = random.Random(f"{FAMILY}/{seed}/{number}")
    if order:
        rng.shuffle(places)
    answer = row.answers[0]
    texts = [row.passages[place][1] for place in places]
    if short is not None:
        texts = [cut_around(text, answer, short.tokens, count) for text in texts]
    needed = tuple(at for at, text in enumerate(texts) if _holds(text, row.answers))
    return Task(
        family=FAMILY if short is None else SHORT_FAMILY,
        variant=Variant.DERIVED,
        number=number,
        depth=needed[0] / max(len(texts) - 1, 1) if needed else 0.0,
        order=order,
        documents=tuple(texts),
        titles=tuple(row.passages[place][0] for place in places),
        question=row.question,
        answer=answer,
        candidates=(answer, *_distractors(rows, row, rng, count)),
        needed=needed,
    )


def short_form(sizes: Sizes, question: str, most: int) -> ShortForm:
    """As many passages of the wanted size as the length holds, evened out to meet it.

    Args:
        sizes: The prompt's length and its documents'.
        question: The user's message.
        most: How many passages there are.
    """
    room = sizes.length - sizes.base_tokens - sizes.count(question)
    fitting = round(room / (sizes.document_tokens + sizes.header_tokens))
    passages = min(max(fitting, 1), most)
    tokens = (room - header_tokens([None] * passages, sizes)) // passages
    return ShortForm(passages=passages, tokens=max(tokens, 1))


def cut_around(text: str, wanted: str, tokens: int, count: Callable[[str], int]) -> str:
    """Keep whole words of a text, at most so many tokens, with a phrase in the middle if it is in.

    Args:
        text: The whole.
        wanted: The phrase, found whatever its punctuation; the text's beginning is kept without.
        tokens: The most to keep.
        count: Tokens of a text.
    """
    words = re.findall(r"\s*\S+", text)
    place = _place_of(words, wanted)
    low, high = 0, min(len(words), tokens)  # no word is less than a token
    while low < high:  # the most words that fit
        half = (low + high + 1) // 2
        start = _start(place, half, len(words))
        if count("".join(words[start : start + half]).strip()) <= tokens:
            low = half
        else:
            high = half - 1
    start = _start(place, low, len(words))
    return "".join(words[start : start + low]).strip()


def _start(place: int, kept: int, total: int) -> int:
    return min(max(place - kept // 2, 0), total - kept)


def _place_of(words: Sequence[str], wanted: str) -> int:
    """Index of the word at which a phrase begins; 0 where it does not occur."""
    head = bare("".join(words)).find(bare(wanted))
    if head < 0:
        return 0
    before = len(bare("".join(words))[:head].split())
    seen = 0
    for index, word in enumerate(words):
        seen += len(bare(word).split())
        if seen > before:
            return index
    return 0


def _holds(text: str, answers: Sequence[str]) -> bool:
    return any(bare(answer) in bare(text) for answer in answers)


def _kept(row: MusiqueRow, short: ShortForm | None) -> list[int]:
    places = list(range(len(row.passages)))
    if short is None:
        return places
    holders = row.holders()
    return sorted(sorted(places, key=lambda place: place not in holders)[: short.passages])


def _distractors(
    rows: Sequence[MusiqueRow], row: MusiqueRow, rng: random.Random, count: Callable[[str], int]
) -> list[str]:
    """Other rows' answers: to the same kind of question first, then of the nearest length."""
    taken = {bare(answer) for answer in row.answers}
    pool: dict[str, str] = {}
    for other in rows:
        if bare(other.answers[0]) not in taken:
            pool.setdefault(other.answers[0], _kind(other.question))
    answers = list(pool)
    rng.shuffle(answers)
    length, kind = count(row.answers[0]), _kind(row.question)
    answers.sort(key=lambda text: (pool[text] != kind, abs(count(text) - length)))
    return answers[:_NUM_DISTRACTORS]


def _kind(question: str) -> str:
    words = bare(question).split()
    return next((word for word in words if word in _KINDS), "")
