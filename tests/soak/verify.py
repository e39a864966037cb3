"""Holds what clients, journal, faults and reports say against each other and against the oracle."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.soak.clients import Ending
from tests.soak.oracle import Oracle, Verdict
from tests.soak.records import Admission, Chapter, PassRecord
from tests.soak.traffic import Kind, Request

from blend_engine.messages import CANCELLED
from blend_engine.protocol import BlendReport, FallbackReason, SegmentStatus
from blend_engine.segments import SegmentContext

_CHAT_ENDINGS = ("done", "hung up", "cold")
_COMPILE_REASONS = {
    "compile_failed",
    "dropped",
    "evicted",
    "out_of_memory",
    "queue_full",
    "store_full",
    "too_short",
}
"""What a compile may fail with here: by a fault, for want of room, or overtaken by others."""


@dataclass
class Findings:
    """What the soak has found so far.

    Args:
        counts: By what they count.
        problems: Each fails the soak.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def expect(self, is_so: bool, problem: str) -> None:
        """Note a problem unless it is so."""
        if not is_so:
            self.problems.append(problem)


class Verifier:
    """Checks one chapter after another."""

    def __init__(self, oracle: Oracle, findings: Findings) -> None:
        self._oracle = oracle
        self._findings = findings
        self._compiled: set[tuple[str, SegmentContext, tuple[int, ...]]] = set()

    def check(self, endings: list[Ending], chapter: Chapter) -> None:
        """All that has happened since the last time; nothing runs now."""
        findings = self._findings
        for problem in chapter.problems:
            findings.expect(False, problem)
        by_request: dict[str, list[Admission]] = defaultdict(list)
        verdicts: dict[int, Verdict] = {}
        requests = {ending.request.name: ending.request for ending in endings}
        last_use = {each: a.number for a in chapter.admissions for each in a.origins}
        for admission in chapter.admissions:
            name = admission.request_id.split("-")[0]
            by_request[name].append(admission)
            self._check_sources(admission, requests.get(name))
            verdicts[admission.number] = self._replay(admission)
            needed = {each for each, last in last_use.items() if last > admission.number}
            if admission.number % 64 == 0:
                self._oracle.forget(chapter.kept | needed | {admission.number})
        self._oracle.forget(chapter.kept)
        for ending in endings:
            self._check_ending(ending, by_request[ending.request.name], verdicts)
        self._check_passes(chapter)

    def _replay(self, admission: Admission) -> Verdict:
        findings, verdict = self._findings, self._oracle.replay(admission)
        findings.counts["admissions replayed"] += 1
        findings.counts["tokens checked"] += len(admission.token_ids) - admission.num_known
        findings.counts["near-ties, logits"] += verdict.num_ties
        findings.counts["tokens found in vLLM's cache"] += admission.num_local
        if verdict.wrong is not None:
            if verdict.is_doubtful:
                findings.counts["near-ties, HKVD"] += 1
            else:
                findings.counts["wrong answers"] += 1
                findings.expect(False, f"{admission.request_id}: wrong at token {verdict.wrong}")
        return verdict

    # Whose KV.

    def _check_sources(self, admission: Admission, request: Request | None) -> None:
        """Only what the tenant itself has compiled is loaded, and only its salt's blocks found."""
        record = admission.pass_record
        if admission.compiles is not None and record is not None and record.captured:
            self._compiled.add(admission.compiles)
        if request is None:
            return
        self._findings.expect(
            admission.salt == request.salt, f"{request.name} ran under {admission.salt}"
        )
        for hit in record.hits if record is not None else ():
            span = request.segments[hit.segment_index]
            source = (request.tenant, span.context, request.token_ids[span.start : span.end])
            self._findings.expect(
                source in self._compiled, f"{request.name} loads what its tenant never compiled"
            )

    # What the client got.

    def _check_ending(
        self, ending: Ending, admissions: list[Admission], verdicts: dict[int, Verdict]
    ) -> None:
        findings, request, how = self._findings, ending.request, ending.how
        if how.startswith("raised") or how == "lost":
            findings.counts["crashes"] += 1
            findings.expect(False, f"{request.name} {how}")
        findings.counts[f"{request.kind.name.lower()}: {how.split(':')[0]}"] += 1
        if request.kind is not Kind.CHAT:
            is_known = ending.reason is None or ending.reason in _COMPILE_REASONS
            findings.expect(is_known, f"{request.name}: compile failed by {ending.reason}")
            return
        if how not in _CHAT_ENDINGS:
            return
        findings.expect(how != "hung up" or request.is_aborted, f"{request.name} hung up by itself")
        if how == "done":
            complete = len(ending.token_ids) == request.max_tokens
            findings.expect(complete, f"{request.name}: {len(ending.token_ids)} tokens")
        if how != "hung up":
            findings.expect(bool(admissions), f"{request.name} was never admitted")
        if not admissions:
            return
        made = admissions[-1].token_ids[len(request.token_ids) :]
        is_same = made == ending.token_ids if how == "done" else _begins(made, ending.token_ids)
        findings.expect(is_same, f"{request.name}: the client got other tokens than were made")
        if request.segments:
            self._check_report(ending, admissions[0], verdicts[admissions[0].number])

    def _check_report(self, ending: Ending, admission: Admission, verdict: Verdict) -> None:
        request, report = ending.request, ending.report
        findings = self._findings
        if report is None:
            findings.expect(ending.how == "hung up", f"{request.name} has no report")
            return
        reasons = report.fallback_reason
        findings.counts[f"reports: {reasons or 'none'}"] += 1
        expected = _expected_report(request, admission, verdict)
        found = (
            tuple(status is SegmentStatus.HIT for status in report.segments),
            tuple(status is SegmentStatus.FAILED for status in report.segments),
            report.prefix_tokens,
            report.reused_tokens,
            report.recomputed_tokens,
        )
        findings.expect(found == expected, f"{request.name} reports {found}, was {expected}")
        findings.expect(
            sum(found[2:]) + report.computed_tokens == report.prompt_tokens,
            f"{request.name}: the report does not add up",
        )
        self._check_words(ending, report)

    def _check_words(self, ending: Ending, report: BlendReport) -> None:
        request, findings = ending.request, self._findings
        documents = [
            status
            for span, status in zip(request.segments, report.segments, strict=True)
            if span.context is SegmentContext.FREE
        ]
        has_failed = SegmentStatus.FAILED in documents
        says_failed = report.fallback_reason is FallbackReason.LOAD_FAILED
        findings.expect(has_failed == says_failed, f"{request.name}: {report.fallback_reason}")
        if request.setting is None:
            findings.expect(not report.approximate, f"{request.name} is not exact")
        if request.strict and ending.how != "hung up":
            cold = (SegmentStatus.MISS, SegmentStatus.FAILED)
            is_cold = any(status in cold for status in documents)
            findings.expect(is_cold == (ending.how == "cold"), f"{request.name} {ending.how}")

    # Faults.

    def _check_passes(self, chapter: Chapter) -> None:
        """Every failure was injected, and everything injected has failed."""
        findings, injected = self._findings, chapter.injected
        for admission in chapter.admissions:
            record = admission.pass_record
            if record is None:
                continue
            findings.counts["passes"] += 1
            if record.failed is None:
                findings.expect(False, f"pass {record.pass_id} was never acknowledged")
                continue
            findings.counts["failed loads"] += len(record.failed)
            fault = injected.get(record.pass_id)
            if record.error == CANCELLED:
                findings.counts["passes cancelled"] += 1
            elif record.is_compile:
                self._check_compile(record, fault is not None and fault.raised, fault)
            else:
                num_bad = fault.bad_loads if fault is not None else 0
                is_all = fault is not None and fault.raised
                expected = len(record.hits) if is_all else num_bad
                findings.expect(
                    len(record.failed) == expected,
                    f"pass {record.pass_id}: {len(record.failed)} failed, {expected} injected",
                )

    def _check_compile(self, record: PassRecord, raised: bool, fault: object) -> None:
        no_slab = bool(getattr(fault, "no_slab", False))
        expected = "out_of_memory" if no_slab else "compile_failed" if raised else None
        self._findings.counts["compiles stored"] += bool(record.captured)
        self._findings.expect(
            (record.error, record.captured) == (expected, expected is None),
            f"compile {record.pass_id}: {record.error}, injected {expected}",
        )


def _begins(whole: list[int], part: list[int]) -> bool:
    return whole[: len(part)] == part


def _expected_report(
    request: Request, admission: Admission, verdict: Verdict
) -> tuple[tuple[bool, ...], tuple[bool, ...], int, int, int]:
    """Hits, failures, prefix, reused and recomputed tokens of the plan that was replayed."""
    record, local = admission.pass_record, admission.num_local
    hits = record.hits if record is not None else []
    failed = set(record.failed or ()) if record is not None else set()
    loaded = [hit for hit in hits if hit.segment_index not in failed]
    is_loaded = {hit.segment_index for hit in loaded}
    exact = sum(hit.end - hit.start for hit in loaded if hit.context is SegmentContext.PREFIX)
    blended = sum(hit.end - hit.start for hit in loaded) - exact
    prefix = local - (record.num_hazards if record is not None else 0) + exact
    return (
        tuple(
            index in is_loaded or (span.end <= local and index not in failed)
            for index, span in enumerate(request.segments)
        ),
        tuple(index in failed for index in range(len(request.segments))),
        prefix,
        blended - verdict.num_selected,
        verdict.num_selected,
    )
