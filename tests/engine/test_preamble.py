"""The prompt that compiles a segment, under a tokenizer that puts BOS before every text."""

import pytest

from blend_engine.preamble import compile_prompt
from blend_engine.segments import SegmentContext

BOS = 1


class BosTokenizer:
    """One id per character; BOS in front unless told otherwise."""

    bos_token_id = BOS
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [ord(character) + 2 for character in text]

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}


@pytest.mark.parametrize(("context", "places"), [("free", [0]), ("prefix", [])])
def test_beginning_of_sequence_stands_first_or_nowhere(context: str, places: list[int]) -> None:
    """Pieces are encoded without it and are never cut by a token, whether it was there or not."""
    segment = [50, 51, 52]
    ids, span = compile_prompt(BosTokenizer(), SegmentContext(context), segment)
    assert [place for place, token in enumerate(ids) if token == BOS] == places
    assert ids[span.start : span.end] == segment
    assert span.end == len(ids) - 1, "one more token, for vLLM to sample from"
