"""The third report: KV that comes back from a store must be the KV that was computed.

A leading segment of about 3,650 tokens is compiled, then used; greedy text is identical to full
compute.
"""

import pytest
from tests.acceptance.chats import await_compiled, chat
from tests.acceptance.texts import DOSSIER
from tests.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MESSAGES = [
    {"role": "system", "content": DOSSIER},
    {"role": "user", "content": "Summarize the passage in one sentence."},
]


def test_a_loaded_leading_segment_answers_like_full_compute(
    server: Server, prefix_caching: bool
) -> None:
    """The second request loads the segment where vLLM has no blocks of it; the text is the same."""
    first = chat(server, MESSAGES, max_tokens=32)
    await_compiled(server)
    loaded = server.metric("blend_loaded_tokens_total")
    second = chat(server, MESSAGES, max_tokens=32)
    assert second.text == first.text
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 3500
    if not prefix_caching:
        assert server.metric("blend_loaded_tokens_total") - loaded > 3500
