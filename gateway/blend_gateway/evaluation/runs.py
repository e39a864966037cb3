"""A run: everything that was measured of one model with one seed, and its JSON.

Nothing in it is a time or a date, so two runs with one seed are equal byte for byte. Figures are
not part of it: they are computed from its records, by whoever reads it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from blend_gateway.evaluation.metrics import LayerDeviations, Likelihoods, Measured
from blend_gateway.evaluation.records import (
    ArmSpec,
    InconsistentRecords,
    PromptId,
    Record,
    merged,
)
from blend_gateway.evaluation.sums import Design

SCHEMA_VERSION = 1


class IncompatibleRuns(ValueError):
    """Runs that are not of one model, seed, design and software, or a file that is no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was measured.

    Args:
        model: Its name.
        content_hash: Of its weights.
        design: Which arms the others are held against, and the seed.
        arms: In the order of reports.
        versions: Of the packages that decide results, by name.
        settings: Whatever else decides results: dtype, device, number of steps.
        records: Any order.

    Raises:
        InconsistentRecords: An arm is named twice, or a record's arm is not among them.
    """

    model: str
    content_hash: str
    design: Design
    arms: tuple[ArmSpec, ...]
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    records: tuple[Record, ...]

    def __post_init__(self) -> None:
        names = {arm.name for arm in self.arms}
        if len(names) != len(self.arms):
            raise InconsistentRecords("two arms have one name")
        unknown = sorted({record.arm for record in self.records} - names)
        if unknown:
            raise InconsistentRecords(f"records of arms that the run does not have: {unknown}")


def merge_runs(runs: Iterable[Run]) -> Run:
    """Parts of one evaluation as one run: their arms and records together.

    Raises:
        IncompatibleRuns: They differ in more than arms and records, or in what an arm is.
        InconsistentRecords: They contradict each other about a prompt and arm.
    """
    first, *others = runs
    for other in others:
        for field in ("model", "content_hash", "design", "versions", "settings"):
            if getattr(first, field) != getattr(other, field):
                raise IncompatibleRuns(
                    f"`{field}` is {getattr(first, field)!r} in one run "
                    f"and {getattr(other, field)!r} in another"
                )
    arms: dict[str, ArmSpec] = {}
    for run in (first, *others):
        for arm in run.arms:
            if arms.setdefault(arm.name, arm) != arm:
                raise IncompatibleRuns(f"arm {arm.name!r} is {arms[arm.name]!r} and {arm!r}")
    records = merged(record for run in (first, *others) for record in run.records)
    return replace(first, arms=tuple(arms.values()), records=records)


def run_fields(run: Run) -> dict[str, Any]:
    """The run as JSON values; `run_of` is its inverse up to the order of records."""
    records = merged(run.records)
    prompts = sorted({record.prompt for record in records})
    index = {prompt: number for number, prompt in enumerate(prompts)}
    return {
        "schema_version": SCHEMA_VERSION,
        "model": run.model,
        "content_hash": run.content_hash,
        "seed": run.design.seed,
        "design": asdict(run.design),
        "versions": dict(sorted(run.versions.items())),
        "settings": dict(sorted(run.settings.items())),
        "arms": [asdict(arm) for arm in run.arms],
        "prompts": [asdict(prompt) for prompt in prompts],
        "records": [
            {"arm": record.arm, "prompt": index[record.prompt], **_of_measured(record.measured)}
            for record in records
        ],
    }


def run_of(values: Any) -> Run:
    """Read what `run_fields` gave; whatever else is beside it is not looked at.

    Raises:
        IncompatibleRuns: It is of another schema, or damaged.
    """
    found = values.get("schema_version") if isinstance(values, Mapping) else None
    if found != SCHEMA_VERSION:
        raise IncompatibleRuns(f"`schema_version` is {found!r}, expected {SCHEMA_VERSION}")
    try:
        prompts = [PromptId(**prompt) for prompt in values["prompts"]]
        return Run(
            model=values["model"],
            content_hash=values["content_hash"],
            design=Design(**values["design"]),
            arms=tuple(ArmSpec(**arm) for arm in values["arms"]),
            versions=values["versions"],
            settings=values["settings"],
            records=tuple(
                Record(
                    prompt=prompts[record["prompt"]],
                    arm=record["arm"],
                    measured=_measured(record),
                )
                for record in values["records"]
            ),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise IncompatibleRuns(f"no evaluation run: {error!r}") from error


def to_text(values: Mapping[str, Any]) -> str:
    """JSON with one line for each element of a list, infinities as ``"inf"`` and ``"-inf"``."""
    return "{\n" + ",\n".join(_lines(values)) + "\n}\n"


def _lines(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, list) and value:
            body = ",\n".join(_compact(element) for element in value)
            yield f"{_compact(name)}: [\n{body}\n]"
        else:
            yield f"{_compact(name)}: {_compact(value)}"


def _compact(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # rare, and spelling out every number is slow
        return json.dumps(_spelled(value), allow_nan=False)


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: _spelled(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(each) for each in value]
    return value


def _of_measured(measured: Measured) -> dict[str, Any]:
    """One record's figures; what was not measured is left out."""
    answers = measured.likelihoods
    values: dict[str, Any] = {
        "charged_ratio": measured.charged_ratio,
        "agrees": "".join("01"[agrees] for agrees in measured.agrees),
        "kl": measured.kl,
        "reference_nll": measured.reference_nll,
    }
    if answers.answer is not None:
        values |= {"answer": answers.answer, "num_answer_tokens": answers.num_answer_tokens}
    if answers.candidates:
        values["candidates"] = answers.candidates
        values["num_candidate_tokens"] = answers.num_candidate_tokens
    for field in fields(LayerDeviations):
        layers = getattr(measured.deviations, field.name)
        if layers is not None:
            values[f"{field.name}_deviation"] = layers
    return values


def _measured(values: Mapping[str, Any]) -> Measured:
    layers = {
        field.name: _numbers(values[f"{field.name}_deviation"])
        for field in fields(LayerDeviations)
        if f"{field.name}_deviation" in values
    }
    return Measured(
        kl=_numbers(values["kl"]),
        agrees=tuple(digit == "1" for digit in values["agrees"]),
        reference_nll=_numbers(values["reference_nll"]),
        charged_ratio=float(values["charged_ratio"]),
        likelihoods=Likelihoods(
            answer=values.get("answer"),
            num_answer_tokens=values.get("num_answer_tokens", 0),
            candidates=_numbers(values.get("candidates", ())),
            num_candidate_tokens=tuple(values.get("num_candidate_tokens", ())),
        ),
        deviations=LayerDeviations(**layers),
    )


def _numbers(values: Iterable[float | str]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
