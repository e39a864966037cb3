import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from blend_engine.protocol import BlendParams, BlendReport, FallbackReason, SegmentStatus
from blend_engine.segments import SegmentContext, segment_key
from blend_gateway.errors import InvalidRequest
from blend_gateway.outcome import (
    DocumentStatus,
    Outcome,
    Plan,
    PlannedDocument,
    cold_segments,
    unreported,
    with_report,
    without_report,
)
from blend_gateway.sse import DONE, finish_events

KEY = segment_key("t", SegmentContext.FREE, [1])


def plan(*indices: int | None, reason: FallbackReason | None = None) -> Plan:
    return Plan(
        salt="s",
        documents=tuple(
            PlannedDocument(label={"id": f"d{n}"}, num_tokens=7, key=KEY, segment_index=index)
            for n, index in enumerate(indices)
        ),
        fallback_reason=reason,
    )


def report(*segments: SegmentStatus, **changes: Any) -> BlendReport:
    values: dict[str, Any] = {
        "plan_id": "p",
        "prompt_tokens": 40,
        "prefix_tokens": 10,
        "reused_tokens": 12,
        "recomputed_tokens": 2,
        "computed_tokens": 16,
        "approximate": True,
        "recompute_ratio": 2 / 14,
        "charged_ratio": 0.2,
        "segments": segments,
        "fallback_reason": None,
        "loaded_tokens": 14,
    }
    return BlendReport(**{**values, **changes})


def completed(outcome: Outcome, *, reports: bool = True, details: Any = None) -> dict[str, Any]:
    body: dict[str, Any] = {"usage": {"prompt_tokens": 40, "prompt_tokens_details": details}}
    outcome.add_to(body, reports=reports)
    return body


def test_a_hit_is_reported_in_full() -> None:
    outcome = with_report(plan(1), report(SegmentStatus.HIT, SegmentStatus.HIT), [False])
    body = completed(outcome)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 22}
    assert body["blend"] == {
        "applied": True,
        "exact": False,
        "approximate": True,
        "prefix_tokens": 10,
        "reused_tokens": 12,
        "recomputed_tokens": 2,
        "computed_tokens": 16,
        "recompute_ratio": 2 / 14,
        "charged_ratio": 0.2,
        "documents": [{"id": "d0", "tokens": 7, "status": "hit"}],
        "fallback_reason": None,
    }
    assert outcome.headers == {"x-blend-status": "hit", "x-blend-reused-tokens": "12"}


def test_statuses_follow_segments_and_running_compiles() -> None:
    segments = (
        SegmentStatus.HIT,
        SegmentStatus.MISS,
        SegmentStatus.MISS,
        SegmentStatus.FAILED,
        SegmentStatus.TOO_SHORT,
    )
    outcome = with_report(
        plan(0, 1, 2, 3, 4, None), report(*segments), [True, True, False, True, False, True]
    )
    assert [str(status) for status in outcome.statuses] == [
        "hit",
        "compiling",
        "miss",
        "failed",
        "off",
        "off",
    ]
    assert outcome.header_status == "partial"


@pytest.mark.parametrize(
    ("statuses", "word"),
    [
        ((), "off"),
        (("off",), "off"),
        (("hit", "off"), "hit"),
        (("miss", "failed"), "miss"),
        (("compiling",), "miss"),
        (("hit", "compiling"), "partial"),
    ],
)
def test_one_word_for_the_whole_request(statuses: tuple[str, ...], word: str) -> None:
    documents = plan(*range(len(statuses)))
    outcome = Outcome(plan=documents, statuses=tuple(DocumentStatus(s) for s in statuses))
    assert outcome.header_status == word


@given(st.integers(0, 40) | st.none(), st.booleans())
def test_the_counts_add_up_to_the_prompt(cached: int | None, reported: bool) -> None:
    made = plan(0, reason=None if reported else FallbackReason.OFF)
    outcome = (
        with_report(made, report(SegmentStatus.HIT), [False]) if reported else without_report(made)
    )
    details = None if cached is None else {"cached_tokens": cached}
    body = completed(outcome, details=details)
    blend, usage = body["blend"], body["usage"]
    names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(blend[name] for name in names) == usage["prompt_tokens"]
    assert (
        usage["prompt_tokens_details"]["cached_tokens"]
        == blend["prefix_tokens"] + blend["reused_tokens"]
    )


def test_zero_cached_tokens_are_said() -> None:
    body = completed(without_report(plan()), details={"cached_tokens": None, "x": None})
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "blend" not in body


def test_who_wants_no_report_gets_counts_only() -> None:
    outcome = with_report(plan(0), report(SegmentStatus.HIT), [False])
    body = completed(outcome, reports=False)
    assert "blend" not in body
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 22


def test_the_engines_reason_comes_first() -> None:
    made = plan(0, None, reason=FallbackReason.TOO_SHORT)
    missed = report(SegmentStatus.MISS, fallback_reason=FallbackReason.MISS)
    assert with_report(made, missed, [False, False]).fallback_reason is FallbackReason.MISS
    hit = report(SegmentStatus.HIT)
    assert with_report(made, hit, [False, False]).fallback_reason is FallbackReason.TOO_SHORT


def test_a_lost_report_claims_nothing() -> None:
    outcome = unreported(plan(0))
    assert not outcome.applied
    assert outcome.fallback_reason is FallbackReason.LOAD_FAILED


def test_a_lost_report_of_a_blended_request_is_not_called_exact() -> None:
    params = BlendParams(plan_id="p", tenant="t", segments=(), approximate_salt=True)
    blended = replace(plan(0), params=params)
    body = unreported(blended).to_body(prompt_tokens=40, cached_tokens=0)
    assert (body["exact"], body["approximate"]) == (False, True)
    assert body["computed_tokens"] == 40
    assert unreported(blended).cached_tokens(39) == 0


async def finish(*events: str, error: Exception | None = None) -> list[str]:
    async def rest() -> Any:
        for event in events[1:]:
            yield event

    outcome = with_report(plan(0), report(SegmentStatus.HIT), [False])
    finished = finish_events(
        events[0], rest(), outcome, reports=True, error_of=lambda body: error or KeyError()
    )
    return [event async for event in finished]


@pytest.mark.anyio
async def test_only_the_usage_chunk_is_touched() -> None:
    fake = 'data: {"choices":[{"delta":{"content":"\\"choices\\":[],\\"usage\\":"}}]}\n\n'
    usage = 'data: {"choices":[],"usage":{"prompt_tokens":40},"x":"\u00fc"}\n\n'
    first, second, done = await finish(fake, usage, DONE)
    assert (first, done) == (fake, DONE)
    body = json.loads(second.removeprefix("data: "))
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 22
    assert body["blend"]["applied"] is True
    assert body["x"] == "\u00fc"


@pytest.mark.anyio
async def test_errors_in_a_stream_get_our_shape() -> None:
    error = InvalidRequest("no", param="x", code="y")
    _, event, done = await finish(
        "data: {}\n\n", 'data: {"error": {"code": 400}}\n\n', DONE, error=error
    )
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "y"
    assert done == DONE


def test_segments_found_cold_are_named_as_documents() -> None:
    made = plan(1, None, 2)
    error = cold_segments(made, [2])
    assert "'d2'" in error.message
    assert "'d0'" not in error.message
    assert error.param == "documents[2]"
