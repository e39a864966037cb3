"""What a segment is compiled behind, and the prompt that compiles it.

A document that is compiled alone has nothing to attend to and behaves unlike the same document in a
prompt. Behind a constant ballast of unrelated text it behaves as it does in a prompt; the ballast's
own KV is dropped (docs/decisions/0002). Its text is part of `WRAPPER_VERSION`: change one, change
both.
"""

from collections.abc import Sequence
from typing import Any

from blend_engine.segments import SegmentContext, SegmentSpan

SEPARATOR_TEXT = "\n\n"
"""A blank line; its encoding stands between header, document and what follows."""

_SYSTEM = "You are a helpful assistant."
_MARK = "BALLAST"

BALLAST = (
    "The harbour of Bergen grew around a natural inlet sheltered from the North Sea. "
    "Merchants dried cod on wooden racks and exchanged it for grain that ships carried from "
    "the Baltic. The narrow wharf houses burned down several times, and each time they were "
    "rebuilt on the same plots.",
    "Glaciers move because ice deforms under its own weight. Near the surface it stays "
    "brittle and cracks into crevasses, while deeper layers flow slowly, like a very stiff "
    "liquid. A valley that a glacier has left behind is wide and flat, with steep walls.",
    "A pendulum clock keeps time by counting swings of equal length. Heat lengthens the rod "
    "and slows the clock, so makers combined metals that expand at different rates. In 1761 a"
    " marine chronometer crossed the Atlantic and lost five seconds in eighty-one days.",
    "Honeybees tell one another where flowers stand by dancing on the comb. The angle of the "
    "dance against the vertical gives the direction relative to the sun, and its duration the"
    " distance. Other workers follow the dancer closely in the dark before they leave the "
    "hive.",
)


def document_header(number: int, title: str | None = None) -> str:
    """What announces a document: its 1-based place in the prompt and its title on one line.

    The assembler writes it before every document, and a compile before the one it compiles.
    """
    title = " ".join((title or "").split())
    return f"Document [{number}]: {title}" if title else f"Document [{number}]"


def ballast_ids(tokenizer: Any) -> list[int]:
    """A chat that has come to its next document: the template's opening, ballast, a header.

    Laid out as the assembler lays out a prompt, since a document compiled behind running text alone
    behaves less like one in a prompt. About 280 tokens.

    Args:
        tokenizer: The model's Hugging Face tokenizer.
    """
    separator = _encode(tokenizer, SEPARATOR_TEXT)
    ids = [*opening_ids(tokenizer), *separator]
    for number, paragraph in enumerate(BALLAST, 1):
        ids += [*_encode(tokenizer, document_header(number)), *separator]
        ids += [*_encode(tokenizer, paragraph), *separator]
    return [*ids, *_encode(tokenizer, document_header(len(BALLAST) + 1)), *separator]


def _bos_ids(tokenizer: Any) -> list[int]:
    """The one BOS that the tokenizer puts before a text, or nothing."""
    bos = tokenizer.bos_token_id
    with_special = tokenizer("a")["input_ids"]
    return [bos] if bos is not None and with_special[:1] == [bos] else []


def opening_ids(tokenizer: Any) -> list[int]:
    """What the chat template writes before the first words of a user; BOS without a template."""
    if not tokenizer.chat_template:
        return _bos_ids(tokenizer)
    user = {"role": "user", "content": _MARK}
    for messages in ([{"role": "system", "content": _SYSTEM}, user], [user]):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # noqa: BLE001 - templates raise what they like; some know no system
            continue
        opening, mark, _ = text.partition(_MARK)
        if mark:
            return _encode(tokenizer, opening)
    return _bos_ids(tokenizer)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def compile_prompt(
    tokenizer: Any, context: SegmentContext, token_ids: Sequence[int]
) -> tuple[list[int], SegmentSpan]:
    """The prompt that compiles a segment.

    vLLM computes a prompt's last token itself, to sample from it, so the prompt ends with one
    throwaway token and the pass covers everything before it.

    Args:
        tokenizer: The model's Hugging Face tokenizer.
        context: What to compile behind.
        token_ids: The segment's ids; at least one.

    Returns:
        Prompt ids, and the segment's span among them.

    Raises:
        ValueError: The segment is empty.
    """
    if not token_ids:
        raise ValueError("a segment to compile needs at least one token")
    preamble = ballast_ids(tokenizer) if context is SegmentContext.FREE else []
    start, end = len(preamble), len(preamble) + len(token_ids)
    return (
        [*preamble, *token_ids, token_ids[-1]],
        SegmentSpan(start=start, end=end, context=context),
    )
