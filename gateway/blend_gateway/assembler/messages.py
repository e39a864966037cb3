"""OpenAI messages into what chat templates expect, with every untrusted string hidden.

Follows vLLM's `parse_chat_messages` in what it keeps and how it joins parts, so that a request
without documents renders as it would under `vllm serve`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blend_gateway.assembler.documents import (
    Document,
    Resolver,
    parse_document,
    resolve_document,
)
from blend_gateway.assembler.errors import DocumentError, MessageError
from blend_gateway.assembler.reasoning import CLOSING, OPENING
from blend_gateway.assembler.veil import Veil

ContentFormat = Literal["string", "openai"]
"""Whether templates get a message's content as one string or as a list of text parts."""

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_DOCUMENT_ROLES = ("user", "tool")
_LEADING_ROLES = ("system", "developer")
_REASONING_TAG = re.compile(f"({OPENING}|{CLOSING})")
_MAX_DEPTH = 64
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class _Part:
    shown: str
    is_document: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Reads the messages of one request, hiding what it reads in `veil`.

    Args:
        veil: Takes the untrusted strings.
        content_format: How the template takes content.
        resolve: Finds stored documents.
        shows_reasoning_tags: Whether reasoning tags in assistant messages are left to be seen.
    """

    veil: Veil
    content_format: ContentFormat
    resolve: Resolver | None
    shows_reasoning_tags: bool = False

    def read(self, messages: Any, documents: Sequence[Document]) -> list[dict[str, Any]]:
        """Turn a request's messages into the template's.

        Args:
            messages: As the caller sent them.
            documents: The request's top-level documents; they open the first user message.

        Raises:
            MessageError: A message cannot be rendered.
            DocumentError: A document cannot be read or found, or there is no user message.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise MessageError(
                "`messages` must be a non-empty list", "messages", "invalid_messages"
            )
        first_user = self._first_user(messages)
        if documents and first_user is None:
            raise DocumentError(
                "`documents` need a user message to stand in", "documents", "invalid_document"
            )
        return [
            self._message(message, f"messages[{index}]", documents if index == first_user else ())
            for index, message in enumerate(messages)
        ]

    def _first_user(self, messages: Sequence[Any]) -> int | None:
        for index, message in enumerate(messages):
            if isinstance(message, Mapping) and message.get("role") == "user":
                return index
        return None

    def _message(self, message: Any, param: str, documents: Sequence[Document]) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise _invalid(f"must be an object, got {type(message).__name__}", param)
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise _invalid(f"must be a role such as 'user', got {role!r}", f"{param}.role")
        shown: dict[str, Any] = {"role": role}
        shown["content"] = self._content(role, message.get("content"), param, documents)
        if role == "assistant":
            shown.update(self._assistant_fields(message, param))
        if role == "tool" and "tool_call_id" in message:
            shown["tool_call_id"] = self.veil.cover_tree(
                message["tool_call_id"], f"{param}.tool_call_id"
            )
        for key in ("name", "task"):
            if isinstance(message.get(key), str):
                shown[key] = self.veil.cover_if_markup(message[key], f"{param}.{key}")
        if role == "developer":
            shown["tools"] = self.veil.cover_tree(
                message.get("tools"), f"{param}.tools", is_leading=True
            )
        return shown

    def _content(
        self, role: str, content: Any, param: str, documents: Sequence[Document]
    ) -> str | list[dict[str, str]]:
        parts = [
            self._document_part(document, f"documents[{index}]")
            for index, document in enumerate(documents)
        ]
        parts += self._parts(role, content, f"{param}.content")
        if self.content_format == "openai" and role != "tool":
            return _as_list(parts)
        return _as_string(parts)

    def _parts(self, role: str, content: Any, param: str) -> list[_Part]:
        if content is None:
            return []
        if isinstance(content, str):
            return [self._text_part(role, content, param)]
        if not isinstance(content, list | tuple):
            raise _invalid(
                f"must be a string or a list of parts, got {type(content).__name__}", param
            )
        return [self._part(role, part, f"{param}[{index}]") for index, part in enumerate(content)]

    def _part(self, role: str, part: Any, param: str) -> _Part:
        if isinstance(part, str):
            return self._text_part(role, part, param)
        if not isinstance(part, Mapping):
            raise _invalid(f"must be an object, got {type(part).__name__}", param)
        kind = part.get("type")
        if isinstance(kind, str) and kind in _TEXT_PARTS:
            key = _TEXT_PARTS[kind]
            return self._text_part(role, part.get(key), f"{param}.{key}")
        if kind != "document":
            raise MessageError(
                f"`{param}.type` {kind!r} is not supported; supported are 'text' and 'document'",
                f"{param}.type",
                "unsupported_content_part",
            )
        if role not in _DOCUMENT_ROLES:
            raise DocumentError(
                f"`{param}`: documents may stand in user and tool messages, not in {role!r}",
                param,
                "invalid_document",
            )
        if "document" not in part:
            raise DocumentError(
                f"`{param}.document` is missing", f"{param}.document", "invalid_document"
            )
        where = f"{param}.document"
        return self._document_part(parse_document(part["document"], where), where)

    def _text_part(self, role: str, text: Any, param: str) -> _Part:
        if not isinstance(text, str):
            raise _invalid(f"must be a string, got {type(text).__name__}", param)
        if role == "assistant" and self.shows_reasoning_tags:
            pieces = _REASONING_TAG.split(text)
            shown = "".join(
                piece if _REASONING_TAG.fullmatch(piece) else self.veil.cover(piece, param)
                for piece in pieces
            )
        else:
            shown = self.veil.cover(text, param, is_leading=role in _LEADING_ROLES)
        return _Part(shown, is_document=False)

    def _document_part(self, document: Document, param: str) -> _Part:
        document = resolve_document(document, self.resolve, param)
        return _Part(self.veil.place(document), is_document=True)

    def _assistant_fields(self, message: Mapping[str, Any], param: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if isinstance(reasoning, str):
            # Both names are in use by templates; vLLM fills both.
            covered = self.veil.cover(reasoning, f"{param}.reasoning")
            fields["reasoning"] = fields["reasoning_content"] = covered
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list | tuple):
                raise _invalid("must be a list", f"{param}.tool_calls")
            fields["tool_calls"] = [
                self._tool_call(call, f"{param}.tool_calls[{index}]")
                for index, call in enumerate(calls)
            ]
        return fields

    def _tool_call(self, call: Any, param: str) -> dict[str, Any]:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise _invalid("must be an object with a `function`", param)
        function = dict(call["function"])
        where = f"{param}.function.arguments"
        arguments = self._arguments(_parse_arguments(function.pop("arguments", None), where), where)
        shown: dict[str, Any] = self.veil.cover_tree(
            {key: value for key, value in call.items() if key != "function"}, param
        )
        # Key order is part of what a template that dumps the call shows.
        shown_function: dict[str, Any] = {}
        for key in call["function"]:
            if key == "arguments":
                shown_function[key] = arguments
            else:
                shown_function[key] = self.veil.cover_tree(function[key], f"{param}.function")
        shown_function.setdefault("arguments", arguments)
        return {key: shown_function if key == "function" else shown[key] for key in call}

    def _arguments(self, value: Any, param: str) -> Any:
        """Hide all strings of a call's arguments: they are text, whatever they hold."""
        if isinstance(value, str):
            return self.veil.cover(value, param)
        if isinstance(value, Mapping):
            return {
                self.veil.cover_if_markup(key, param): self._arguments(item, param)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._arguments(item, param) for item in value]
        return value


