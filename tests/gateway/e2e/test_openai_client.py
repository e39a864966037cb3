"""What the real OpenAI client sees."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from tests.gateway.e2e.conftest import MAX_MODEL_LEN
from tests.gateway.e2e.texts import document

pytestmark = pytest.mark.vllm

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello."}]


def test_models_are_listed_and_retrieved(openai_client: OpenAI, model: str) -> None:
    (card,) = openai_client.models.list().data
    assert card.id == model == "SmolLM2-135M-Instruct"
    assert card.model_dump()["blend"]["supported"] is True
    assert openai_client.models.retrieve(model).id == model


def test_a_chat(openai_client: OpenAI, model: str) -> None:
    completion = openai_client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=8, temperature=0
    )
    assert completion.choices[0].message.content
    usage = completion.usage
    assert usage is not None
    assert usage.completion_tokens <= 8
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert "blend" not in completion.model_dump()
    assert "kv_transfer_params" not in completion.model_dump()


def test_a_stream_ends_like_openais(openai_client: OpenAI, model: str) -> None:
    chunks = list(
        openai_client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=8, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_gives_the_same_text_as_a_completion(openai_client: OpenAI, model: str) -> None:
    arguments: dict[str, Any] = {
        "model": model,
        "messages": HELLO,
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = openai_client.chat.completions.create(**arguments)
    chunks = openai_client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    pieces, usage = [], None
    for chunk in chunks:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_documents_by_extra_body(openai_client: OpenAI, model: str) -> None:
    documents = [
        {"id": "a", "title": "A", "text": document("extra a")},
        document("extra b"),
        {"id": "c", "data": {"title": "C", "snippet": document("extra c")}},
    ]
    completion = openai_client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=4,
        temperature=0,
        extra_body={"documents": documents},
    )
    blend = completion.model_dump()["blend"]
    assert [each.get("id") for each in blend["documents"]] == ["a", None, "c"]


def test_documents_by_content_parts(openai_client: OpenAI, model: str) -> None:
    part = {"type": "document", "document": {"id": "p", "text": document("part")}}
    content: Any = [{"type": "text", "text": "What is this?"}, part]
    completion = openai_client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_tokens=4
    )
    assert completion.model_dump()["blend"]["documents"][0]["id"] == "p"


def test_a_stream_with_documents_ends_with_usage_and_blend(
    openai_client: OpenAI, model: str
) -> None:
    arguments: dict[str, Any] = {
        "model": model,
        "messages": HELLO,
        "max_tokens": 4,
        "stream": True,
    }
    extra: dict[str, Any] = {"documents": [document("stream")]}
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}}
    for options, body in ((asked, extra), ({}, {**extra, "blend": {"report": True}})):
        stream = openai_client.chat.completions.create(**arguments, **options, extra_body=body)
        last = list(stream)[-1]
        assert last.choices == []
        assert last.usage is not None
        blend = last.model_dump()["blend"]
        names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
        assert sum(blend[name] for name in names) == last.usage.prompt_tokens

    extra["blend"] = {"report": False}
    last = list(openai_client.chat.completions.create(**arguments, **asked, extra_body=extra))[-1]
    assert last.usage is not None
    assert "blend" not in last.model_dump()


def test_an_unasked_stream_has_choices_in_every_chunk(openai_client: OpenAI, model: str) -> None:
    """The usual loop reads `choices[0]` without looking."""
    stream = openai_client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=4,
        stream=True,
        extra_body={"documents": [document("loop")]},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_several_choices_with_documents(openai_client: OpenAI, model: str) -> None:
    completion = openai_client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=4,
        n=2,
        logprobs=True,
        extra_body={"documents": [document("choices")]},
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.choices[1].logprobs is not None
    assert completion.model_dump()["blend"]["documents"][0]["tokens"] > 0


def test_a_named_tool_is_called(openai_client: OpenAI, model: str) -> None:
    completion = openai_client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=64,
        temperature=0,
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "greet",
                    "strict": True,
                    "parameters": {
                        "type": "object",
                        "properties": {"loud": {"type": "boolean"}},
                        "required": ["loud"],
                        "additionalProperties": False,
                    },
                },
            }
        ],
        tool_choice={"type": "function", "function": {"name": "greet"}},
        extra_body={"documents": [document("tool")]},
    )
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "greet"
    assert isinstance(json.loads(call.function.arguments)["loud"], bool)


def test_structured_output_with_documents(openai_client: OpenAI, model: str) -> None:
    completion = openai_client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_tokens=8,
        extra_body={
            "documents": [document("structured")],
            "structured_outputs": {"choice": ["yes", "no"]},
        },
    )
    assert completion.choices[0].message.content in ("yes", "no")


def test_a_tool_message_may_hold_a_document(openai_client: OpenAI, model: str) -> None:
    part = {"type": "document", "document": document("tool message")}
    messages: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [part]},
    ]
    completion = openai_client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    assert completion.model_dump()["blend"]["documents"][0]["status"] in ("miss", "compiling")


def test_an_unknown_model_is_not_found(openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.chat.completions.create(model="nobody", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_prompt_that_is_too_long_is_a_bad_request(openai_client: OpenAI, model: str) -> None:
    for num_words in (MAX_MODEL_LEN + 10, 400_000):
        with pytest.raises(openai.BadRequestError) as caught:
            openai_client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "word " * num_words}]
            )
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "code", "param"),
    [
        ({"documents": [""]}, "empty_document", "documents[0]"),
        ({"documents": [{"text": "x", "author": "y"}]}, "invalid_document", "documents[0].author"),
        ({"documents": "x"}, "invalid_type", "documents"),
        ({"blend": {"recompute_ratio": 2}}, "invalid_value", "blend.recompute_ratio"),
        (
            {"blend": {"policy": "none", "recompute_ratio": 0.5}},
            "conflicting_parameters",
            "blend.recompute_ratio",
        ),
        ({"blend": {"mode": "maybe"}}, "invalid_value", "blend.mode"),
        ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"stop_token_ids": [10**9]}, "invalid_value", "stop_token_ids"),
        ({"n": "17"}, "invalid_value", "n"),
    ],
)
def test_bad_requests_name_the_field(
    openai_client: OpenAI, model: str, extra: Any, code: str, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(
            model=model, messages=HELLO, stream=stream, extra_body=extra
        )
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_document_is_not_found(openai_client: OpenAI, model: str, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.chat.completions.create(
            model=model,
            messages=HELLO,
            stream=stream,
            extra_body={"documents": [{"document_id": "doc_0"}]},
        )
    assert caught.value.code == "document_not_found"
