"""Documents whose KV comes back, as a client sees it."""

from typing import Any

import httpx
import pytest
from tests.gateway.e2e.asking import CHAT, assert_adds_up, chat, register
from tests.gateway.e2e.conftest import MIN_SEGMENT_TOKENS
from tests.gateway.e2e.texts import document
from tests.serving import Server

pytestmark = pytest.mark.vllm


def test_a_missed_document_is_hit_by_the_next_request(http: httpx.Client, server: Server) -> None:
    texts = [document("next a"), document("next b")]
    first = chat(http, "What is said?", texts)
    assert first.headers["x-blend-status"] == "miss"
    body = first.json()
    assert body["blend"]["applied"] is False
    assert body["blend"]["fallback_reason"] == "miss"
    assert {each["status"] for each in body["blend"]["documents"]} <= {"miss", "compiling"}
    assert_adds_up(body)

    server.await_metric("blend_warm_queue_depth", 0)
    second = chat(http, "And now, in another order?", texts[::-1])
    assert second.headers["x-blend-status"] == "hit"
    body = second.json()
    assert body["blend"]["approximate"] is True
    assert [each["status"] for each in body["blend"]["documents"]] == ["hit", "hit"]
    assert body["blend"]["fallback_reason"] is None
    assert int(second.headers["x-blend-reused-tokens"]) == body["blend"]["reused_tokens"] > 0
    assert_adds_up(body)


def test_a_registered_document_is_hit_at_once(http: httpx.Client) -> None:
    shown = register(http, text=document("registered"), title="Facts", id="label")
    body = chat(http, "What is said?", [{"document_id": shown["id"]}]).json()
    (reported,) = body["blend"]["documents"]
    assert reported == {
        "document_id": shown["id"],
        "tokens": shown["tokens"],
        "status": "hit",
    }
    assert_adds_up(body)