def merge_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rename `developer` messages to `system` and merge all system messages into the first place.

    What vLLM does for templates that do not know the role.
    """
    renamed = [
        {**{key: value for key, value in message.items() if key != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [index for index, message in enumerate(renamed) if message["role"] == "system"]
    if systems in ([], [0]):
        return renamed
    contents = [_flat(renamed[index]["content"]) for index in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in contents if text)}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def _flat(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _as_string(parts: Sequence[_Part]) -> str:
    """Join texts by a newline, as vLLM does; a document brings separators of its own."""
    joined = ""
    for index, part in enumerate(parts):
        if index and not part.is_document and not parts[index - 1].is_document:
            joined += "\n"
        joined += part.shown
    return joined


def _as_list(parts: Sequence[_Part]) -> list[dict[str, str]]:
    """One list item for each text; documents join the text they stand before, or the last."""
    items: list[dict[str, str]] = []
    pending = ""
    for part in parts:
        pending += part.shown
        if not part.is_document:
            items.append({"type": "text", "text": pending})
            pending = ""
    if pending and items:
        items[-1]["text"] += pending
    elif pending:
        items.append({"type": "text", "text": pending})
    return items


def _parse_arguments(arguments: Any, param: str) -> dict[str, Any]:
    """A call's arguments as an object; like vLLM, whatever is not one becomes an empty one.

    Raises:
        MessageError: They are JSON that no request of ours may have either.
    """
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
        except (RecursionError, ValueError) as error:
            raise _invalid("nests too deep, or has a number of too many digits", param) from error
        if not _is_flat(arguments):
            raise _invalid(f"nests deeper than {_MAX_DEPTH} levels", param)
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def _is_flat(value: Any) -> bool:
    """Whether a JSON value nests no deeper than a request's body may."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for each in inner for item in each if isinstance(item, dict | list)]
        if not level:
            return True
    return False


def _invalid(complaint: str, param: str) -> MessageError:
    return MessageError(f"`{param}` {complaint}", param, "invalid_messages")
