"""The chat template: what it reads, how it renders, and whether it can be followed."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
from tokenizers import Tokenizer
from typing_extensions import override

from blend_gateway.assembler.errors import TemplateError
from blend_gateway.assembler.messages import ContentFormat, merge_system_messages
from blend_gateway.assembler.veil import longest_first

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_assistant_tokens_mask",
        "return_dict",
        "tokenize",
        "tools",
    }
)
"""Template arguments that have a parameter of their own or would change what is rendered."""

_MARKUP = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")


class ChatTokenizer(Protocol):
    """What is needed of a Hugging Face fast tokenizer."""

    bos_token_id: int | None

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The Rust tokenizer."""

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        """Named special tokens, as templates see them."""

    def get_chat_template(
        self, chat_template: str | None = None, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The Jinja source; raises ValueError where there is none."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateArguments:
    """What a template is given besides the messages."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """One Jinja template and what its source says.

    Attributes:
        source: The Jinja text.
        variables: The names it reads.
        landmarks: Markup it names, and so may look for in what it is given.
        special: Finds landmarks and control tokens.
        content_format: How it takes a message's content.
    """

    source: str
    variables: frozenset[str]
    landmarks: frozenset[str]
    special: re.Pattern[str]
    content_format: ContentFormat

    @classmethod
    def parse(
        cls,
        source: str,
        tokenizer: ChatTokenizer,
        control_tokens: Iterable[str],
        content_format: ContentFormat | None,
    ) -> "ChatTemplate":
        """Read a template's source.

        Args:
            source: The Jinja text.
            tokenizer: Renders it.
            control_tokens: The tokenizer's.
            content_format: Known from elsewhere, or None to try it out.

        Raises:
            TemplateError: It is not valid Jinja.
        """
        # "loopcontrols" and "generation" are what Hugging Face adds to Jinja.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        )
        try:
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid: {error}", "chat_template_unsupported"
            ) from error
        landmarks = _landmarks(tree)
        return cls(
            source=source,
            variables=frozenset(jinja2.meta.find_undeclared_variables(tree)),
            landmarks=landmarks,
            special=longest_first([*control_tokens, *landmarks]),
            content_format=content_format or _try_content_format(source, tokenizer),
        )

    def render(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[dict[str, Any]],
        arguments: TemplateArguments,
    ) -> str:
        """Render messages to text.

        Raises:
            TemplateError: The template rejects them.
        """
        prepared = list(messages)
        knows_developer = '"developer"' in self.source or "'developer'" in self.source
        if not knows_developer and any(message["role"] == "developer" for message in prepared):
            prepared = merge_system_messages(prepared)
        try:
            rendered = tokenizer.apply_chat_template(
                prepared,
                tools=arguments.tools,
                chat_template=self.source,
                add_generation_prompt=arguments.add_generation_prompt,
                continue_final_message=arguments.continue_final_message,
                tokenize=False,
                **arguments.extra,
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise TemplateError(
                f"the model's chat template rejects the messages: {error}",
                "chat_template_rejected",
            ) from error
        return str(rendered)

    def accepted(
        self, kwargs: Mapping[str, Any] | None, tokenizer: ChatTokenizer
    ) -> dict[str, Any]:
        """The extra arguments that the template reads; like vLLM, others are dropped.

        Raises:
            TemplateError: One would replace what has a field of its own, or a special token.
        """
        kwargs = kwargs or {}
        refused = _RESERVED | set(tokenizer.special_tokens_map)
        if bad := sorted(refused.intersection(kwargs)):
            raise TemplateError(
                f"`chat_template_kwargs` must not set {bad}",
                "chat_template_rejected",
                f"chat_template_kwargs.{bad[0]}",
            )
        return {key: value for key, value in kwargs.items() if key in self.variables}


class _GenerationBlock(jinja2.ext.Extension):
    """Parses Hugging Face's ``{% generation %}`` blocks; nothing is rendered here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class attribute

    @override
    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ("name:endgeneration",), drop_needle=True
        )
        return body


def _landmarks(tree: jinja2.nodes.Template) -> frozenset[str]:
    found: set[str] = set()
    for constant in tree.find_all(jinja2.nodes.Const):
        if isinstance(constant.value, str):
            found.update(_MARKUP.findall(constant.value))
    return frozenset(found)


def _try_content_format(source: str, tokenizer: ChatTokenizer) -> ContentFormat:
    """Whether the template writes a list of text parts as their texts."""
    parts = [{"type": "text", "text": "Qfirst"}, {"type": "text", "text": "Qsecond"}]
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], chat_template=source, tokenize=False
        )
    except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError):
        return "string"
    written = str(rendered)
    is_followed = written.count("Qfirst") == 1 == written.count("Qsecond")
    dumps_parts = "'type'" in written or '"type"' in written
    return "openai" if is_followed and not dumps_parts else "string"
