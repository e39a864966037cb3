"""Documents as callers write them: strings, dicts of several dialects, references to stored ones.

Owns their reading and nothing else. What is not understood is refused by name, so no field of a
document is ever lost without the caller knowing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blend_gateway.assembler.errors import DocumentError

TEXT_KEYS = ("text", "content", "page_content", "snippet")
"""Names under which frameworks keep a document's text. At most one may be filled."""

_ALLOWED_KEYS = ("id", "title", *TEXT_KEYS, "data", "metadata", "meta", "document_id", "type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document of a request.

    Args:
        id: The caller's label, for citations and reports. Never looked up; repeats are fine.
        document_id: Reference to a stored document; `text` is then None until resolved.
        title: Shown in the document's header.
        text: The segment's text, unaltered.
        metadata: Kept for the caller; never rendered.
    """

    id: str | None = None
    document_id: str | None = None
    title: str | None = None
    text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


Resolver = Callable[[str], Document | None]
"""Finds a stored document by its `document_id`; None where the caller has no such document."""


def parse_documents(raw: Any, param: str = "documents") -> tuple[Document, ...]:
    """Read a request's top-level documents, in order.

    Args:
        raw: The request's value; None is no documents.
        param: Path of the field, for errors.

    Raises:
        DocumentError: Not a list, or a document in it cannot be read.
    """
    if raw is None:
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        raise _invalid(f"must be a list of documents, got {type(raw).__name__}", param)
    return tuple(parse_document(item, f"{param}[{index}]") for index, item in enumerate(raw))


def parse_document(raw: Any, param: str = "document") -> Document:
    """Read one document.

    Args:
        raw: A string; ``{id, title, text, metadata}`` with `TEXT_KEYS` as aliases of `text`;
            Cohere's ``{id, data}``; or a reference ``{document_id}``.
        param: Path of the document in the request, for errors.

    Raises:
        DocumentError: It cannot be read; `param` names the field.
    """
    if isinstance(raw, str):
        return Document(text=check_text(raw, param))
    if not isinstance(raw, Mapping):
        raise _invalid(f"must be a string or an object, got {type(raw).__name__}", param)
    # A null field carries nothing; frameworks dump them freely.
    fields = {key: value for key, value in raw.items() if value is not None}
    if unknown := sorted(str(key) for key in fields if key not in _ALLOWED_KEYS):
        raise _invalid(
            f"has unknown fields {unknown}; allowed are {list(_ALLOWED_KEYS)}, and anything else"
            " belongs under `metadata`",
            f"{param}.{unknown[0]}",
        )
    if str(fields.get("type", "document")).lower() != "document":
        raise _invalid(f"must be 'document', got {fields['type']!r}", f"{param}.type")
    if "document_id" in fields:
        return _reference(fields, param)
    if "data" in fields:
        return _cohere(fields, param)
    return Document(
        id=_optional_string(fields, "id", param),
        title=_optional_string(fields, "title", param),
        text=_only_text(fields, param),
        metadata=_metadata(fields, param),
    )


def resolve_document(document: Document, resolve: Resolver | None, param: str) -> Document:
    """Fill a reference's text; any other document comes back as it is.

    Raises:
        DocumentError: The reference is unknown, or nothing can resolve references here.
    """
    if document.document_id is None:
        return document
    stored = resolve(document.document_id) if resolve is not None else None
    if stored is None or stored.text is None:
        raise DocumentError(
            f"no document {document.document_id!r}", f"{param}.document_id", "document_not_found"
        )
    return Document(
        id=document.id if document.id is not None else stored.id,
        document_id=document.document_id,
        title=document.title if document.title is not None else stored.title,
        text=stored.text,
        metadata=document.metadata or stored.metadata,
    )


def check_text(text: Any, param: str) -> str:
    """Give a document's text back if it is one.

    Raises:
        DocumentError: Not a string, blank, or not encodable as UTF-8.
    """
    if not isinstance(text, str):
        raise _invalid(f"must be a string, got {type(text).__name__}", param)
    if not text.strip():
        raise DocumentError(f"`{param}` must not be empty", param, "empty_document")
    if not is_unicode(text):
        raise _invalid("must not contain lone surrogates", param)
    return text


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which JSON can carry and no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reference(fields: Mapping[str, Any], param: str) -> Document:
    if both := [key for key in (*TEXT_KEYS, "data") if key in fields]:
        raise _invalid(
            "must not come with `document_id`: give one of the two", f"{param}.{both[0]}"
        )
    return Document(
        id=_optional_string(fields, "id", param),
        document_id=_optional_string(fields, "document_id", param),
        title=_optional_string(fields, "title", param),
        metadata=_metadata(fields, param),
    )


def _cohere(fields: Mapping[str, Any], param: str) -> Document:
    if both := [key for key in TEXT_KEYS if key in fields]:
        raise _invalid("must not come with `data`: give one of the two", f"{param}.{both[0]}")
    data, where = fields["data"], f"{param}.data"
    label = _optional_string(fields, "id", param)
    title = _optional_string(fields, "title", param)
    metadata = _metadata(fields, param)
    if isinstance(data, str):
        return Document(id=label, title=title, text=check_text(data, where), metadata=metadata)
    if not isinstance(data, Mapping):
        raise _invalid(f"must be a string or an object, got {type(data).__name__}", where)
    data = {key: value for key, value in data.items() if value is not None}
    rest = {key: value for key, value in data.items() if key not in (*TEXT_KEYS, "title")}
    return Document(
        id=label,
        title=_optional_string(data, "title", where) or title,
        text=_only_text(data, where),
        metadata={**metadata, **rest},
    )


def _only_text(fields: Mapping[str, Any], param: str) -> str:
    given = [key for key in TEXT_KEYS if key in fields]
    if not given:
        raise _invalid(f"needs text under one of {list(TEXT_KEYS)}", f"{param}.text")
    if len(given) > 1:
        raise _invalid(f"repeats the text of `{given[0]}`: give one of them", f"{param}.{given[1]}")
    return check_text(fields[given[0]], f"{param}.{given[0]}")


def _optional_string(fields: Mapping[str, Any], key: str, param: str) -> str | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _invalid(f"must be a string, got {type(value).__name__}", f"{param}.{key}")
    if not is_unicode(value):
        raise _invalid("must not contain lone surrogates", f"{param}.{key}")
    return value


def _metadata(fields: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    key = "metadata" if "metadata" in fields else "meta"
    value = fields.get(key, {})
    if not isinstance(value, Mapping):
        raise _invalid(f"must be an object, got {type(value).__name__}", f"{param}.{key}")
    return dict(value)


def _invalid(complaint: str, param: str) -> DocumentError:
    return DocumentError(f"`{param}` {complaint}", param, "invalid_document")
