"""Chat requests: validated, with our own fields taken out and vLLM's left in.

vLLM's request model knows neither our documents nor `blend`, so the raw JSON is read here first.
What documents look like inside is the assembler's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar

from blend_engine.protocol import Policy
from blend_gateway.errors import InvalidRequest, UnsupportedField
from blend_gateway.fields import STRIPPED_HEADERS, describe_warnings, select_fields
from blend_gateway.salts import Tenant
from blend_gateway.settings import Limits

_Choice = TypeVar("_Choice", bound=StrEnum)

DOCUMENT_ROLES = frozenset({"user", "tool"})
DEFAULT_POLICY = "default"
_MAX_ROLE_CHARS = 64
_TEXT_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "text": "text",
        "input_text": "text",
        "output_text": "text",
        "refusal": "refusal",
        "thinking": "thinking",
    }
)
"""Content parts that are text, and the key it stands under."""
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "messages",
        "tokenize",
        "tools",
    }
)


class BlendMode(StrEnum):
    """How much a request wants of blending."""

    AUTO = "auto"
    """Reuse what is there, compute the rest, compile it for the next request."""
    OFF = "off"
    """Compute everything."""
    STRICT = "strict"
    """Refuse unless every document's KV is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendOptions:
    """The request's `blend` object. None means the server's default.

    `report` asks for the `blend` object of the answer. A stream has it in the usage chunk, which
    OpenAI's clients must ask for: True asks for it, too, and None leaves it to `stream_options`.
    """

    mode: BlendMode = BlendMode.AUTO
    policy: Policy | None = None
    recompute_ratio: float | None = None
    report: bool | None = None

    @property
    def reports(self) -> bool:
        """Whether an answer that has a place for the `blend` object gets it."""
        return self.report is not False

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """What was given and has no effect: nothing is reused, so nothing is recomputed."""
        if self.mode is not BlendMode.OFF:
            return ()
        given = {"blend.policy": self.policy, "blend.recompute_ratio": self.recompute_ratio}
        return tuple(name for name, value in given.items() if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """One chat request.

    Args:
        tenant: The caller.
        payload: What vLLM's request model validates: no field of ours, document parts replaced by
            empty text.
        messages: The messages with their document parts.
        documents: The top-level documents as sent.
        blend: The `blend` object.
        trace_headers: W3C trace headers to hand on.
        warning: Text of the warning header.
    """

    tenant: Tenant
    payload: dict[str, Any]
    messages: list[dict[str, Any]]
    documents: list[Any] = field(default_factory=list)
    blend: BlendOptions = field(default_factory=BlendOptions)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    warning: str | None = None

    @property
    def num_documents(self) -> int:
        """Documents at the top level and inside messages."""
        inside: int = sum(
            part.get("type") == "document"
            for message in self.messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
        )
        return len(self.documents) + inside

    @property
    def document_ids(self) -> list[str]:
        """References to registered documents, once for each place."""
        raw = list(self.documents)
        for message in self.messages:
            if isinstance(message.get("content"), list):
                raw += [part.get("document") for part in message["content"]]
        found = [each.get("document_id") for each in raw if isinstance(each, dict)]
        return [each for each in found if isinstance(each, str)]

    @property
    def num_chars(self) -> int:
        """Characters of all strings of the request that may end up in the prompt."""
        total = 0
        values: list[Any] = [self.messages, self.documents]
        while values:
            value = values.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, dict):
                values.extend(value.values())
            elif isinstance(value, list):
                values.extend(value)
        return total


def parse_chat(
    body: Mapping[str, Any], headers: Mapping[str, str], *, tenant: Tenant, limits: Limits
) -> ChatCall:
    """Validate a chat request's shape.

    Args:
        body: The parsed JSON object.
        headers: Request headers by lower-case name.
        tenant: The caller.
        limits: Bounds of one request.

    Raises:
        InvalidRequest: A field of ours, a message or a content part is malformed.
        UnsupportedField: A field or a content part that is not served.
    """
    payload, stripped, ignored = select_fields(body)
    stripped += sorted(STRIPPED_HEADERS & set(headers))
    messages = _parse_messages(payload.get("messages"), limits)
    payload["messages"] = [_without_documents(message) for message in messages]
    _check_template_kwargs(payload.get("chat_template_kwargs"))
    blend = parse_blend(body.get("blend"))
    call = ChatCall(
        tenant=tenant,
        payload=payload,
        messages=messages,
        documents=_parse_documents(body.get("documents")),
        blend=blend,
        trace_headers={n: headers[n] for n in ("traceparent", "tracestate") if n in headers},
        warning=describe_warnings(
            stripped, ignored, blend.idle_fields, max_names=limits.warning_names
        ),
    )
    if call.num_documents > limits.documents_per_request:
        raise InvalidRequest(
            f"a request may have at most {limits.documents_per_request} documents, "
            f"got {call.num_documents}",
            param="documents",
            code="too_many_documents",
        )
    return call


