"""The wire: what is sent arrives, what is malformed is refused, what is not ours is left alone."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from blend_engine.errors import BlendClientError, InvalidBlendParams
from blend_engine.protocol import (
    WIRE_KEY,
    WIRE_VERSION,
    BlendParams,
    BlendReport,
    CompileParams,
    DropParams,
    FallbackReason,
    Policy,
    RequestParams,
    SegmentStatus,
    StoreEvent,
    StoreEventKind,
    StoreStats,
    parse_request_params,
)
from blend_engine.segments import SegmentContext, SegmentKey, SegmentSpan

RELAXED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COUNTS = st.integers(0, 2**40)
SHARES = st.floats(0.0, 1.0)
FREE, PREFIX = SegmentContext.FREE, SegmentContext.PREFIX


def through_json(wire: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(wire))


def through_msgpack(wire: dict[str, Any]) -> dict[str, Any]:
    """As vLLM sends `SamplingParams` to the engine core and its statistics back."""
    msgspec = pytest.importorskip("msgspec")
    return msgspec.msgpack.decode(msgspec.msgpack.encode(wire))


WIRES = pytest.mark.parametrize("through", [dict, through_json, through_msgpack])


@st.composite
def spans(draw: st.DrawFn) -> tuple[SegmentSpan, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, 1000), max_size=8)))
    found = [
        SegmentSpan(start=start, end=end, context=FREE)
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    if found and draw(st.booleans()):
        found[0] = SegmentSpan(start=0, end=found[0].end, context=PREFIX)
    return tuple(found)


BLEND_PARAMS = st.builds(
    BlendParams,
    plan_id=TEXTS,
    tenant=TEXTS,
    segments=spans(),
    policy=st.sampled_from(Policy),
    recompute_ratio=SHARES,
    check_layer=st.integers(0, 100),
    approximate_salt=st.booleans(),
    strict=st.booleans(),
)
COMPILE_PARAMS = st.builds(
    CompileParams,
    plan_id=TEXTS,
    tenant=TEXTS,
    segment=st.builds(
        SegmentSpan, start=st.integers(0, 300), end=st.integers(301, 999), context=st.just(FREE)
    ),
)
DROP_PARAMS = st.builds(
    DropParams, plan_id=TEXTS, keys=st.lists(TEXTS.map(SegmentKey), max_size=4).map(tuple)
)
REQUEST_PARAMS = st.one_of(BLEND_PARAMS, COMPILE_PARAMS, DROP_PARAMS)
REPORTS = st.builds(
    BlendReport,
    plan_id=TEXTS,
    prompt_tokens=COUNTS,
    prefix_tokens=COUNTS,
    reused_tokens=COUNTS,
    recomputed_tokens=COUNTS,
    computed_tokens=COUNTS,
    approximate=st.booleans(),
    recompute_ratio=SHARES,
    charged_ratio=SHARES,
    segments=st.lists(st.sampled_from(SegmentStatus), max_size=4).map(tuple),
    fallback_reason=st.none() | st.sampled_from(FallbackReason),
    loaded_tokens=COUNTS,
)
EVENTS = st.builds(
    StoreEvent,
    kind=st.sampled_from(StoreEventKind),
    key=TEXTS.map(SegmentKey),
    num_tokens=COUNTS,
    num_bytes=COUNTS,
    plan_id=st.none() | TEXTS,
    reason=st.none() | TEXTS,
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


def blend_wire(changes: dict[Any, Any] | None = None) -> dict[str, Any]:
    """The wire form of a sound request, with some of its parameters replaced."""
    params = BlendParams(
        plan_id="p", tenant="t", segments=(SegmentSpan(start=0, end=8, context=FREE),)
    )
    wire = through_json(params.to_kv_transfer_params())
    wire[WIRE_KEY]["params"].update(changes or {})
    return wire


def span_wire(start: Any = 0, end: Any = 8, context: Any = "free") -> dict[str, Any]:
    return {"start": start, "end": end, "context": context}


@WIRES
@RELAXED
@given(params=REQUEST_PARAMS)
def test_parameters_arrive_as_sent(
    through: Callable[[dict[str, Any]], dict[str, Any]], params: RequestParams
):
    """Every kind of request survives every wire it crosses, its types included."""
    arrived = parse_request_params(through(params.to_kv_transfer_params()))
    assert arrived == params
    assert type(arrived) is type(params)


@WIRES
@RELAXED
@given(report=REPORTS)
def test_report_arrives_as_sent(
    through: Callable[[dict[str, Any]], dict[str, Any]], report: BlendReport
):
    """A report is the same on the other side, enums and tuples included."""
    arrived = BlendReport.from_wire(through(report.to_wire()))
    assert arrived == report
    assert all(isinstance(status, SegmentStatus) for status in arrived.segments)
    assert arrived.fallback_reason is report.fallback_reason


@WIRES
@RELAXED
@given(event=EVENTS)
def test_event_arrives_as_sent(
    through: Callable[[dict[str, Any]], dict[str, Any]], event: StoreEvent
):
    """An event is the same on the other side."""
    arrived = StoreEvent.from_wire(through(event.to_wire()))
    assert arrived == event
    assert arrived.kind is event.kind


@WIRES
def test_store_stats_arrive_as_sent(through: Callable[[dict[str, Any]], dict[str, Any]]):
    """Every counter keeps its name."""
    stats = StoreStats(
        num_segments=1,
        num_bytes=2,
        budget_bytes=3,
        num_leases=4,
        num_evictions=5,
        num_load_failures=6,
        loaded_tokens=7,
    )
    assert StoreStats.from_wire(through(stats.to_wire())) == stats


def test_wire_is_plain_data():
    """A debugger shows strings, numbers and lists, under the key and version that are ours."""
    assert blend_wire() == {
        "blend": {
            "version": 1,
            "kind": "use",
            "params": {
                "plan_id": "p",
                "tenant": "t",
                "segments": [{"start": 0, "end": 8, "context": "free"}],
                "policy": "sinks",
                "recompute_ratio": 0.1,
                "check_layer": 1,
                "approximate_salt": False,
                "strict": False,
            },
        }
    }


@pytest.mark.parametrize(
    "foreign",
    [
        None,
        7,
        "blend",
        [],
        {},
        {"do_remote_prefill": True, "remote_engine_id": "x"},
        {WIRE_KEY: None},
        {WIRE_KEY: "use"},
        {WIRE_KEY: {}},
        {WIRE_KEY: {"kind": "use", "params": {}}},
        {WIRE_KEY: {"version": WIRE_VERSION + 1, "kind": "use", "params": {}}},
        {WIRE_KEY: {"version": str(WIRE_VERSION), "kind": "use", "params": {}}},
    ],
    ids=repr,
)
def test_foreign_parameters_are_not_ours(foreign):
    """Another connector's parameters, and another version's, mean a plain request."""
    assert parse_request_params(foreign) is None


def test_neighbours_on_the_wire_are_left_alone():
    """Other connectors' keys beside ours neither help nor harm."""
    wire = {**blend_wire(), "do_remote_prefill": True}
    assert parse_request_params(wire) == parse_request_params(blend_wire())


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_ratio": -0.01},
        {"recompute_ratio": 1.01},
        {"recompute_ratio": float("nan")},
        {"recompute_ratio": "0.1"},
        {"check_layer": -1},
        {"check_layer": None},
        {"policy": "all"},
        {"policy": ["sinks"]},
        {"segments": None},
        {"segments": [None]},
        {"segments": [[0, 8, "free"]]},
        {"segments": "free"},
        {"segments": [{"start": 0, "end": 8}]},
        {"segments": [span_wire(context="anchored")]},
        {"segments": [span_wire(start=-1)]},
        {"segments": [span_wire(start=8, end=0)]},
        {"segments": [span_wire(start="a")]},
        {"segments": [span_wire(start=None)]},
        {"segments": [span_wire(start=float("nan"))]},
        {"segments": [span_wire(end=float("inf"))]},
        {"tenant": 5},
        {"tenant": "\ud800"},
        {"plan_id": ["p"]},
        {"check_layer": 1.5},
        {"segments": [span_wire(0, 8), span_wire(7, 9)]},
        {"segments": [span_wire(8, 9), span_wire(0, 7)]},
        {"segments": [span_wire(start=1, context="prefix")]},
        {"surprise": 1},
        {3: 4},
    ],
    ids=repr,
)
def test_malformed_parameters_are_refused(changes):
    """What is ours and cannot be meant is an error of the caller, not of the connector."""
    with pytest.raises(InvalidBlendParams):
        parse_request_params(blend_wire(changes))


