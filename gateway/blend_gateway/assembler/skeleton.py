"""Render a template around hidden strings, and make sure that it did nothing else with them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from blend_gateway.assembler.errors import TemplateError
from blend_gateway.assembler.template import ChatTemplate, ChatTokenizer, TemplateArguments
from blend_gateway.assembler.veil import DocumentMark, Leaf, Veil


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A rendering with stand-ins and where they stand in it.

    Args:
        rendered: The template's output.
        stand_ins: In order; empty where the template cannot be followed.
        unfollowed: None if the template was followed; else what it makes of the texts themselves,
            made inert, or an empty string where it rejects them.
    """

    rendered: str
    stand_ins: list[Leaf | DocumentMark]
    unfollowed: str | None = None


def render_skeleton(
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    veil: Veil,
    messages: list[dict[str, Any]],
    arguments: TemplateArguments,
    *,
    variants: Iterable[list[dict[str, Any]]],
) -> Skeleton:
    """Render hidden messages and check them against the texts they hide.

    The check renders the texts themselves, with control tokens and the template's own markup in
    them made inert: the two must be the same string once the stand-ins are filled. So a template
    that trims or dumps its input is followed exactly, and one that rewrites it is noticed.

    Args:
        template: The template.
        tokenizer: Renders it.
        veil: What the stand-ins stand for.
        messages: The messages, hidden.
        arguments: What else the template gets, hidden.
        variants: Ways to give the messages to the template; the first that passes is taken.

    Returns:
        The skeleton, followed or not.

    Raises:
        TemplateError: The template rejects the messages, or leaves out or repeats a document.
    """
    inert = veil.inert_texts(template.special)
    wanted = _render_filled(template, tokenizer, veil, messages, arguments, inert)
    for variant in variants:
        rendered = template.render(tokenizer, variant, arguments)
        stand_ins = veil.find(rendered)
        if stand_ins is not None and veil.fill(rendered, inert) == wanted:
            _check_documents(veil, stand_ins)
            return Skeleton(rendered, stand_ins)
    return Skeleton(template.render(tokenizer, messages, arguments), [], wanted or "")


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
