"""What a `free` segment is compiled behind, and the prompt that compiles a segment.

A document compiled with something to attend to behaves as it does in a prompt; the ballast is that
something. Its text is a constant of `blend_engine.segments.WRAPPER_VERSION`: KV compiled behind
another text is other KV.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blend_engine.segments import SegmentContext, SegmentSpan

BALLAST_TOKENS = 256
"""Where 64 and 128 recovered less and 768 nothing (01-architecture, section 1; SmolLM2)."""

BALLAST_TEXT = (
    "The common kingfisher lives along slow rivers and lakes across Europe, Asia and North Africa. "
    "It waits on a low branch above clear water, then dives for minnows, sticklebacks and small "
    "shrimp. Both parents dig a tunnel into a sandy bank and raise six or seven chicks at its far "
    "end.\n"
    "Paper was made in China by the second century from mulberry bark, hemp and old rags. Sheets "
    "were lifted from a vat on a fine screen, pressed, and dried on heated walls. The craft moved "
    "west along the trade roads and reached Spain about a thousand years later, where water mills "
    "drove the hammers that beat the fibre.\n"
    "A suspension bridge carries its deck on cables that hang between towers. The cables pull on "
    "heavy anchor blocks at both ends, while the towers carry the load straight down to bedrock. "
    "Engineers stiffen the deck with trusses because a light roadway may twist in steady wind. "
    "The longest span today measures just over two kilometres.\n"
    "Olive trees tolerate drought and poor soil but suffer in hard frost. Farmers prune them in "
    "late winter and gather the fruit from October to January; green olives are picked early and "
    "black ones late. About five kilograms of fruit give one litre of oil. Some living trees in "
    "Crete are thought to be more than two thousand years old.\n"
    "In 1843 the mathematician Ada Lovelace published notes on the Analytical Engine, a machine "
    "that was designed but never finished. She described how it could compute a series of numbers "
    "step by step, and remarked that it might act upon things other than quantity, such as notes "
    "of music.\n"
    "Glaciers form where more snow falls in winter than melts in summer. Layer upon layer is "
    "pressed into firn and then into blue ice, which creeps downhill under its own weight. As it "
    "moves, it carries stones that scratch the valley floor. When the climate warms, the ice "
    "retreats and leaves behind lakes, ridges of gravel and smooth, rounded hills.\n"
    "A string quartet has two violins, one viola and one cello. Joseph Haydn wrote sixty-eight "
    "works for this group and gave each player a voice of equal weight. Chamber music was first "
    "played in private rooms, and only later did it move to public halls with several hundred "
    "seats.\n"
)


@dataclass(frozen=True, slots=True)
class Ballast:
    """The token ids that stand before a `free` segment while it is compiled.

    Args:
        token_ids: Beginning-of-sequence token if prompts begin with one, text, separator.
    """

    token_ids: tuple[int, ...]

    @classmethod
    def build(
        cls,
        encode: Callable[[str], Sequence[int]],
        separator_ids: Sequence[int],
        bos_ids: Sequence[int] = (),
    ) -> "Ballast":
        """Make the ballast for one tokenizer.

        Args:
            encode: Encodes plain text, without special tokens.
            separator_ids: What stands before a document in a prompt.
            bos_ids: What every prompt of the model begins with: one token, or none.
        """
        text_ids = list(encode(BALLAST_TEXT))[:BALLAST_TOKENS]
        return cls((*bos_ids, *text_ids, *separator_ids))

    def compile_prompt(
        self, context: SegmentContext, token_ids: Sequence[int]
    ) -> tuple[list[int], SegmentSpan]:
        """The prompt whose prefill makes a segment's canonical KV, and the segment's place in it.

        The engine computes a prompt's last token itself, so one throwaway token ends it.

        Args:
            context: What the segment is to be compiled behind.
            token_ids: The segment's own ids; at least one.
        """
        before = self.token_ids if context is SegmentContext.FREE else ()
        prompt = [*before, *token_ids, token_ids[-1]]
        return prompt, SegmentSpan(start=len(before), end=len(prompt) - 1, context=context)
