"""What clients ask of the server, and what every answer must satisfy."""

from typing import Any

import httpx

CHAT = "/v1/chat/completions"


def chat(http: httpx.Client, question: str, documents: list[Any], **more: Any) -> httpx.Response:
    """A greedy answer of a few tokens to a question about documents."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "documents": documents,
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }
    return http.post(CHAT, json=body)


def register(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """Register a document and wait until it is stored."""
    answer = http.post("/v1/documents?wait=120", json=fields)
    assert answer.status_code == 200
    shown: dict[str, Any] = answer.json()
    assert shown["status"] == "ready", shown
    return shown


def assert_adds_up(body: dict[str, Any]) -> None:
    """Usage and the blend report count the same tokens, each once."""
    blend, usage = body["blend"], body["usage"]
    names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(blend[name] for name in names) == usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == blend["prefix_tokens"] + blend["reused_tokens"]
    assert blend["exact"] is not blend["approximate"]
