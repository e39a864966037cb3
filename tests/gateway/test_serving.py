"""The adapter's own decisions, without an engine."""

from collections.abc import AsyncGenerator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.serve.engine.protocol import ErrorInfo
from vllm.exceptions import (
    GenerationError,
    QueueOverflowError,
    RetryableRequestError,
    VLLMNotFoundError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from blend_engine.errors import ColdDocument, EngineUnavailable
from blend_gateway.assembler.documents import Document
from blend_gateway.assembler.errors import DocumentError, TemplateError
from blend_gateway.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    UnsupportedField,
    error_body,
    shape_of,
)
from blend_gateway.outcome import Plan
from blend_gateway.protocol import BlendOptions, ChatCall
from blend_gateway.salts import DEFAULT_TENANT
from blend_gateway.serving.chat import BlendServingChat
from blend_gateway.serving.exchange import BlendChatRequest, Exchange, build_request
from blend_gateway.serving.failures import from_error_info, translate
from blend_gateway.serving.renderer import BlendRenderer
from blend_gateway.settings import Limits

pytestmark = pytest.mark.vllm

LIMITS = Limits(choices=4, grammar_chars=200, stop_chars=8)

USER = {"role": "user", "content": "Hello"}


def build(
    documents: Any = (), blend: BlendOptions | None = None, **fields: Any
) -> BlendChatRequest:
    call = ChatCall(
        tenant=DEFAULT_TENANT,
        payload={"messages": [USER], **fields},
        messages=[USER],
        documents=list(documents),
        blend=blend or BlendOptions(),
    )
    exchange = Exchange(call=call, resolve=lambda _id: None, plan=Plan(salt="the-salt"))
    return build_request(exchange, vocab_size=100, limits=LIMITS)


def test_a_request_carries_its_exchange_and_its_salt() -> None:
    request = build()
    assert request.exchange.call.payload["messages"] == [USER]
    assert request.cache_salt == "the-salt"
    assert "exchange" not in request.model_dump()


def test_usage_is_forced_into_streams_only_where_the_report_is_asked_for() -> None:
    """A chunk without choices breaks the usual client loop, so nobody gets one unasked."""
    wanted = BlendOptions(report=True)
    assert build([], wanted, stream=True).stream_options is None
    assert build(["text"], wanted).stream_options is None
    assert build(["text"], stream=True).stream_options is None
    assert build(["text"], BlendOptions(report=False), stream=True).stream_options is None
    forced = build(["text"], wanted, stream=True).stream_options
    assert forced is not None
    assert forced.include_usage is True
    asked = build(
        ["text"],
        wanted,
        stream=True,
        stream_options={"include_usage": False, "continuous_usage_stats": True},
    ).stream_options
    assert asked is not None
    assert (asked.include_usage, asked.continuous_usage_stats) == (True, True)


