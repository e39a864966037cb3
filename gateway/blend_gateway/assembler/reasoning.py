"""Reasoning inside the assistant's earlier messages: ``<think>...</think>answer``.

Templates of reasoning models look for the closing tag in assistant messages and drop or rewrite
what stands before it. The split is made here as they make it, so the tags are never the caller's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OPENING, CLOSING = "<think>", "</think>"

_TRIMS = ("\n", "", None)
"""What templates trim from the two parts, as arguments of `str.strip`; found out by trying."""


def holds_reasoning(messages: Any) -> bool:
    """Whether an assistant message may hold reasoning in its text."""
    return isinstance(messages, Sequence) and any(
        isinstance(message, Mapping)
        and message.get("role") == "assistant"
        and CLOSING in str(message.get("content"))
        for message in messages
    )


def split_reasoning(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages with reasoning moved to its own field, once for each way of trimming.

    Nothing is yielded where a tag would be left that a template could take for its own.

    Args:
        messages: Read with their tags in place and everything around them hidden.
    """
    for trim in _TRIMS:
        variant = [
            _split(message, trim) if message["role"] == "assistant" else message
            for message in messages
        ]
        if not any(_is_tagged(message) for message in variant if message["role"] == "assistant"):
            yield variant


def _split(message: dict[str, Any], trim: str | None) -> dict[str, Any]:
    content = message["content"]
    is_listed = isinstance(content, list)
    text = content[0]["text"] if is_listed and len(content) == 1 else content
    if "reasoning" in message or not isinstance(text, str) or CLOSING not in text:
        return message
    parts = text.split(CLOSING)
    reasoning = parts[0].split(OPENING)[-1].strip(trim)
    answer = parts[-1].lstrip(trim)
    return {
        **message,
        "content": [{"type": "text", "text": answer}] if is_listed else answer,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }


def _is_tagged(message: dict[str, Any]) -> bool:
    shown = str(message["content"]) + str(message.get("reasoning"))
    return OPENING in shown or CLOSING in shown