def parse_blend(value: Any) -> BlendOptions:
    """Read the `blend` object.

    Raises:
        InvalidRequest: An unknown key, a value out of range, or values that contradict each other.
    """
    if value is None:
        return BlendOptions()
    if not isinstance(value, dict):
        raise InvalidRequest("`blend` must be an object", param="blend", code="invalid_type")
    unknown = sorted(set(value) - {"mode", "policy", "recompute_ratio", "report"})
    if unknown:
        raise InvalidRequest(
            f"`blend` has no field {unknown[0][:64]!r}; it has mode, policy, recompute_ratio and "
            "report",
            param=f"blend.{unknown[0][:64]}",
            code="unknown_parameter",
        )
    given = {key: option for key, option in value.items() if option is not None}
    options = BlendOptions(
        mode=_choice(BlendMode, given.get("mode", BlendMode.AUTO), "blend.mode"),
        policy=_policy(given.get("policy", DEFAULT_POLICY)),
        recompute_ratio=_ratio(given.get("recompute_ratio")),
        report=_flag(given["report"], "blend.report") if "report" in given else None,
    )
    check_ratio(options.policy, options.recompute_ratio)
    return options


def check_ratio(policy: Policy | None, ratio: float | None, *, whose: str = "") -> None:
    """A share to recompute needs a policy that recomputes.

    Args:
        policy: Of the request, or else of the server.
        ratio: Of the request.
        whose: Whose policy it is, where it is not the request's.

    Raises:
        InvalidRequest: The policy is `none`, and the share is not.
    """
    if policy is Policy.NONE and ratio:
        raise InvalidRequest(
            f"`blend.recompute_ratio` {ratio} contradicts the policy 'none'{whose}, which "
            "recomputes nothing",
            param="blend.recompute_ratio",
            code="conflicting_parameters",
        )


def _policy(value: Any) -> Policy | None:
    if value == DEFAULT_POLICY:
        return None
    return _choice(Policy, value, "blend.policy", also=(DEFAULT_POLICY,))


def _choice(choices: type[_Choice], value: Any, param: str, also: tuple[str, ...] = ()) -> _Choice:
    allowed = [*also, *(choice.value for choice in choices)]
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequest(
            f"`{param}` must be one of {', '.join(allowed)}, got {str(value)[:64]!r}",
            param=param,
            code="invalid_value",
        )
    return choices(value)


def _ratio(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise InvalidRequest(
            f"`blend.recompute_ratio` must be a number in [0, 1], got {str(value)[:64]}",
            param="blend.recompute_ratio",
            code="invalid_value",
        )
    return float(value)


def _flag(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"`{param}` must be true or false", param=param, code="invalid_type")
    return value


def _parse_documents(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest("`documents` must be an array", param="documents", code="invalid_type")
    return value


def _parse_messages(value: Any, limits: Limits) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "`messages` must be a non-empty array", param="messages", code="invalid_messages"
        )
    if len(value) > limits.messages:
        raise InvalidRequest(
            f"a request may have at most {limits.messages} messages, got {len(value)}",
            param="messages",
            code="too_many_messages",
        )
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _parse_message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{where}` must be an object", param=where, code="invalid_type")
    message: dict[str, Any] = value
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE_CHARS:
        raise InvalidRequest(
            f"`{where}.role` must be a role such as 'user'",
            param=f"{where}.role",
            code="invalid_role",
        )
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            _parse_part(part, role, f"{where}.content[{index}]")
            for index, part in enumerate(content)
        ]
        return {**message, "content": parts}
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(
            f"`{where}.content` must be a string or an array of parts",
            param=f"{where}.content",
            code="invalid_type",
        )
    if content is None and role != "assistant":
        raise InvalidRequest(
            f"`{where}.content` is required",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    return message


def _parse_part(value: Any, role: str, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{where}` must be an object", param=where, code="invalid_type")
    part: dict[str, Any] = value
    kind = part.get("type")
    if kind == "file":
        part, kind = _file_as_document(part, where), "document"
    if kind == "document":
        if role not in DOCUMENT_ROLES:
            raise InvalidRequest(
                f"`{where}`: documents belong in user or tool messages, not in {role} messages",
                param=where,
                code="misplaced_document",
            )
        return part
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise UnsupportedField(
            f"`{where}.type` {str(kind)[:64]!r} is not supported; text and document are",
            param=f"{where}.type",
            code="unsupported_content_part",
        )
    if not isinstance(part.get(_TEXT_PARTS[kind]), str):
        raise InvalidRequest(
            f"`{where}` has no text", param=where, code="missing_required_parameter"
        )
    return part


def _file_as_document(part: dict[str, Any], where: str) -> dict[str, Any]:
    """OpenAI's file part, as far as it names a registered document."""
    file = part.get("file")
    file_id = file.get("file_id") if isinstance(file, dict) else None
    if not isinstance(file_id, str) or not file_id.startswith("doc_"):
        raise UnsupportedField(
            f"`{where}.file` must name a registered document as `file_id`; contents are not read",
            param=f"{where}.file",
            code="unsupported_content_part",
        )
    return {"type": "document", "document": {"document_id": file_id}}


def _without_documents(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {"type": "text", "text": ""} if part.get("type") == "document" else dict(part)
        for part in content
    ]
    return {**message, "content": parts}


def _check_template_kwargs(kwargs: Any) -> None:
    """Refuse template arguments that would replace what has a field of its own."""
    reserved = _RESERVED_TEMPLATE_KWARGS & set(kwargs) if isinstance(kwargs, dict) else set()
    if reserved:
        name = min(reserved)
        raise UnsupportedField(
            f"`chat_template_kwargs.{name}` is not supported by this server",
            param=f"chat_template_kwargs.{name}",
        )
