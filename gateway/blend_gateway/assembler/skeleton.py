"""Render a template around hidden strings, and make sure that it did nothing else with them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from blend_gateway.assembler.errors import TemplateError
from blend_gateway.assembler.template import ChatTemplate, ChatTokenizer, TemplateArguments
from blend_gateway.assembler.veil import DocumentMark, Leaf, Veil, longest_first


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A rendering with stand-ins and where they stand in it."""

    rendered: str
    stand_ins: list[Leaf | DocumentMark]


def render_skeleton(
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    veil: Veil,
    messages: list[dict[str, Any]],
    arguments: TemplateArguments,
    control_tokens: Iterable[str],
) -> Skeleton | None:
    """Render hidden messages and check them against the texts they hide.

    The check renders the texts themselves, with control tokens and the template's own markup in
    them made inert: the two must be the same string once the stand-ins are filled. So a template
    that trims or dumps its input is followed exactly, and one that rewrites it is noticed.

    Returns:
        The skeleton. None if the template cannot be followed, there are no documents, and no text
        holds anything to make inert.

    Raises:
        TemplateError: The template rejects the messages, leaves out or repeats a document, or cannot
            be followed where following it matters.
    """
    rendered = template.render(tokenizer, messages, arguments)
    stand_ins = veil.find(rendered)
    special = longest_first([*control_tokens, *template.landmarks])
    inert = [special.sub(lambda match: "x" * len(match.group()), text) for text in veil.texts]
    if stand_ins is not None and veil.fill(rendered, inert) == _render_filled(
        template, tokenizer, veil, messages, arguments, inert
    ):
        _check_documents(veil, stand_ins)
        return Skeleton(rendered, stand_ins)
    if veil.documents or inert != veil.texts:
        raise TemplateError(
            "the model's chat template rewrites the text of messages, so documents and text that"
            " spells control tokens cannot be placed safely",
            "chat_template_unsupported",
        )
    return None


def _render_filled(
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    veil: Veil,
    messages: list[dict[str, Any]],
    arguments: TemplateArguments,
    texts: list[str],
) -> str | None:
    filled = replace(
        arguments,
        tools=veil.fill_tree(arguments.tools, texts),
        extra=veil.fill_tree(arguments.extra, texts),
    )
    try:
        return template.render(tokenizer, veil.fill_tree(messages, texts), filled)
    except TemplateError:
        return None


def _check_documents(veil: Veil, stand_ins: list[Leaf | DocumentMark]) -> None:
    placed = sorted(item.index for item in stand_ins if isinstance(item, DocumentMark))
    if placed != list(range(len(veil.documents))):
        raise TemplateError(
            "the model's chat template leaves out or repeats a message that holds a document",
            "chat_template_unsupported",
        )
