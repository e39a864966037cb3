"""The assembler: a chat request in, token ids and segments out. Built once, then pure."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from blend_engine.preamble import SEPARATOR_TEXT
from blend_gateway.assembler.cache import TokenCache
from blend_gateway.assembler.documents import Document, Resolver
from blend_gateway.assembler.encoding import TextEncoders
from blend_gateway.assembler.errors import TemplateError
from blend_gateway.assembler.messages import ContentFormat, Conversation
from blend_gateway.assembler.prompt import (
    AssembledPrompt,
    PromptWriter,
    write_prompt,
)
from blend_gateway.assembler.reasoning import CLOSING, holds_reasoning, split_reasoning
from blend_gateway.assembler.skeleton import Skeleton, render_skeleton
from blend_gateway.assembler.template import ChatTemplate, ChatTokenizer, TemplateArguments
from blend_gateway.assembler.veil import Veil


class Assembler:
    """Turns chat requests into prompts whose documents are segments of their own.

    Thread-safe: nothing is changed after construction but a locked cache.

    Args:
        tokenizer: A Hugging Face fast tokenizer. Only read.
        chat_template: Jinja source, or the name of one of the tokenizer's templates; None for its
            own.
        content_format: How the template takes content, if the caller knows; None to try it out.

    Raises:
        TemplateError: The tokenizer has no Rust backend to copy.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        chat_template: str | None = None,
        content_format: ContentFormat | None = None,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                "documents need a fast tokenizer (tokenizer.json); this model has none",
                "tokenizer_unsupported",
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._content_format = content_format
        self._encoders = TextEncoders(backend)
        self._documents = TokenCache(self._encoders.encode)
        self._markup = frozenset(
            character
            for content in self._encoders.control_tokens
            for character in content
            if not (character.isalnum() or character.isspace() or character == "_")
        )
        self._template = lru_cache(maxsize=8)(self._parse_template)

    def encode_document(self, text: str) -> list[int]:
        """A document's token ids: the same wherever it stands, and those to pre-warm."""
        return self._documents.encode(text)

    def encode_text(self, text: str) -> list[int]:
        """Any untrusted text's token ids; never a control token."""
        return self._encoders.encode(text)

    @property
    def separator_ids(self) -> list[int]:
        """What stands around headers and documents."""
        return self._encoders.encode(SEPARATOR_TEXT)

    def assemble(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[Document] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        resolve: Resolver | None = None,
    ) -> AssembledPrompt | None:
        """Assemble one request.

        Args:
            messages: OpenAI messages; content parts of type ``document`` stand where they are.
            documents: Top-level documents; they open the first user message.
            tools: Tool definitions, as the template is to see them.
            add_generation_prompt: Whether the assistant's turn is opened.
            continue_final_message: Whether the last message stays open.
            chat_template_kwargs: More arguments for the template.
            resolve: Finds stored documents by their ids.

        Returns:
            The prompt. None if there are no documents and the template rewrites ordinary text in a
            way that cannot be followed; in the engine's own rendering of such a request the control
            tokens are still the template's alone.

        Raises:
            AssemblyError: The request cannot be assembled; see its subclasses.
        """
        template = self._resolve_template(tools)
        kwargs = template.accepted(chat_template_kwargs, self._tokenizer)
        parses_reasoning = CLOSING in template.landmarks and holds_reasoning(messages)
        # The last try twice: a template that prints the clock may have met its tick.
        tries = (True, False, False) if parses_reasoning else (False, False)
        for shows_reasoning_tags in tries:
            veil = Veil(self._markup)
            conversation = Conversation(
                veil=veil,
                content_format=template.content_format,
                resolve=resolve,
                shows_reasoning_tags=shows_reasoning_tags,
            )
            hidden = conversation.read(messages, documents)
            skeleton = render_skeleton(
                template,
                self._tokenizer,
                veil,
                hidden,
                TemplateArguments(
                    tools=veil.cover_tree(list(tools), "tools", is_leading=True) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    extra=veil.cover_tree(kwargs, "chat_template_kwargs", is_leading=True),
                ),
                variants=split_reasoning(hidden) if shows_reasoning_tags else (hidden,),
            )
            if skeleton.unfollowed is None:
                return self._write(skeleton, veil)
        is_tame = veil.inert_texts(template.special) == veil.texts
        if not veil.documents and is_tame and self._keeps_control_tokens(skeleton):
            return None
        raise TemplateError(
            "the model's chat template rewrites the text of messages, so documents and text that"
            " spells control tokens cannot be placed safely",
            "chat_template_unsupported",
        )

    def _keeps_control_tokens(self, skeleton: Skeleton) -> bool:
        """Whether the texts, as the template rewrites them, bring no control token of their own."""
        hidden = self._encoders.find_control_tokens(skeleton.rendered)
        shown = self._encoders.find_control_tokens(skeleton.unfollowed or "")
        return [token_id for *_, token_id in hidden] == [token_id for *_, token_id in shown]

    def _write(self, skeleton: Skeleton, veil: Veil) -> AssembledPrompt:
        return write_prompt(
            PromptWriter(self._encoders, self.encode_document),
            skeleton.rendered,
            self._encoders.find_control_tokens(skeleton.rendered),
            skeleton.stand_ins,
            veil,
        )

    def _resolve_template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        shown_tools = [dict(tool) for tool in tools] if tools else None
        try:
            source = self._tokenizer.get_chat_template(self._chat_template, tools=shown_tools)
        except ValueError as error:
            raise TemplateError(
                "this model has no chat template; use `/v1/completions`, or start the server with"
                " `--chat-template`",
                "chat_template_missing",
            ) from error
        return self._template(source)

    def _parse_template(self, source: str) -> ChatTemplate:
        return ChatTemplate.parse(
            source, self._tokenizer, self._encoders.control_tokens, self._content_format
        )
