"""What becomes of each field of a chat request that is not ours.

Four kinds, and no others: served (goes to vLLM), refused by name (known to OpenAI or vLLM, without
effect or unsafe here), stripped (internal to the server, not a client's to choose) and ignored
(unknown, or without influence on the answer). A contract test holds the first three against vLLM's
own request model, so a new vLLM field cannot slip through unnoticed.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from blend_gateway.errors import UnsupportedField

SERVED_FIELDS = frozenset(
    {
        # of OpenAI
        "messages", "model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs",
        "max_tokens", "max_completion_tokens", "n", "presence_penalty", "response_format", "seed",
        "stop", "stream", "stream_options", "temperature", "top_p", "tools", "tool_choice",
        "reasoning_effort", "parallel_tool_calls", "user",
        # of vLLM, for sampling
        "thinking_token_budget", "include_reasoning", "top_k", "min_p", "repetition_penalty",
        "watermarking", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
        "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
        "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words",
        "structured_outputs", "repetition_detection",
        # of vLLM, for the prompt and the response
        "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
        "return_tokens_as_token_ids", "return_token_ids", "return_prompt_text", "stream_interval",
    }
)  # fmt: skip

OUR_FIELDS = frozenset({"documents", "blend"})

REFUSED_FIELDS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # of OpenAI
        "audio": (),
        "function_call": (),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
        # of vLLM
        "add_special_tokens": (False,),
        "chat_template": (),
        "echo": (False,),
        "length_penalty": (1.0,),
        "media_io_kwargs": ({},),
        "mm_payload": ("tensors",),
        "mm_processor_kwargs": ({},),
        "prompt_embeds": (),
        "return_mm_kwargs": (False,),
        "return_token_offsets": (False,),
        "routed_experts_prompt_start": (0,),
        "use_beam_search": (False,),
        # removed from vLLM, which would answer without the constraint
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_whitespace_pattern": (),
    }
)
"""Refused fields, each with the values that ask for nothing and pass; null always does."""

STRIPPED_FIELDS = frozenset(
    {
        "cache_salt", "ec_transfer_params", "kv_transfer_params", "priority", "request_id",
        "session_id", "vllm_xargs",
    }
)  # fmt: skip

STRIPPED_HEADERS = frozenset({"x-data-parallel-rank", "x-session-id", "x-vllm-priority"})


def select_fields(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Sort a request's fields.

    Returns:
        What is served, the names of stripped fields, and the names of ignored ones.

    Raises:
        UnsupportedField: The first refused field that asks for something.
    """
    served: dict[str, Any] = {}
    stripped: list[str] = []
    ignored: list[str] = []
    for name, value in body.items():
        if name in SERVED_FIELDS:
            served[name] = value
        elif name in REFUSED_FIELDS:
            if value is not None and not _is_neutral(value, REFUSED_FIELDS[name]):
                raise UnsupportedField(f"`{name}` is not supported by this server", param=name)
        elif name in STRIPPED_FIELDS:
            stripped.append(name)
        elif name not in OUR_FIELDS:
            ignored.append(name)
    return served, stripped, ignored


def describe_warnings(
    stripped: Iterable[str], ignored: Iterable[str], idle: Iterable[str], *, max_names: int
) -> str | None:
    """The text of the warning header; None where there is nothing to say.

    Args:
        stripped: Fields that are the server's own.
        ignored: Fields that are unknown.
        idle: Known fields that another field leaves without effect.
        max_names: Names of each kind that are listed.
    """
    parts = []
    for verb, names in (
        ("internal fields removed", stripped),
        ("fields ignored", ignored),
        ("fields without effect", idle),
    ):
        listed = [_printable(name) for name in names]
        if len(listed) > max_names:
            listed = [*listed[:max_names], f"and {len(listed) - max_names} more"]
        if listed:
            parts.append(f"{verb}: {', '.join(listed)}")
    return "; ".join(parts) or None


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing. `True == 1`, so types are compared, too."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )


def _printable(name: str) -> str:
    """A client's field name, fit for a header."""
    kept = "".join(
        char for char in name[:64] if char.isascii() and (char.isalnum() or char in "_-.")
    )
    return kept or "(unprintable)"
