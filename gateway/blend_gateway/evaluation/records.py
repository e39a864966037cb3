"""What a run leaves: which prompt, which arm, what was measured."""

from collections.abc import Iterable
from dataclasses import dataclass

from blend_gateway.evaluation.metrics import Measured


class InconsistentRecords(ValueError):
    """Records that no paired figure can be computed from."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PromptId:
    """Names one prompt of a run, together with the run's seed.

    Args:
        family: Kind of task.
        variant: ``direct`` or ``derived``.
        length: The cell's nominal prompt length, tokens.
        number: Index within the cell.
        order: Which permutation of the documents.
        depth: Where the first needed document stands, 0 to 1.
    """

    family: str
    variant: str
    length: int
    number: int
    order: int
    depth: float

    @property
    def cell(self) -> str:
        """Family, variant and length."""
        return f"{self.family}/{self.variant}/{self.length}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """One way to come by a prompt's KV, as reports name it.

    Args:
        name: Unique within a report.
        curve: Arms of one curve differ in their ratio only.
        ratio: Recompute ratio that was asked for, 0 to 1; where there is one.
        description: For a reader.
    """

    name: str
    curve: str = ""
    ratio: float | None = None
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One prompt under one arm."""

    prompt: PromptId
    arm: str
    measured: Measured


def merged(records: Iterable[Record]) -> tuple[Record, ...]:
    """Sort records by arm and prompt, and drop exact repetitions.

    Raises:
        InconsistentRecords: One prompt was measured twice under one arm, differently.
    """
    found: dict[tuple[str, PromptId], Record] = {}
    for record in records:
        known = found.setdefault((record.arm, record.prompt), record)
        if known != record:
            raise InconsistentRecords(
                f"arm {record.arm!r} has two results for prompt {record.prompt.number} "
                f"of {record.prompt.cell}"
            )
    return tuple(found[key] for key in sorted(found))