def test_truncation_would_cut_documents_away() -> None:
    assert build(truncate_prompt_tokens=5).truncate_prompt_tokens == 5
    with pytest.raises(UnsupportedField):
        build(["text"], truncate_prompt_tokens=5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"choice": ["word"] * 100}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "x": "y" * 200}}, "response_format"),
        ({"structured_outputs": "text"}, "structured_outputs"),
        ({"bad_words": ["short", "much too long"]}, "bad_words"),
        ({"stop": "much too long"}, "stop"),
        ({"allowed_token_ids": [1] * 101}, "allowed_token_ids"),
        ({"logit_bias": {"1_0": 5}}, "logit_bias"),
        ({"logit_bias": {" 1": 5}}, "logit_bias"),
        ({"n": 5}, "n"),
        ({"n": "5"}, "n"),
        ({"n": 0}, "n"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [0, 100]}, "allowed_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [100]}, "logprob_token_ids"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"tools": [5]}, "tools[0]"),
        ({"structured_outputs": [1]}, "structured_outputs"),
        ({"tools": [{}], "tool_choice": {"function": {"name": "f"}}}, None),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, None),
    ],
)
def test_bad_fields_are_the_clients_errors(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("is_part", [True, False])
def test_registered_texts_count_before_they_are_tokenized(is_part: bool) -> None:
    """Few ids can stand for more text than any context holds, wherever they are named."""
    named = {"document_id": "doc_1"}
    parts = [{"type": "document", "document": named}]
    call = ChatCall(
        tenant=DEFAULT_TENANT,
        payload={"messages": [USER]},
        messages=[{"content": parts if is_part else "Hello"}],
        documents=[] if is_part else [named],
    )
    room = 100 - call.num_chars
    renderer = BlendRenderer.__new__(BlendRenderer)
    renderer.model_config = SimpleNamespace(max_model_len=10)
    tokenizer = SimpleNamespace(max_chars_per_token=10)
    renderer.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    for length in (room, room + 1):
        known = {"doc_1": Document(text="x" * length)}
        exchange = Exchange(call=call, resolve=known.get, plan=Plan(salt="s"))
        request = build_request(exchange, vocab_size=100, limits=LIMITS)
        if length == room:
            renderer._check_length(request)
        else:
            with pytest.raises(ContextLengthExceeded):
                renderer._check_length(request)


def test_the_bounds_themselves_pass() -> None:
    build(n=4, stop_token_ids=[0, 99], logit_bias={"99": -100})


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (VLLMValidationError("bad", parameter="top_p", value=2), 400, "invalid_value", "top_p"),
        (VLLMValidationError("min_p must be in [0, 1]"), 400, "invalid_value", "min_p"),
        (
            VLLMValidationError("too long", parameter="input_tokens", value=9),
            400,
            "context_length_exceeded",
            "messages",
        ),
        (ValueError("some field is wrong"), 400, "invalid_value", None),
        (VLLMNotFoundError("no model"), 404, "model_not_found", "model"),
        (QueueOverflowError(), 503, "overloaded", None),
        (RetryableRequestError(), 503, "overloaded", None),
        (EngineDeadError(), 503, "engine_unavailable", None),
        (EngineUnavailable("x"), 503, "engine_unavailable", None),
        (GenerationError(), 500, "request_failed", None),
        (EngineGenerateError("/etc/secret"), 500, "request_failed", None),
        (DocumentError("no", "documents[0]", "document_not_found"), 404, "document_not_found", ""),
        (DocumentError("no", "documents[0]", "empty_document"), 400, "empty_document", ""),
        (TemplateError("none", "chat_template_missing"), 400, "chat_template_missing", "messages"),
        (RuntimeError("/etc/secret"), 500, "internal_error", None),
    ],
)
def test_every_exception_finds_its_answer(
    error: Exception, status: int, code: str, param: str | None
) -> None:
    translated = translate(error)
    body = error_body(translated)["error"]
    assert (shape_of(translated).status, body["code"]) == (status, code)
    assert body["param"] == ("documents[0]" if param == "" else param)
    assert "secret" not in body["message"]
    assert "parameter=" not in body["message"]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (HTTPStatus.NOT_FOUND, "model_not_found"),
        (HTTPStatus.BAD_REQUEST, "invalid_value"),
        (HTTPStatus.SERVICE_UNAVAILABLE, "overloaded"),
        (HTTPStatus.INTERNAL_SERVER_ERROR, "request_failed"),
    ],
)
def test_vllms_integer_codes_become_strings(status: HTTPStatus, code: str) -> None:
    info = ErrorInfo(message="x", type="y", code=status.value)
    assert error_body(from_error_info(info))["error"]["code"] == code


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ColdDocument([1]), EngineDeadError(), ValueError("x")])
async def test_what_happens_before_the_first_token_is_raised_not_streamed(
    error: Exception,
) -> None:
    async def outputs() -> AsyncGenerator[Any]:
        raise error
        yield

    chat = BlendServingChat.__new__(BlendServingChat)
    events = chat.chat_completion_stream_generator(build(stream=True), outputs())
    with pytest.raises(type(error)):
        await anext(events)
