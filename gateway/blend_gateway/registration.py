"""Bodies of POST /v1/documents: validated into drafts."""

from collections.abc import Mapping
from typing import Any

from blend_gateway.assembler.documents import Document, parse_document
from blend_gateway.assembler.errors import DocumentError
from blend_gateway.documents import Draft
from blend_gateway.errors import InvalidRequest
from blend_gateway.settings import Limits

_METADATA_KEY_CHARS = 64
_METADATA_VALUE_CHARS = 512


def parse_registration(body: Mapping[str, Any], limits: Limits) -> tuple[list[Draft], bool]:
    """Read one document, or a batch under `documents`.

    Returns:
        The drafts, and whether they came as a batch.

    Raises:
        InvalidRequest: A document is malformed or too large, or there are too many.
    """
    if "documents" not in body:
        return [_draft(dict(body), "", limits)], False
    others = sorted(set(body) - {"documents"})
    if others:
        raise InvalidRequest(
            f"`{others[0][:64]}` cannot stand beside `documents`",
            param=others[0][:64],
            code="unknown_parameter",
        )
    batch = body["documents"]
    if not isinstance(batch, list) or not batch:
        raise InvalidRequest(
            "`documents` must be a non-empty array", param="documents", code="invalid_type"
        )
    if len(batch) > limits.documents_per_request:
        raise InvalidRequest(
            f"a request may register at most {limits.documents_per_request} documents, "
            f"got {len(batch)}",
            param="documents",
            code="too_many_documents",
        )
    return [_draft(item, f"documents[{index}]", limits) for index, item in enumerate(batch)], True


def check_document(document: Document, param: str, limits: Limits) -> None:
    """Bound a document's text and title.

    Raises:
        InvalidRequest: One is too long.
    """
    if document.text is not None and len(document.text.encode()) > limits.document_bytes:
        raise InvalidRequest(
            f"a document may have at most {limits.document_bytes} bytes of text",
            param=param,
            code="document_too_large",
        )
    for name, value in (("title", document.title), ("id", document.id)):
        if value is not None and len(value) > limits.title_chars:
            raise InvalidRequest(
                f"a document's `{name}` may have at most {limits.title_chars} characters",
                param=f"{param}.{name}".lstrip("."),
                code="invalid_document",
            )


def _draft(item: Any, where: str, limits: Limits) -> Draft:
    param = where or "text"
    try:
        document = parse_document(item, where or "document")
    except DocumentError as error:
        # A single document's fields are the body's own.
        name = error.param if where else error.param.removeprefix("document").lstrip(".")
        raise InvalidRequest(error.message, param=name or "text", code=error.code) from error
    if document.text is None:
        raise InvalidRequest("a registration needs `text`", param=param, code="invalid_document")
    check_document(document, where, limits)
    _check_metadata(document.metadata, f"{where}.metadata".lstrip("."), limits)
    return Draft(
        text=document.text,
        title=document.title,
        label=document.id,
        metadata=dict(document.metadata),
    )


def _check_metadata(metadata: Mapping[str, Any], param: str, limits: Limits) -> None:
    """OpenAI's bounds: a few pairs of short keys and short plain values."""
    fits = len(metadata) <= limits.metadata_pairs and all(
        len(key) <= _METADATA_KEY_CHARS
        and isinstance(value, str | int | float | bool | None)
        and len(str(value)) <= _METADATA_VALUE_CHARS
        for key, value in metadata.items()
    )
    if not fits:
        raise InvalidRequest(
            f"`{param}` may have at most {limits.metadata_pairs} pairs of keys up to "
            f"{_METADATA_KEY_CHARS} characters and plain values up to {_METADATA_VALUE_CHARS}",
            param=param,
            code="invalid_metadata",
        )
