"""What is asked: a task is text, whatever model answers it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

DEPTHS = (0.1, 0.5, 0.9)
"""The strata of positions: where in the prompt the needed document stands."""

NUM_ORDERS = 3
"""How many permutations of the documents there are."""


class Variant(StrEnum):
    """Whether one document suffices."""

    DIRECT = "direct"
    """One document states the answer in the question's own words."""
    DERIVED = "derived"
    """The answer needs several documents, or their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question over documents, with its answer.

    Args:
        family: Which kind of task.
        variant: Whether one document suffices.
        number: Index within its cell; together with the seed it decides everything.
        depth: Where the first needed document stands: the stratum for made-up tasks; for real text
            its place over the last place; 0 where no document is known to be needed.
        order: Which permutation of the documents, below `NUM_ORDERS`.
        documents: Texts, in the prompt's order.
        titles: One for each document; None for none.
        question: The user's message behind the documents.
        answer: The right one, as the assistant's reply begins.
        candidates: The answer first, then stale values or distractors of the same form.
        needed: Indices of the documents that the answer needs, in the order of the reasoning.
            Empty if unknown.

    Raises:
        ValueError: These do not fit together.
    """

    family: str
    variant: Variant
    number: int
    depth: float
    order: int
    documents: tuple[str, ...]
    titles: tuple[str | None, ...]
    question: str
    answer: str
    candidates: tuple[str, ...]
    needed: tuple[int, ...]

    def __post_init__(self) -> None:
        where = f"task {self.family}/{self.variant}/{self.number}"
        if not self.documents or len(self.documents) != len(self.titles):
            raise ValueError(f"{where} needs documents and as many titles")
        if not self.candidates or self.candidates[0] != self.answer:
            raise ValueError(f"{where}: the first candidate must be the answer {self.answer!r}")
        if len(set(self.candidates)) != len(self.candidates):
            raise ValueError(f"{where}: candidates must differ, got {self.candidates!r}")
        if not set(self.needed) <= set(range(len(self.documents))):
            raise ValueError(f"{where}: `needed` names no document of it: {self.needed!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How long a prompt is to be, in the tokens of the model that will read it.

    Args:
        length: The whole prompt's tokens.
        document_tokens: A document's tokens; documents are smaller where a task needs more of them
            than would fit.
        count: Tokens of a text that stands alone.
        base_tokens: The prompt's tokens without documents and question.
        header_tokens: What each document brings along: its header and separators.

    Raises:
        ValueError: A size is not positive.
    """

    length: int
    document_tokens: int
    count: Callable[[str], int]
    base_tokens: int
    header_tokens: int

    def __post_init__(self) -> None:
        if self.length <= 0 or self.document_tokens <= 0:
            raise ValueError(
                f"`length` and `document_tokens` must be positive, got {self.length} and"
                f" {self.document_tokens}"
            )


def stratum(number: int) -> tuple[float, int]:
    """The depth and the order of a task: every nine numbers go through all pairs."""
    return DEPTHS[number % len(DEPTHS)], number // len(DEPTHS) % NUM_ORDERS
