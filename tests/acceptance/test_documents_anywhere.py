"""A document's KV is reused wherever the document stands: after the question, reordered, repeated.

The first report: system, question 1, then a document of 2,300 tokens; turn 2 asks a longer question
2. Other systems reused the 24 tokens of the common prefix.
"""

import pytest
from tests.acceptance.chats import await_compiled, chat, document_part, no_lease_is_left, user
from tests.acceptance.texts import (
    DOCUMENTS,
    FIRST_QUESTION,
    LONG_DOCUMENT,
    SECOND_QUESTION,
    SYSTEM,
)
from tests.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
LEADING = {"role": "system", "content": SYSTEM}


def test_a_document_after_a_longer_question_is_reused(server: Server) -> None:
    """Turn 2: at least 90% of the prompt is found, 75% reused as it is, and the document a hit."""
    part = document_part(LONG_DOCUMENT, id="long")
    first = chat(server, [LEADING, user(FIRST_QUESTION, part)])
    assert first.blend is not None
    assert first.statuses[0] in ("miss", "compiling")
    await_compiled(server)
    loaded = server.metric("blend_loaded_tokens_total")
    second = chat(server, [LEADING, user(SECOND_QUESTION, part)])
    assert second.blend is not None
    assert second.statuses == ["hit"]
    assert second.blend["documents"][0]["id"] == "long"
    assert second.blend["documents"][0]["tokens"] > 2200
    assert second.share("prefix", "reused", "recomputed") >= 0.90
    assert second.share("reused") >= 0.75
    assert server.metric("blend_loaded_tokens_total") - loaded > 2200
    assert no_lease_is_left(server)


def test_other_order_new_between_and_twice(server: Server) -> None:
    """Top-level documents in another order; a new one between two known; one of them twice."""
    a, b, c, d = ({"id": name, "text": text} for name, text in DOCUMENTS.items())
    question = [LEADING, user(FIRST_QUESTION)]
    chat(server, question, documents=[a, b, c])
    await_compiled(server)
    reordered = chat(server, question, documents=[c, a, b])
    assert reordered.statuses == ["hit", "hit", "hit"]
    assert reordered.share("prefix", "reused", "recomputed") >= 0.90
    between = chat(server, question, documents=[b, d, a])
    assert between.statuses[0] == between.statuses[2] == "hit"
    assert between.statuses[1] in ("miss", "compiling")
    assert between.blend is not None
    assert between.blend["fallback_reason"] == "miss"
    twice = chat(server, [LEADING, user(SECOND_QUESTION)], documents=[c, a, c])
    assert twice.statuses == ["hit", "hit", "hit"]
    await_compiled(server)
    assert chat(server, question, documents=[d]).statuses == ["hit"]
    assert no_lease_is_left(server)


def test_a_document_warmed_before_any_chat_is_hit_at_once(server: Server) -> None:
    """`POST /v1/documents?wait` makes the KV; by reference and by text alike it is a hit."""
    text = DOCUMENTS["a"] + " Nobody has asked about this yet."
    with server.client() as client:
        made = client.post("/v1/documents?wait=240", json={"text": text, "title": "Register"})
    assert made.status_code == 200, made.text
    assert made.json()["status"] == "ready"
    reference = {"document_id": made.json()["id"]}
    by_reference = chat(server, [user("Who is named?")], documents=[reference])
    by_text = chat(server, [user("Who is named here?")], documents=[text])
    assert by_reference.statuses == by_text.statuses == ["hit"]
    assert no_lease_is_left(server)
