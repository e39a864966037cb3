"""What a request asked of blending, what was planned, and what the client is told came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from blend_engine.protocol import BlendParams, BlendReport, FallbackReason, SegmentStatus
from blend_engine.segments import SegmentKey
from blend_gateway.errors import DocumentCold


class DocumentStatus(StrEnum):
    """What became of one document of a request."""

    HIT = "hit"
    """Its KV was used."""
    MISS = "miss"
    """It had none, so it was computed."""
    COMPILING = "compiling"
    """It had none yet; the compile is on its way."""
    FAILED = "failed"
    """Its KV could not be loaded, so it was computed."""
    OFF = "off"
    """It was not looked up: blending is off, or the document too short."""


_STATUS_OF_SEGMENT: Mapping[SegmentStatus, DocumentStatus] = MappingProxyType(
    {
        SegmentStatus.HIT: DocumentStatus.HIT,
        SegmentStatus.MISS: DocumentStatus.MISS,
        SegmentStatus.TOO_SHORT: DocumentStatus.OFF,
        SegmentStatus.TOO_LARGE: DocumentStatus.OFF,
        SegmentStatus.FAILED: DocumentStatus.FAILED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDocument:
    """One document of a prompt.

    Args:
        label: How the response names it: ``{"id": ...}`` or ``{"document_id": ...}``.
        num_tokens: Its length in tokens.
        key: What its KV is stored under.
        segment_index: Its span's index in `BlendParams.segments`; None where it is not looked up.
    """

    label: Mapping[str, Any]
    num_tokens: int
    key: SegmentKey
    segment_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one prompt goes to the engine.

    Args:
        salt: The cache salt.
        params: Goes to the connector; None where nothing is looked up.
        documents: The prompt's documents in order.
        fallback_reason: Why documents are not looked up although there are some.
    """

    salt: str
    params: BlendParams | None = None
    documents: tuple[PlannedDocument, ...] = ()
    fallback_reason: FallbackReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a plan.

    Args:
        plan: As sent to the engine.
        statuses: One per document of the plan.
        report: The engine's report; None where nothing was looked up.
    """

    plan: Plan
    statuses: tuple[DocumentStatus, ...]
    report: BlendReport | None = None

    @property
    def fallback_reason(self) -> FallbackReason | None:
        """Why documents were computed; None when all were hits."""
        reported = self.report.fallback_reason if self.report else None
        return reported or self.plan.fallback_reason

    @property
    def applied(self) -> bool:
        """Whether any document's KV was used."""
        return DocumentStatus.HIT in self.statuses

    @property
    def header_status(self) -> str:
        """One word for the whole request: hit, partial, miss or off."""
        looked_up = [status for status in self.statuses if status is not DocumentStatus.OFF]
        if not looked_up:
            return "off"
        hits = looked_up.count(DocumentStatus.HIT)
        if hits == 0:
            return "miss"
        return "hit" if hits == len(looked_up) else "partial"

    @property
    def headers(self) -> dict[str, str]:
        """Response headers, known with the first token."""
        reused = self.report.reused_tokens if self.report else 0
        return {"x-blend-status": self.header_status, "x-blend-reused-tokens": str(reused)}

    def cached_tokens(self, engine_says: int | None) -> int:
        """Prompt tokens whose KV was not computed again."""
        if self.report is None and self.plan.params is not None:
            # The engine counts a pass's whole range as cached, computed tokens included.
            return 0
        return self.report.cached_tokens if self.report else engine_says or 0

    def add_to(self, body: dict[str, Any], *, reports: bool) -> None:
        """Complete a response, or the usage chunk of a stream, in place.

        Args:
            body: Has OpenAI's `usage`.
            reports: Whether the `blend` object is wanted.
        """
        usage = body["usage"]
        details = usage.get("prompt_tokens_details") or {}
        details = {name: value for name, value in details.items() if value is not None}
        cached = self.cached_tokens(details.get("cached_tokens"))
        usage["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        if reports and self.plan.documents:
            body["blend"] = self.to_body(prompt_tokens=usage["prompt_tokens"], cached_tokens=cached)

    def to_body(self, *, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """The response's `blend` object.

        Args:
            prompt_tokens: The prompt's length.
            cached_tokens: vLLM's own prefix hits, used where there is no report.
        """
        report = self.report
        prefix = report.prefix_tokens if report else cached_tokens
        # A lost report proves nothing exact: under a blend salt the answer may be approximate.
        is_blended = self.plan.params is not None and self.plan.params.approximate_salt
        approximate = report.approximate if report else is_blended
        return {
            "applied": self.applied,
            "exact": not approximate,
            "approximate": approximate,
            "prefix_tokens": prefix,
            "reused_tokens": report.reused_tokens if report else 0,
            "recomputed_tokens": report.recomputed_tokens if report else 0,
            "computed_tokens": report.computed_tokens if report else prompt_tokens - prefix,
            "recompute_ratio": report.recompute_ratio if report else 0.0,
            "charged_ratio": report.charged_ratio if report else 0.0,
            "documents": [
                {**document.label, "tokens": document.num_tokens, "status": str(status)}
                for document, status in zip(self.plan.documents, self.statuses, strict=True)
            ],
            "fallback_reason": None if self.fallback_reason is None else str(self.fallback_reason),
        }


def without_report(plan: Plan) -> Outcome:
    """The outcome of a plan that looked nothing up."""
    return Outcome(plan=plan, statuses=(DocumentStatus.OFF,) * len(plan.documents))


def with_report(plan: Plan, report: BlendReport, compiling: Sequence[bool]) -> Outcome:
    """The outcome of a plan the engine reported on.

    Args:
        plan: As sent.
        report: What the engine did.
        compiling: Per document, whether its compile is queued or running now.
    """
    statuses = []
    for document, is_compiling in zip(plan.documents, compiling, strict=True):
        status = DocumentStatus.OFF
        if document.segment_index is not None:
            status = _STATUS_OF_SEGMENT[report.segments[document.segment_index]]
        if status is DocumentStatus.MISS and is_compiling:
            status = DocumentStatus.COMPILING
        statuses.append(status)
    return Outcome(plan=plan, statuses=tuple(statuses), report=report)


def unreported(plan: Plan) -> Outcome:
    """The outcome of a plan whose report was lost; nothing is claimed of it."""
    return without_report(replace(plan, fallback_reason=FallbackReason.LOAD_FAILED))


def cold_documents(
    documents: Sequence[PlannedDocument], indices: Sequence[int], *, because: str = "not resident"
) -> DocumentCold:
    """The error that names the documents without KV.

    Args:
        documents: The prompt's documents.
        indices: Those without KV; at least one.
        because: Why they have none.
    """
    names = [_name(documents[index], index) for index in indices]
    return DocumentCold(
        f"strict mode: the KV of {', '.join(names)} cannot be used ({because}); register the "
        "document at /v1/documents and wait for it, or use mode auto",
        param=f"documents[{indices[0]}]",
    )


def cold_segments(plan: Plan, segment_indices: Sequence[int]) -> DocumentCold:
    """The error for segments that the engine found without KV after all."""
    cold = [
        index
        for index, document in enumerate(plan.documents)
        if document.segment_index in segment_indices
    ]
    return cold_documents(plan.documents, cold)


def _name(document: PlannedDocument, index: int) -> str:
    label = next((value for value in document.label.values() if value is not None), None)
    return f"document {index + 1}" if label is None else f"document {str(label)[:64]!r}"
