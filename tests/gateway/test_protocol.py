from typing import Any

import pytest

from blend_engine.protocol import Policy
from blend_gateway.errors import InvalidRequest, UnsupportedField
from blend_gateway.protocol import BlendMode, BlendOptions, ChatCall, parse_blend, parse_chat
from blend_gateway.salts import DEFAULT_TENANT
from blend_gateway.settings import Limits

USER = {"role": "user", "content": "Hello"}


def parse(headers: dict[str, str] | None = None, **body: Any) -> ChatCall:
    return parse_chat(
        {"messages": [USER], **body}, headers or {}, tenant=DEFAULT_TENANT, limits=Limits()
    )


def refusal(**body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    return caught.value


def test_our_fields_do_not_reach_vllm() -> None:
    call = parse(documents=["text"], blend={"mode": "off"}, temperature=0.5)
    assert call.payload == {"messages": [USER], "temperature": 0.5}
    assert call.documents == ["text"]
    assert call.blend.mode is BlendMode.OFF


def test_document_parts_stay_with_us_and_leave_a_gap_for_vllm() -> None:
    part = {"type": "document", "document": {"text": "x"}}
    content = [{"type": "text", "text": "before"}, part, {"type": "text", "text": "after"}]
    call = parse(messages=[{"role": "user", "content": content}])
    assert call.messages[0]["content"] == content
    assert call.payload["messages"][0]["content"][1] == {"type": "text", "text": ""}
    assert call.num_documents == 1


def test_a_file_part_that_names_a_document_is_one() -> None:
    part = {"type": "file", "file": {"file_id": "doc_1"}}
    call = parse(messages=[{"role": "user", "content": [part]}])
    assert call.messages[0]["content"] == [
        {"type": "document", "document": {"document_id": "doc_1"}}
    ]


@pytest.mark.parametrize("file", [None, {}, {"file_data": "AAAA"}, {"file_id": "file-1"}])
def test_other_files_are_refused(file: Any) -> None:
    error = refusal(messages=[{"role": "user", "content": [{"type": "file", "file": file}]}])
    assert error.param == "messages[0].content[0].file"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("use_beam_search", True),
        ("use_beam_search", 1),
        ("chat_template", "{{ messages }}"),
        ("prompt_embeds", "AAAA"),
        ("echo", True),
        ("mm_processor_kwargs", {"a": 1}),
        ("functions", []),
        ("store", True),
        ("guided_json", {}),
        ("length_penalty", 2.0),
        ("add_special_tokens", True),
    ],
)
def test_known_but_unserved_fields_are_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert isinstance(error, UnsupportedField)
    assert error.param == field
    assert f"`{field}`" in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", None),
        ("modalities", ["text"]),
        ("use_beam_search", False),
        ("echo", False),
        ("store", False),
        ("length_penalty", 1),
    ],
)
def test_unserved_fields_that_ask_for_nothing_pass(field: str, value: Any) -> None:
    assert field not in parse(**{field: value}).payload


def test_internal_fields_and_headers_are_stripped_with_a_warning() -> None:
    call = parse(
        headers={"x-vllm-priority": "-1", "x-session-id": "s"},
        cache_salt="mine",
        kv_transfer_params={"do_remote_prefill": True},
        priority=-5,
        request_id="r",
    )
    assert set(call.payload) == {"messages"}
    assert call.warning is not None
    for name in ("cache_salt", "kv_transfer_params", "priority", "request_id", "x-session-id"):
        assert name in call.warning


def test_unknown_fields_are_ignored_with_a_warning() -> None:
    call = parse(prompt_cache_key="k", **{"x\r\nSet-Cookie: a=b": 1, "\u00fc": 2})
    assert call.warning == "fields ignored: prompt_cache_key, xSet-Cookieab, (unprintable)"


def test_a_long_warning_is_cut() -> None:
    call = parse(**{f"field{i}": 1 for i in range(1000)})
    assert call.warning is not None
    assert call.warning.endswith("and 984 more")


