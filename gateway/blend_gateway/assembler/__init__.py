"""Chat requests to token ids and segments. Neither torch nor vLLM is needed here."""

from blend_gateway.assembler.assembler import Assembler
from blend_gateway.assembler.documents import (
    Document,
    Resolver,
    parse_document,
    parse_documents,
)
from blend_gateway.assembler.errors import (
    AssemblyError,
    DocumentError,
    MessageError,
    TemplateError,
)
from blend_gateway.assembler.prompt import AssembledPrompt, PlacedSegment

__all__ = [
    "AssembledPrompt",
    "Assembler",
    "AssemblyError",
    "Document",
    "DocumentError",
    "MessageError",
    "PlacedSegment",
    "Resolver",
    "TemplateError",
    "parse_document",
    "parse_documents",
]
