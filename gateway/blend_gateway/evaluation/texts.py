"""Real text: questions from MuSiQue and Python's own documentation, read where they lie."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