@pytest.mark.parametrize("missing", ["plan_id", "tenant", "segments", "policy"])
def test_missing_parameter_is_refused(missing):
    """A request that does not say what it wants is not guessed at."""
    wire = blend_wire()
    del wire[WIRE_KEY]["params"][missing]
    with pytest.raises(InvalidBlendParams):
        parse_request_params(wire)


@pytest.mark.parametrize(
    "blend",
    [
        {},
        {"kind": "use"},
        {"params": {}},
        {"kind": "steal", "params": {}},
        {"kind": ["use"], "params": {}},
        {"kind": "use", "params": None},
        {"kind": "use", "params": 7},
        {"kind": "use", "params": "params"},
        {"kind": "compile", "params": {"plan_id": "p", "tenant": "t", "segment": None}},
        {"kind": "compile", "params": {"plan_id": "p", "tenant": "t"}},
        *(
            {"kind": "compile", "params": {"plan_id": "p", "tenant": "t", "segment": segment}}
            for segment in (span_wire(8, 0), span_wire(-1, 8), span_wire(1, 8, "prefix"))
        ),
        {"kind": "drop", "params": {"plan_id": "p", "keys": [["k"]]}},
        {"kind": "drop", "params": {"plan_id": "p", "keys": 7}},
        {"kind": "drop", "params": {"plan_id": "p"}},
    ],
    ids=repr,
)
def test_malformed_envelope_is_refused(blend):
    """Our version with an unknown kind, or without sound parameters, is malformed."""
    with pytest.raises(InvalidBlendParams, match="malformed blend parameters"):
        parse_request_params({WIRE_KEY: {"version": WIRE_VERSION, **blend}})


