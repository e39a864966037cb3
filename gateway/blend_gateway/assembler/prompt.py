"""From a rendering with stand-ins to token ids and the spans of segments in them.

The layout is part of `blend_engine.segments.WRAPPER_VERSION`: a document is
``SEP header SEP segment SEP``; two documents side by side share the separator between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blend_engine.preamble import SEPARATOR_TEXT, document_header
from blend_engine.segments import SegmentContext, SegmentSpan
from blend_gateway.assembler.documents import Document
from blend_gateway.assembler.encoding import TextEncoders
from blend_gateway.assembler.veil import DocumentMark, Leaf, Veil


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSegment:
    """A segment and where it stands: the half-open token range ``[start, end)``.

    Args:
        start: First token.
        end: One past the last token.
        context: `SegmentContext.PREFIX` for the leading segment, `FREE` for a document.
        document_index: Index into `AssembledPrompt.documents`; None for the leading segment.
    """

    start: int
    end: int
    context: SegmentContext
    document_index: int | None = None

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start

    def to_span(self) -> SegmentSpan:
        """As the engine takes it."""
        return SegmentSpan(start=self.start, end=self.end, context=self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledPrompt:
    """A chat request as token ids, with its segments.

    Args:
        token_ids: The whole prompt.
        segments: The leading segment, if there is one, then the documents; sorted and disjoint.
        documents: The documents, resolved, in the order in which they stand in the prompt.
    """

    token_ids: list[int]
    segments: tuple[PlacedSegment, ...]
    documents: tuple[Document, ...]

    @property
    def leading(self) -> PlacedSegment | None:
        """The segment that opens the prompt, or None."""
        if self.segments and self.segments[0].context is SegmentContext.PREFIX:
            return self.segments[0]
        return None

    @property
    def document_segments(self) -> tuple[PlacedSegment, ...]:
        """The documents' segments; the n-th belongs to ``documents[n]``."""
        return tuple(segment for segment in self.segments if segment.document_index is not None)

    def spans(self) -> tuple[SegmentSpan, ...]:
        """All segments, for `blend_engine.protocol.BlendParams`."""
        return tuple(segment.to_span() for segment in self.segments)

    def segment_ids(self, segment: PlacedSegment) -> list[int]:
        """A segment's own token ids."""
        return self.token_ids[segment.start : segment.end]


class PromptWriter:
    """Writes one prompt. Text between two control tokens is one run, encoded as a whole.

    So the ids are those of the model's own tokenizer wherever no document cuts a run. A cut run's
    pieces are encoded by themselves, so that a document's ids never depend on its neighbours.

    Args:
        encoders: The tokenizer's copies.
        encode_document: Gives a document's ids.
    """

    def __init__(self, encoders: TextEncoders, encode_document: Callable[[str], list[int]]) -> None:
        self._encoders = encoders
        self._encode_document = encode_document
        self._separator = encoders.encode(SEPARATOR_TEXT)
        self._ids: list[int] = []
        self._run: list[str] = []
        self._is_first_run = True
        self._is_cut = False
        self._ends_with_separator = False
        self._last_control_end = 0
        self._leading_end: int | None = None
        self._documents: list[Document] = []
        self._segments: list[PlacedSegment] = []

    def write_text(self, text: str) -> None:
        """Continue the run."""
        self._run.append(text)

    def write_control(self, token_id: int) -> None:
        """End the run with a control token."""
        self._flush()
        self._ids.append(token_id)
        self._last_control_end = len(self._ids)
        self._is_first_run = self._is_cut = self._ends_with_separator = False

    def write_document(self, document: Document) -> None:
        """Cut the run and place a document."""
        assert document.text is not None, "documents are resolved when they are read"
        self.close_leading()
        self._flush()
        self._is_cut = True
        number = len(self._documents)
        self._documents.append(document)
        if not self._ends_with_separator:
            self._ids += self._separator
        self._ids += self._encoders.encode(document_header(number + 1, document.title))
        self._ids += self._separator
        start = len(self._ids)
        self._ids += self._encode_document(document.text)
        self._segments.append(
            PlacedSegment(
                start=start,
                end=len(self._ids),
                context=SegmentContext.FREE,
                document_index=number,
            )
        )
        self._ids += self._separator
        self._ends_with_separator = True

    def close_leading(self) -> None:
        """End the leading segment at the last control token, where no later text can change it."""
        if self._leading_end is None:
            self._leading_end = self._last_control_end

    def finish(self) -> AssembledPrompt:
        """The prompt written so far."""
        self._flush()
        self.close_leading()
        segments = tuple(self._segments)
        if self._leading_end:
            leading = PlacedSegment(start=0, end=self._leading_end, context=SegmentContext.PREFIX)
            segments = (leading, *segments)
        return AssembledPrompt(
            token_ids=self._ids, segments=segments, documents=tuple(self._documents)
        )

    def _flush(self) -> None:
        text = "".join(self._run)
        self._run.clear()
        if not text:
            return
        if self._is_cut:
            self._ids += self._encoders.encode(text)
        else:
            self._ids += self._encoders.encode_run(text, is_first=self._is_first_run)
        self._ends_with_separator = False


def write_prompt(
    writer: PromptWriter,
    rendered: str,
    controls: Sequence[tuple[int, int, int]],
    stand_ins: Sequence[Leaf | DocumentMark],
    veil: Veil,
) -> AssembledPrompt:
    """Write a rendering, its control tokens and what its stand-ins stand for.

    Args:
        writer: A fresh one.
        rendered: The template's output, stand-ins included.
        controls: ``(start, end, token id)`` of control tokens in it.
        stand_ins: Places of stand-ins in it.
        veil: What they stand for.
    """
    items: list[tuple[int, int, int | Leaf | DocumentMark]] = [*controls]
    items += [(item.start, item.end, item) for item in stand_ins]
    position = 0
    for start, end, item in sorted(items, key=lambda placed: placed[0]):
        writer.write_text(rendered[position:start])
        position = end
        if isinstance(item, int):
            writer.write_control(item)
        elif isinstance(item, DocumentMark):
            writer.write_document(veil.documents[item.index])
        else:
            if item.index not in veil.leading:
                writer.close_leading()
            writer.write_text(item.form(veil.texts[item.index]))
    writer.write_text(rendered[position:])
    return writer.finish()
