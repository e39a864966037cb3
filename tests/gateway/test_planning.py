from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.gateway.fakes import FakeEngine

from blend_engine.protocol import FallbackReason, Policy
from blend_engine.segments import SegmentContext, segment_key
from blend_gateway.errors import DocumentCold, InvalidRequest
from blend_gateway.outcome import Plan
from blend_gateway.planning import Prompt, PromptDocument, make_plan
from blend_gateway.protocol import BlendMode, BlendOptions, ChatCall
from blend_gateway.salts import DEFAULT_TENANT, derive_salt
from blend_gateway.settings import Settings

SETTINGS = Settings(salt_secret=b"secret", policy=Policy.SINKS, recompute_ratio=0.1)
EXACT = derive_salt(b"secret", DEFAULT_TENANT)

# leading [0, 10), a document [12, 20), a short one [22, 24), a document [26, 40)
PROMPT = Prompt(
    token_ids=list(range(100, 150)),
    leading_end=10,
    documents=(
        PromptDocument(start=12, end=20, label={"id": "a"}),
        PromptDocument(start=22, end=24, label={"id": None}),
        PromptDocument(start=26, end=40, label={"document_id": "doc_1"}),
    ),
)


def plan(
    prompt: Prompt = PROMPT,
    engine: FakeEngine | None = None,
    payload: dict[str, Any] | None = None,
    settings: Settings = SETTINGS,
    **blend: Any,
) -> Plan:
    call = ChatCall(
        tenant=DEFAULT_TENANT, payload=payload or {}, messages=[], blend=BlendOptions(**blend)
    )
    return make_plan(call, prompt, engine or FakeEngine(), settings)


def spans(made: Plan) -> list[tuple[int, int, str]]:
    assert made.params is not None
    return [(span.start, span.end, span.context.value) for span in made.params.segments]


def test_documents_blend_under_a_salt_of_their_own() -> None:
    made = plan()
    assert spans(made) == [(0, 10, "prefix"), (12, 20, "free"), (26, 40, "free")]
    assert made.params is not None
    assert made.params.approximate_salt
    assert made.salt != EXACT
    assert [document.segment_index for document in made.documents] == [1, None, 2]
    assert made.fallback_reason is FallbackReason.TOO_SHORT


def test_keys_are_the_documents_own() -> None:
    first = plan().documents[0]
    assert first.key == segment_key("default", SegmentContext.FREE, range(112, 120))


def test_a_leading_segment_alone_stays_exact() -> None:
    made = plan(Prompt(token_ids=list(range(50)), leading_end=10))
    assert spans(made) == [(0, 10, "prefix")]
    assert made.params is not None
    assert not made.params.approximate_salt
    assert made.salt == EXACT


def test_a_short_leading_segment_is_left_out() -> None:
    made = plan(Prompt(token_ids=list(range(50)), leading_end=3))
    assert made == Plan(salt=EXACT)


def test_short_documents_alone_are_exact() -> None:
    prompt = Prompt(
        token_ids=list(range(9)), documents=(PromptDocument(start=2, end=5, label={"id": "a"}),)
    )
    made = plan(prompt)
    assert made.params is None
    assert made.salt == EXACT
    assert made.fallback_reason is FallbackReason.TOO_SHORT


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [
        (FallbackReason.OFF, {"mode": BlendMode.OFF}),
        (FallbackReason.PROMPT_LOGPROBS, {"payload": {"prompt_logprobs": 0}}),
        (
            FallbackReason.UNSUPPORTED_MODEL,
            {"engine": FakeEngine(unsupported_reason="no rotary")},
        ),
    ],
)
def test_what_is_not_blended_is_exact(reason: FallbackReason, arguments: Any) -> None:
    made = plan(**arguments)
    assert made.params is None
    assert made.salt == EXACT
    assert made.fallback_reason is reason
    assert all(document.segment_index is None for document in made.documents)


def test_a_request_overrides_the_defaults() -> None:
    made = plan(policy=Policy.HKVD, recompute_ratio=0.5)
    assert made.params is not None
    assert (made.params.policy, made.params.recompute_ratio) == (Policy.HKVD, 0.5)
    assert made.salt != plan().salt


def test_the_policy_none_recomputes_nothing() -> None:
    made = plan(policy=Policy.NONE)
    assert made.params is not None
    assert made.params.recompute_ratio == 0.0


def test_a_ratio_under_a_servers_policy_none_is_refused() -> None:
    """It would be dropped in silence; naming a policy, or turning blending off, is an answer."""
    full_reuse = replace(SETTINGS, policy=Policy.NONE)
    with pytest.raises(InvalidRequest, match="'none' of this server") as caught:
        plan(settings=full_reuse, recompute_ratio=0.5)
    assert (caught.value.param, caught.value.code) == (
        "blend.recompute_ratio",
        "conflicting_parameters",
    )
    named = plan(settings=full_reuse, policy=Policy.SINKS, recompute_ratio=0.5)
    assert named.params is not None
    assert named.params.recompute_ratio == 0.5
    assert plan(settings=full_reuse, recompute_ratio=0.5, mode=BlendMode.OFF).params is None
    assert plan(settings=full_reuse, recompute_ratio=0.0).params is not None


def test_plan_ids_are_unique() -> None:
    first, second = plan().params, plan().params
    assert first is not None
    assert second is not None
    assert first.plan_id != second.plan_id


def test_strict_mode_refuses_cold_documents_by_name() -> None:
    engine = FakeEngine(resident={plan().documents[0].key})
    with pytest.raises(DocumentCold) as caught:
        plan(engine=engine, mode=BlendMode.STRICT)
    assert "doc_1" in caught.value.message
    assert caught.value.param == "documents[2]"


def test_strict_mode_takes_resident_documents_and_short_ones() -> None:
    keys = [document.key for document in plan().documents]
    made = plan(engine=FakeEngine(resident={keys[0], keys[2]}), mode=BlendMode.STRICT)
    assert made.params is not None
    assert made.params.strict


def test_strict_mode_refuses_what_can_never_be_warm() -> None:
    with pytest.raises(DocumentCold, match="unsupported_model"):
        plan(engine=FakeEngine(unsupported_reason="no rotary"), mode=BlendMode.STRICT)


@given(st.integers(0, 50), st.integers(0, 50))
def test_truncation_keeps_whole_spans_at_their_tokens(start: int, length: int) -> None:
    end = min(start + length, 50)
    cut = PROMPT.cut(start, end)
    assert cut.token_ids == PROMPT.token_ids[start:end]
    kept = {tuple(cut.token_ids[d.start : d.end]) for d in cut.documents}
    for document in PROMPT.documents:
        ids = tuple(PROMPT.token_ids[document.start : document.end])
        assert (ids in kept) == (start <= document.start and document.end <= end)
    assert cut.leading_end == (10 if start == 0 and end >= 10 else 0)
