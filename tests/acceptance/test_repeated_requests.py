"""The second report: a repeated request must not turn into one token, repeated.

A bilingual request is sent twice, greedily. Its second answer comes from stored KV, which a counter
proves; the prompt is shorter than a block of 128, and longer than one of 32.
"""

from typing import Any

import pytest
from tests.acceptance.chats import Reply, await_compiled, chat, document_part, user
from tests.acceptance.texts import BILINGUAL_QUESTION, BILINGUAL_SYSTEM, BILINGUAL_TEXT, PASSAGES
from tests.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
LEADING = {"role": "system", "content": BILINGUAL_SYSTEM}


def _twice(
    server: Server, message: dict[str, Any], *, loads: bool, **fields: Any
) -> tuple[Reply, Reply]:
    first = chat(server, [LEADING, message], max_tokens=50, **fields)
    await_compiled(server)
    loaded = server.metric("blend_loaded_tokens_total")
    second = chat(server, [LEADING, message], max_tokens=50, **fields)
    if loads:
        assert server.metric("blend_loaded_tokens_total") > loaded, "the store was not used"
    return first, second


def test_exact_reuse_gives_the_identical_answer(server: Server, prefix_caching: bool) -> None:
    """Passages as plain text: the leading segment is loaded, exactly, and nothing changes."""
    message = {"role": "user", "content": BILINGUAL_TEXT}
    first, second = _twice(server, message, loads=not prefix_caching)
    assert second.text == first.text
    if not prefix_caching:
        assert second.usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_full_recompute_of_passages_gives_the_identical_answer(server: Server) -> None:
    """Passages as documents at ratio 1.0: loaded, recomputed, equal."""
    message = user("你好", *(document_part(text) for text in PASSAGES), BILINGUAL_QUESTION)
    everything = {"policy": "sinks", "recompute_ratio": 1.0}
    off = chat(server, [LEADING, message], max_tokens=50, blend={"mode": "off"})
    _, second = _twice(server, message, loads=True, blend=everything)
    assert second.text == off.text


@pytest.mark.parametrize("policy", ["none", "sinks", "hkvd"])
def test_blended_reuse_gives_sensible_text(server: Server, policy: str) -> None:
    """Passages as documents: every one a hit, and the answer is not one token repeated."""
    message = user("你好", *(document_part(text) for text in PASSAGES), BILINGUAL_QUESTION)
    _, second = _twice(server, message, loads=False, blend={"policy": policy})
    assert second.statuses == ["hit", "hit", "hit"]
    assert len(set(second.text)) > 5, second.text
    words = second.text.split()
    assert len(words) < 3 or len(set(words)) > 1, second.text
