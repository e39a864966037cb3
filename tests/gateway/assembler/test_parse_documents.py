"""Every dialect of documents reads the same; what is not understood is refused by its path."""

from typing import Any

import pytest

from blend_gateway.assembler import (
    Assembler,
    Document,
    DocumentError,
    MessageError,
    parse_document,
    parse_documents,
)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("text", Document(text="text")),
        (" kept as it is\n", Document(text=" kept as it is\n")),
        (
            {"id": "a", "title": "T", "text": "x", "metadata": {"n": 1}},
            Document(id="a", title="T", text="x", metadata={"n": 1}),
        ),
        ({"content": "x", "meta": {"n": 1}}, Document(text="x", metadata={"n": 1})),
        (
            {"id": None, "page_content": "x", "metadata": {}, "type": "Document"},
            Document(text="x"),
        ),
        ({"snippet": "x"}, Document(text="x")),
        (
            {"id": "a", "data": {"title": "T", "snippet": "x", "url": "u", "n": 1}},
            Document(id="a", title="T", text="x", metadata={"url": "u", "n": 1}),
        ),
        ({"data": {"text": "x"}, "title": "T"}, Document(title="T", text="x")),
        ({"id": "a", "data": "x"}, Document(id="a", text="x")),
        ({"document_id": "doc_1"}, Document(document_id="doc_1")),
        (
            {"document_id": "doc_1", "id": "a", "text": None},
            Document(id="a", document_id="doc_1"),
        ),
    ],
)
def test_dialects(raw: Any, expected: Document) -> None:
    assert parse_document(raw) == expected


def test_order_and_repeats_are_kept() -> None:
    raw = [{"id": "a", "text": "x"}, "y", {"id": "a", "text": "x"}]
    assert [document.text for document in parse_documents(raw)] == ["x", "y", "x"]
    assert parse_documents(None) == parse_documents([]) == ()


@pytest.mark.parametrize(
    ("raw", "param", "code"),
    [
        ("", "documents[0]", "empty_document"),
        (" \n", "documents[0]", "empty_document"),
        (7, "documents[0]", "invalid_document"),
        (None, "documents[0]", "invalid_document"),
        (["x"], "documents[0]", "invalid_document"),
        ({}, "documents[0].text", "invalid_document"),
        ({"title": "T"}, "documents[0].text", "invalid_document"),
        ({"text": ""}, "documents[0].text", "empty_document"),
        ({"text": 7}, "documents[0].text", "invalid_document"),
        ({"text": ["x"]}, "documents[0].text", "invalid_document"),
        ({"text": "\ud800"}, "documents[0].text", "invalid_document"),
        ({"content": "\t"}, "documents[0].content", "empty_document"),
        ({"text": "x", "content": "y"}, "documents[0].content", "invalid_document"),
        ({"text": "x", "title": 7}, "documents[0].title", "invalid_document"),
        ({"text": "x", "id": 7}, "documents[0].id", "invalid_document"),
        ({"text": "x", "metadata": "m"}, "documents[0].metadata", "invalid_document"),
        ({"text": "x", "type": "file"}, "documents[0].type", "invalid_document"),
        ({"text": "x", "score": 0.5}, "documents[0].score", "invalid_document"),
        ({"data": {"title": "T"}}, "documents[0].data.text", "invalid_document"),
        ({"data": {"snippet": " "}}, "documents[0].data.snippet", "empty_document"),
        ({"data": 7}, "documents[0].data", "invalid_document"),
        ({"data": " "}, "documents[0].data", "empty_document"),
        ({"data": {"text": "x"}, "text": "y"}, "documents[0].text", "invalid_document"),
        ({"document_id": "doc_1", "text": "x"}, "documents[0].text", "invalid_document"),
        ({"document_id": 7}, "documents[0].document_id", "invalid_document"),
    ],
)
def test_errors_name_the_field(raw: Any, param: str, code: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_documents([raw])
    assert (caught.value.param, caught.value.code) == (param, code)
    assert param.split(".")[-1] in caught.value.message or param in caught.value.message


@pytest.mark.parametrize("raw", ["x", {"text": "x"}, 7])
def test_documents_must_be_a_list(raw: Any) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_documents(raw)
    assert caught.value.param == "documents"


def calling(arguments: str) -> dict[str, Any]:
    """A message that called a tool with these arguments."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def nested(depth: int) -> str:
    """An object of so many levels below it."""
    return '{"a": ' + "[" * depth + "]" * depth + "}"


_ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
_ZEROS = "0" * 5000


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "\udfff"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": [7]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": 7}], "messages[0].tool_calls"),
        *(
            ([calling(each)], _ARGUMENTS)
            for each in (nested(64), nested(9000), '{"a": 1' + _ZEROS + "}")
        ),
    ],
)
def test_messages_that_cannot_be_rendered(messages: Any, param: str, smol: Assembler) -> None:
    with pytest.raises(MessageError) as caught:
        smol.assemble(messages)
    assert caught.value.param == param


def test_a_calls_arguments_may_nest_as_deep_as_a_body(smol: Assembler) -> None:
    assert smol.assemble([{"role": "user", "content": "Hi"}, calling(nested(63))]) is not None


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({"text": ""}, "messages[1].content[0].document.text"),
        ("", "messages[1].content[0].document"),
        ({"document_id": "doc_1"}, "messages[1].content[0].document.document_id"),
    ],
)
def test_content_parts_name_their_place(document: Any, param: str, smol: Assembler) -> None:
    part = {"type": "document", "document": document}
    with pytest.raises(DocumentError) as caught:
        smol.assemble([{"role": "user", "content": "x"}, {"role": "user", "content": [part]}])
    assert caught.value.param == param


def test_a_document_part_without_a_document_is_refused(smol: Assembler) -> None:
    with pytest.raises(DocumentError) as caught:
        smol.assemble([{"role": "user", "content": [{"type": "document"}]}])
    assert caught.value.param == "messages[0].content[0].document"
