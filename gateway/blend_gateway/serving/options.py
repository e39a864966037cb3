"""How vLLM's serving classes are set up; each option means what the `vllm serve` flag means."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Options of the chat route.

    Args:
        model: The model's path or name.
        served_model_names: Names clients may use; the first one is reported.
        chat_template: Path or source of a Jinja template; None for the model's own.
        chat_template_content_format: How templates get content.
        default_chat_template_kwargs: Arguments that requests may override.
        response_role: Role of answers.
        enable_auto_tool_choice: Whether the model decides on tool calls.
        exclude_tools_when_tool_choice_none: Whether unused tools stay out of the prompt.
        tool_call_parser: Name of vLLM's parser of tool calls.
        tool_strict_level: Floor of structural-tag tool calling.
        reasoning_parser: Name of vLLM's parser of reasoning.
        return_tokens_as_token_ids: Whether logprobs name tokens by id.
    """

    model: str
    served_model_names: tuple[str, ...]
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    tool_call_parser: str | None = None
    tool_strict_level: str = "auto"
    reasoning_parser: str = ""
    return_tokens_as_token_ids: bool = False
