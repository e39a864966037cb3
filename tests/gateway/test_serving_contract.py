"""What `blend_gateway.serving` needs of vLLM, path by path and signature by signature.

Its HTTP tree moves between minors. A failure here says what moved before anything else does.
"""

import inspect
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("vllm")

from blend_gateway.fields import OUR_FIELDS, REFUSED_FIELDS, SERVED_FIELDS, STRIPPED_FIELDS

pytestmark = pytest.mark.vllm

PATHS = (
    "vllm.engine.arg_utils:AsyncEngineArgs",
    "vllm.engine.protocol:EngineClient",
    "vllm.entrypoints.generate.base.protocol:StreamOptions",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat",
    "vllm.entrypoints.openai.models.protocol:BaseModelPath",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels",
    "vllm.entrypoints.serve.engine.protocol:ErrorInfo",
    "vllm.entrypoints.serve.engine.protocol:ErrorResponse",
    "vllm.exceptions:GenerationError",
    "vllm.exceptions:GracefulHTTPError",
    "vllm.exceptions:RetryableRequestError",
    "vllm.exceptions:VLLMClientError",
    "vllm.exceptions:VLLMNotFoundError",
    "vllm.exceptions:VLLMServerError",
    "vllm.exceptions:VLLMUnprocessableEntityError",
    "vllm.exceptions:VLLMValidationError",
    "vllm.inputs:TokensPrompt",
    "vllm.outputs:RequestOutput",
    "vllm.parser.metrics:init_parser_metrics",
    "vllm.platforms:current_platform",
    "vllm.reasoning:ReasoningParserManager",
    "vllm.renderers.chat_utils:load_chat_template",
    "vllm.renderers.hf:HfRenderer",
    "vllm.renderers.hf:resolve_chat_template",
    "vllm.renderers.online_renderer:OnlineRenderer",
    "vllm.tool_parsers:ToolParserManager",
    "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "vllm.v1.engine.exceptions:EngineDeadError",
    "vllm.v1.metrics.prometheus:get_prometheus_registry",
)

SHARED_ARGUMENTS = {
    "request_logger",
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "enable_auto_tools",
    "exclude_tools_when_tool_choice_none",
    "tool_parser",
    "tool_strict_level",
    "reasoning_parser",
}


def load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("path", PATHS)
def test_the_path_is_there(path: str) -> None:
    assert load(path) is not None


def test_the_serving_classes_take_what_we_give_them() -> None:
    renderer = load("vllm.renderers.online_renderer:OnlineRenderer")
    assert SHARED_ARGUMENTS | {"model_config", "renderer"} <= parameters(renderer.__init__)
    chat = load("vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat")
    assert SHARED_ARGUMENTS | {
        "engine_client",
        "models",
        "response_role",
        "online_renderer",
        "return_tokens_as_token_ids",
        "enable_prompt_tokens_details",
    } <= parameters(chat.__init__)
    models = load("vllm.entrypoints.openai.models.serving:OpenAIServingModels")
    assert {"engine_client", "base_model_paths"} <= parameters(models.__init__)


def test_overridden_methods_have_vllms_parameters() -> None:
    from blend_gateway.serving.renderer import BlendRenderer

    renderer = load("vllm.renderers.online_renderer:OnlineRenderer")
    for name in ("preprocess_chat", "_make_request_with_harmony"):
        theirs = inspect.signature(getattr(renderer, name)).parameters
        ours = inspect.signature(getattr(BlendRenderer, name)).parameters
        assert list(ours) == list(theirs)
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


def test_streams_are_generators_over_outputs() -> None:
    chat = load("vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat")
    stream = chat.chat_completion_stream_generator
    assert inspect.isasyncgenfunction(stream)
    assert list(inspect.signature(stream).parameters)[:3] == [
        "self",
        "request",
        "result_generator",
    ]


def test_requests_can_bring_their_token_ids() -> None:
    source = inspect.getsource(import_module("vllm.renderers.online_renderer"))
    assert 'kv.pop("prompt_token_ids"' in source


def test_every_field_of_vllms_request_has_its_place() -> None:
    request = load("vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest")
    fields = set(request.model_fields)
    placed = SERVED_FIELDS | set(REFUSED_FIELDS) | STRIPPED_FIELDS | OUR_FIELDS
    assert fields - placed == set(), "new in vLLM: serve, refuse or strip it"
    assert SERVED_FIELDS - fields == set(), "gone from vLLM: it would be ignored"


def test_no_field_has_two_places() -> None:
    places = [SERVED_FIELDS, set(REFUSED_FIELDS), STRIPPED_FIELDS, OUR_FIELDS]
    assert sum(map(len, places)) == len(set().union(*places))
