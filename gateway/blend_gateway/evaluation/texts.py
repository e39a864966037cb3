"""Real text: questions from MuSiQue and Python's own documentation, read where they lie."""

import json
import pydoc_data.topics
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

_SENTENCE_WORDS = range(14, 41)
"""Long enough to be told from every other sentence, short enough to be asked about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MusiqueRow:
    """A question over several hops with its passages.

    Args:
        question: As published.
        answers: All accepted answers, the best first.
        passages: ``(title or None, text)`` in the file's order.
    """

    question: str
    answers: tuple[str, ...]
    passages: tuple[tuple[str | None, str], ...]

    def holders(self) -> tuple[int, ...]:
        """Passages in which an answer is spelled out, whatever the punctuation."""
        wanted = [bare(answer) for answer in self.answers]
        return tuple(
            index
            for index, (_, text) in enumerate(self.passages)
            if any(answer in bare(text) for answer in wanted)
        )


def load_musique(path: Path) -> tuple[MusiqueRow, ...]:
    """Read a file of questions in the form of the CacheBlend paper's `inputs/musique_s.json`.

    Args:
        path: A JSON list of ``{question, answers, ctxs: [{title, text}]}``.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not of that form.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} must be a JSON list of questions")
    return tuple(_row(row, f"{path}[{index}]") for index, row in enumerate(rows))


def python_topics() -> Mapping[str, str]:
    """Python's documentation topics by name, as this Python brings them along.

    Another version of Python has other texts, and so other tasks.
    """
    return MappingProxyType(dict(sorted(pydoc_data.topics.topics.items())))


def flat(text: str) -> str:
    """The text with one blank wherever it has blanks or line breaks."""
    return " ".join(text.split())


@lru_cache(maxsize=256)
def prose_sentences(text: str) -> tuple[str, ...]:
    """Whole sentences of running text, `flat`; tables, grammar, code and headings are left out."""
    found: list[str] = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        lines = paragraph.strip("\n").split("\n")
        if any(not line[:1].isalnum() and line[:1] not in '"*(' for line in lines):
            continue
        if re.search(r"^[*=~-]{3,}$|::=", paragraph, re.MULTILINE):
            continue
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", flat(paragraph)):
            is_whole = sentence[:1].isupper() and sentence.endswith(".")
            if is_whole and len(sentence.split()) in _SENTENCE_WORDS:
                found.append(sentence)
    return tuple(found)


def bare(text: str) -> str:
    """Words alone, in lower case, one blank around each: the passages' punctuation stands apart."""
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def _row(row: Any, where: str) -> MusiqueRow:
    try:
        parsed = MusiqueRow(
            question=row["question"].strip(),
            answers=tuple(answer.strip() for answer in row["answers"]),
            passages=tuple((c["title"].strip() or None, c["text"].strip()) for c in row["ctxs"]),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is not a question with answers and passages") from error
    if not parsed.answers or not parsed.passages:
        raise ValueError(f"{where} has no answer or no passage")
    return parsed
