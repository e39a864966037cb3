"""Chats as clients send them, and what their answers say of reuse."""

from dataclasses import dataclass
from typing import Any

from tests.serving import Server

DocumentPart = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """One answer."""

    text: str
    usage: dict[str, Any]
    blend: dict[str, Any] | None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.usage["prompt_tokens"])

    @property
    def statuses(self) -> list[str]:
        """Of the documents, in order."""
        assert self.blend is not None
        return [document["status"] for document in self.blend["documents"]]

    def share(self, *names: str) -> float:
        """Part of the prompt that these counts make up."""
        assert self.blend is not None
        return float(sum(self.blend[f"{name}_tokens"] for name in names)) / self.prompt_tokens

    def check_arithmetic(self) -> None:
        """Every prompt token is counted once, and cached means not computed."""
        assert self.blend is not None
        names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
        counts = {name: self.blend[name] for name in names}
        assert sum(counts.values()) == self.prompt_tokens, counts
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == counts["prefix_tokens"] + counts["reused_tokens"]


def chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> Reply:
    """A greedy chat."""
    with server.client() as client:
        response = client.post(
            "/v1/chat/completions",
            json={"messages": messages, "temperature": 0, "max_tokens": 16, **fields},
        )
    assert response.status_code == 200, response.text
    body = response.json()
    reply = Reply(body["choices"][0]["message"]["content"], body["usage"], body.get("blend"))
    if reply.blend is not None:
        reply.check_arithmetic()
    return reply


def user(*parts: str | DocumentPart) -> dict[str, Any]:
    """A user message of text and document parts."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
        ],
    }


def document_part(text: str, **fields: str) -> DocumentPart:
    """A document where it stands in a message."""
    return {"type": "document", "document": {"text": text, **fields}}


def await_compiled(server: Server) -> None:
    """Wait until no compile is queued or running."""
    server.await_metric("blend_warm_queue_depth", 0)


def no_lease_is_left(server: Server) -> bool:
    """Whether every lease was given back."""
    return server.metric("blend_store_leases") == 0