def test_nothing_to_warn_about_is_no_warning() -> None:
    assert parse(user="someone").warning is None


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        "hello",
        ["hello"],
        [{}],
        [{"role": 1, "content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": []}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    error = refusal(messages=messages)
    assert error.param is not None
    assert error.param.startswith("messages")


def test_assistant_messages_may_have_no_content() -> None:
    parse(messages=[USER, {"role": "assistant", "content": None, "tool_calls": []}, USER])


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_documents_do_not_belong_into_trusted_messages(role: str) -> None:
    part = {"type": "document", "document": {"text": "x"}}
    error = refusal(messages=[{"role": role, "content": [part]}, USER])
    assert error.code == "misplaced_document"


def test_the_number_of_documents_is_bounded() -> None:
    part = {"type": "document", "document": "x"}
    messages = [{"role": "user", "content": [part] * 4}]
    parse(messages=messages, documents=["x"] * 60)
    assert refusal(messages=messages, documents=["x"] * 61).code == "too_many_documents"


def test_documents_are_an_array() -> None:
    assert refusal(documents={"text": "x"}).param == "documents"


@pytest.mark.parametrize("name", ["documents", "chat_template", "tools", "messages"])
def test_template_arguments_cannot_replace_ours(name: str) -> None:
    assert refusal(chat_template_kwargs={name: []}).param == f"chat_template_kwargs.{name}"


def test_only_trace_headers_are_handed_on() -> None:
    call = parse(headers={"traceparent": "00-1", "x-request-id": "mine", "authorization": "x"})
    assert call.trace_headers == {"traceparent": "00-1"}


def test_blend_defaults() -> None:
    assert parse_blend(None) == parse_blend({}) == BlendOptions()
    assert parse_blend({"policy": "default", "mode": None}) == BlendOptions()


def test_blend_is_read() -> None:
    options = parse_blend(
        {"mode": "strict", "policy": "hkvd", "recompute_ratio": 1, "report": False}
    )
    assert options == BlendOptions(
        mode=BlendMode.STRICT, policy=Policy.HKVD, recompute_ratio=1.0, report=False
    )


def test_a_ratio_contradicts_the_policy_none() -> None:
    error = refusal(blend={"policy": "none", "recompute_ratio": 0.5})
    assert (error.param, error.code) == ("blend.recompute_ratio", "conflicting_parameters")
    assert parse_blend({"policy": "none", "recompute_ratio": 0}).recompute_ratio == 0.0


@pytest.mark.parametrize(
    ("blend", "warning"),
    [
        ({"policy": "hkvd"}, "fields without effect: blend.policy"),
        ({"recompute_ratio": 0}, "fields without effect: blend.recompute_ratio"),
        (
            {"policy": "sinks", "recompute_ratio": 0.1},
            "fields without effect: blend.policy, blend.recompute_ratio",
        ),
        ({"policy": "default", "report": True}, None),
    ],
)
def test_what_to_recompute_is_without_effect_where_nothing_is_reused(
    blend: dict[str, Any], warning: str | None
) -> None:
    assert parse(blend={"mode": "off", **blend}).warning == warning
    assert parse(blend=blend).warning is None


@pytest.mark.parametrize(
    ("blend", "param"),
    [
        ("auto", "blend"),
        ([], "blend"),
        ({"mode": "always"}, "blend.mode"),
        ({"mode": 1}, "blend.mode"),
        ({"mode": ["auto"]}, "blend.mode"),
        ({"policy": "best"}, "blend.policy"),
        ({"policy": {}}, "blend.policy"),
        ({"recompute_ratio": -0.1}, "blend.recompute_ratio"),
        ({"recompute_ratio": 1.01}, "blend.recompute_ratio"),
        ({"recompute_ratio": "0.5"}, "blend.recompute_ratio"),
        ({"recompute_ratio": True}, "blend.recompute_ratio"),
        ({"report": 1}, "blend.report"),
        ({"ratio": 0.5}, "blend.ratio"),
    ],
)
def test_malformed_blend_is_refused(blend: Any, param: str) -> None:
    assert refusal(blend=blend).param == param