def test_registered_text_is_hit_when_sent_inline_and_in_a_part(http: httpx.Client) -> None:
    text = document("inline")
    shown = register(http, text=text)
    body = chat(http, "What is said?", [text]).json()
    assert body["blend"]["documents"][0]["status"] == "hit"
    content = [
        {"type": "text", "text": "First the question."},
        {"type": "file", "file": {"file_id": shown["id"]}},
        {"type": "text", "text": "Then the end."},
    ]
    answer = http.post(
        CHAT, json={"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    )
    assert answer.json()["blend"]["documents"][0]["status"] == "hit"


def test_mode_off_computes_everything_exactly(http: httpx.Client) -> None:
    text = document("off")
    register(http, text=text)
    answer = chat(http, "What is said?", [text], blend={"mode": "off"})
    assert answer.headers["x-blend-status"] == "off"
    blend = answer.json()["blend"]
    assert blend["exact"] is True
    assert blend["applied"] is False
    assert (blend["reused_tokens"], blend["fallback_reason"]) == (0, "off")
    assert_adds_up(answer.json())


def test_an_exact_request_never_gets_blended_blocks(http: httpx.Client) -> None:
    text = document("salted", 200)
    exact = {"blend": {"mode": "off"}, "logprobs": True, "max_tokens": 8}
    before = chat(http, "What is said?", [text], **exact).json()
    register(http, text=text)
    blended = chat(http, "What is said?", [text], blend={"policy": "none"}).json()
    assert blended["blend"]["reused_tokens"] > 0
    after = chat(http, "What is said?", [text], **exact).json()
    assert after["choices"][0]["message"] == before["choices"][0]["message"]
    tokens = [each["choices"][0]["logprobs"]["content"] for each in (before, after)]
    for one, other in zip(*tokens, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)


def test_prompt_logprobs_turn_blending_off(http: httpx.Client) -> None:
    text = document("logprobs")
    register(http, text=text)
    body = chat(http, "What is said?", [text], prompt_logprobs=0).json()
    assert body["blend"]["fallback_reason"] == "prompt_logprobs"
    assert body["blend"]["documents"][0]["status"] == "off"
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert_adds_up(body)


def test_a_short_document_is_computed_and_said_to_be_short(http: httpx.Client) -> None:
    body = chat(http, "What is said?", ["Two words."]).json()
    assert body["blend"]["documents"][0]["status"] == "off"
    assert body["blend"]["documents"][0]["tokens"] < MIN_SEGMENT_TOKENS
    assert body["blend"]["fallback_reason"] == "too_short"
    assert_adds_up(body)


@pytest.mark.parametrize(
    ("blend", "recomputed"),
    [
        ({"policy": "none"}, 0.0),
        ({"policy": "sinks", "recompute_ratio": 0.0}, 0.0),
        ({"policy": "sinks", "recompute_ratio": 0.5}, 0.5),
        ({"policy": "hkvd", "recompute_ratio": 0.25}, 0.25),
        ({"recompute_ratio": 1.0}, 1.0),
    ],
)
def test_the_policy_and_its_budget_are_the_requests(
    http: httpx.Client, blend: Any, recomputed: float
) -> None:
    text = document("policy", 100)
    register(http, text=text)
    body = chat(http, f"What is said? {blend}", [text], blend=blend).json()
    assert body["blend"]["documents"][0]["status"] == "hit"
    assert body["blend"]["recompute_ratio"] == pytest.approx(recomputed, abs=0.02)
    assert body["blend"]["charged_ratio"] >= body["blend"]["recompute_ratio"] - 1e-6
    assert_adds_up(body)


def test_the_same_document_twice_and_a_new_one_between(http: httpx.Client) -> None:
    text = document("twice")
    register(http, text=text)
    body = chat(http, "What is said?", [text, document("between"), text]).json()
    statuses = [each["status"] for each in body["blend"]["documents"]]
    assert (statuses[0], statuses[2]) == ("hit", "hit")
    assert statuses[1] in ("miss", "compiling")
    assert_adds_up(body)


@pytest.mark.parametrize("stream", [False, True])
def test_strict_mode_refuses_a_cold_document(http: httpx.Client, stream: bool) -> None:
    answer = chat(
        http,
        "What is said?",
        [{"id": "cold", "text": document("never seen")}],
        blend={"mode": "strict"},
        stream=stream,
    )
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["code"] == "document_cold"
    assert "'cold'" in error["message"]


def test_strict_mode_serves_a_warm_document(http: httpx.Client) -> None:
    text = document("warm")
    register(http, text=text)
    answer = chat(http, "What is said?", [text], blend={"mode": "strict"})
    assert answer.status_code == 200
    assert answer.headers["x-blend-status"] == "hit"


def test_a_deleted_document_is_cold_and_unknown(http: httpx.Client) -> None:
    text = document("deleted")
    shown = register(http, text=text)
    assert http.delete(f"/v1/documents/{shown['id']}").json()["deleted"] is True
    answer = chat(http, "What is said?", [text], blend={"mode": "strict"})
    assert answer.json()["error"]["code"] == "document_cold"
    answer = chat(http, "What is said?", [{"document_id": shown["id"]}])
    assert answer.status_code == 404


def test_what_is_too_short_to_keep_still_serves_chats(http: httpx.Client) -> None:
    answer = http.post("/v1/documents?wait=5", json={"text": "Two words."})
    assert answer.status_code == 200
    shown = answer.json()
    assert shown["status"] == "failed"
    assert shown["last_error"]["code"] == "too_short"
    body = chat(http, "What is said?", [{"document_id": shown["id"]}]).json()
    assert body["blend"]["documents"][0]["document_id"] == shown["id"]


def test_no_report_where_none_is_wanted(http: httpx.Client) -> None:
    answer = chat(http, "What is said?", [document("quiet")], blend={"report": False})
    assert "blend" not in answer.json()
    assert not [name for name in answer.headers if name.startswith("x-blend-")]
    assert "cached_tokens" in answer.json()["usage"]["prompt_tokens_details"]


def test_a_stop_string_does_not_lose_the_report(http: httpx.Client) -> None:
    text = document("stop")
    register(http, text=text)
    body = chat(http, "What is said?", [text], stop=["e", "a", "i", "o"], max_tokens=64).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["blend"]["documents"][0]["status"] == "hit"


def test_headers_of_a_stream_know_what_was_reused(http: httpx.Client) -> None:
    text = document("header")
    register(http, text=text)
    body = {
        "messages": [{"role": "user", "content": "Go on."}],
        "documents": [text],
        "max_tokens": 4,
        "stream": True,
    }
    with http.stream("POST", CHAT, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-blend-status"] == "hit"
        assert int(answer.headers["x-blend-reused-tokens"]) > 0
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_truncation_beside_documents_is_refused(http: httpx.Client) -> None:
    """It would cut documents away, and nothing in the answer could say so."""
    answer = chat(http, "What is said?", [document("truncated")], truncate_prompt_tokens=24)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


def test_metrics_tell_reused_from_computed(http: httpx.Client, server: Server) -> None:
    text = document("counted")
    register(http, text=text)
    name = 'blend_prompt_tokens_total{source="reused"}'

    def reused() -> float:
        lines = http.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = reused()
    blend = chat(http, "What is counted?", [text]).json()["blend"]
    assert reused() - before == blend["reused_tokens"] > 0
    assert server.metric("blend_store_bytes") > 0
    assert server.metric("blend_store_leases") == 0
    assert server.metric("vllm:prompt_tokens_total") > 0


def test_vllms_own_metrics_show_what_the_connector_did(http: httpx.Client, server: Server) -> None:
    """Under its interface for connectors, so also without the gateway."""
    text = document("connected")
    name = 'vllm:blend_prompt_tokens_total{engine="0",model_name='

    def reused() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(name) and "reused" in line
        )

    stored = server.metric("vllm:blend_store_events_total")
    register(http, text=text)
    assert server.metric("vllm:blend_store_events_total") == stored + 1
    before = reused()
    blend = chat(http, "What is connected?", [text]).json()["blend"]
    assert reused() - before == blend["reused_tokens"] > 0
    assert server.metric("vllm:blend_store_bytes") == server.metric("blend_store_bytes") > 0
    assert server.metric("blend_model_supported") == 1


def test_no_metric_says_who_asked_or_what(http: httpx.Client) -> None:
    """Neither a client's texts and names nor a document's id become labels."""
    marked = {"id": "labelmark-id", "title": "labelmark-title", "text": document("labelmark")}
    registered = register(http, text=document("labelmark-registered"))
    headers = {"x-request-id": "labelmark-request", "x-tenant": "labelmark-tenant"}
    body = {
        "messages": [{"role": "user", "name": "labelmark-name", "content": "labelmark?"}],
        "documents": [marked, {"document_id": registered["id"]}],
        "user": "labelmark-user",
        "max_tokens": 2,
    }
    assert http.post(CHAT, json=body, headers=headers).status_code == 200
    assert http.get("/labelmark-path").status_code == 404
    exposed = http.get("/metrics").text
    assert "blend_request_documents_total" in exposed
    assert "labelmark" not in exposed
    assert registered["id"] not in exposed


def test_a_request_leaves_one_line_with_plan_and_outcome(
    http: httpx.Client, server: Server
) -> None:
    """At debug; the id is the response's."""
    text = document("logged")
    register(http, text=text)
    body = chat(http, "What is logged?", [text], blend={"recompute_ratio": 0.2}).json()
    lines = [line for line in server.log.read_text().splitlines() if body["id"] in line]
    told = [line for line in lines if "policy=sinks ratio=0.2" in line]
    assert len(told) == 1
    assert told[0].startswith("DEBUG")
    assert f"reused={body['blend']['reused_tokens']} " in told[0]
    assert "statuses=" in told[0]
    assert "What is logged?" not in told[0]
