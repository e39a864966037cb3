"""What a segment is compiled behind, and the prompt that compiles it.

A document that is compiled alone has nothing to attend to and behaves unlike the same document in a
prompt. Behind a constant ballast of unrelated text it behaves as it does in a prompt; the ballast's
own KV is dropped (docs/decisions/0002). Its text is part of `WRAPPER_VERSION`: change one, change
both.
"""

from collections.abc import Sequence
from typing import Any

from blend_engine.segments import SegmentContext, SegmentSpan

BALLAST_TOKENS = 256
"""Between 128 and 512 tokens recovered most on 14 MuSiQue prompts; 64 recovered nothing."""

SEPARATOR_TEXT = "\n\n"
"""A blank line; its encoding stands between header, document and what follows."""

_BALLAST_TEXT = (
    "The harbour of Bergen grew around a natural inlet sheltered from the North Sea. Merchants "
    "dried cod on wooden racks and exchanged it for grain that ships carried from the Baltic. "
    "The narrow wharf houses burned down several times, and each time they were rebuilt on the "
    "same plots.\n\n"
    "Glaciers move because ice deforms under its own weight. Near the surface it stays brittle "
    "and cracks into crevasses, while deeper layers flow slowly, like a very stiff liquid. A "
    "valley that a glacier has left behind is wide and flat, with steep walls.\n\n"
    "A pendulum clock keeps time by counting swings of equal length. Heat lengthens the rod and"
    " slows the clock, so makers combined metals that expand at different rates. In 1761 a "
    "marine chronometer crossed the Atlantic and lost five seconds in eighty-one days.\n\n"
    "Honeybees tell one another where flowers stand by dancing on the comb. The angle of the "
    "dance against the vertical gives the direction relative to the sun, and its duration the "
    "distance. Other workers follow the dancer closely in the dark before they leave the hive.\n\n"
    "The printing workshop of Christophe Plantin in Antwerp employed more than fifty people. "
    "Compositors set type in six languages, correctors read the proofs aloud, and pressmen "
    "pulled about twelve hundred sheets in a day. The account books of the house survive almost"
    " complete.\n\n"
    "Salt was taxed in many countries because everybody needed it and few places produced it. "
    "In some regions of France households had to buy a fixed amount each year, whether they "
    "used it or not. Smugglers carried it across the borders of provinces at night, and "
    "officers searched their bread."
)


def ballast_ids(tokenizer: Any) -> list[int]:
    """BOS where the model gets one, `BALLAST_TOKENS` of unrelated text, a separator.

    Args:
        tokenizer: The model's Hugging Face tokenizer.
    """
    text_ids = tokenizer.encode(_BALLAST_TEXT, add_special_tokens=False)[:BALLAST_TOKENS]
    separator = tokenizer.encode(SEPARATOR_TEXT, add_special_tokens=False)
    return [*bos_ids(tokenizer), *text_ids, *separator]


def bos_ids(tokenizer: Any) -> list[int]:
    """The one BOS that the tokenizer puts before a text, or nothing."""
    bos = tokenizer.bos_token_id
    with_special = tokenizer("a")["input_ids"]
    return [bos] if bos is not None and with_special[:1] == [bos] else []


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