@RELAXED
@given(JUNK)
def test_junk_is_foreign_or_refused(junk):
    """Nothing that can come over a wire raises anything else."""
    for wire in (junk, {WIRE_KEY: junk}, {WIRE_KEY: {"version": WIRE_VERSION, "params": junk}}):
        with suppress(InvalidBlendParams):
            parse_request_params(wire)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(params=REQUEST_PARAMS, junk=JUNK, data=st.data())
def test_damaged_parameters_are_read_or_refused(params, junk, data):
    """A sound request with one value replaced by anything raises nothing else."""
    wire = through_json(params.to_kv_transfer_params())
    place = wire[WIRE_KEY]
    while isinstance(place, dict | list) and place:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            place[key] = junk
            break
        place = place[key]
    with suppress(InvalidBlendParams):
        parse_request_params(wire)


def test_refusal_is_the_callers_error():
    """A front end maps it to HTTP 400 by its class, or as the `ValueError` it is."""
    assert issubclass(InvalidBlendParams, BlendClientError)
    assert issubclass(InvalidBlendParams, ValueError)


def test_empty_spans_are_allowed():
    """An empty document is no error."""
    empty = SegmentSpan(start=5, end=5, context=FREE)
    assert BlendParams(plan_id="p", tenant="t", segments=(empty, empty)).segments == (empty, empty)


def test_cached_tokens_are_those_not_computed_again():
    """Recomputed tokens are never sold as cached."""
    report = BlendReport(
        plan_id="p",
        prompt_tokens=100,
        prefix_tokens=10,
        reused_tokens=40,
        recomputed_tokens=20,
        computed_tokens=30,
        approximate=True,
        recompute_ratio=1 / 3,
        charged_ratio=1 / 3,
        segments=(),
        fallback_reason=None,
        loaded_tokens=60,
    )
    assert report.cached_tokens == 50
