from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.platforms import current_platform

from blend_engine.protocol import Policy
from blend_gateway.serve_options import ServeCommand, UnusableOption, parse_serve

pytestmark = pytest.mark.vllm

needs_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="the default is for CPUs")
GIB = 1 << 30


def no_demo() -> Path:
    raise AssertionError("the demo model was asked for")


def parse(*arguments: str, cpu_flags: frozenset[str] = frozenset()) -> ServeCommand:
    return parse_serve(arguments, prepare_demo=no_demo, cpu_flags=lambda: cpu_flags)


def parse_demo(*arguments: str) -> ServeCommand:
    return parse_serve(arguments, prepare_demo=lambda: Path("/models/demo"))


def test_an_error_names_the_flag() -> None:
    with pytest.raises(UnusableOption, match="--blend-ratio must be in"):
        parse("m", "--blend-ratio", "2")


@pytest.mark.parametrize("arguments", [("org/model",), ("--model", "org/model")])
def test_the_model_is_positional_or_a_flag(arguments: tuple[str, ...]) -> None:
    command = parse(*arguments)
    assert command.engine_args.model == "org/model"
    assert command.serving.served_model_names == ("org/model",)


def test_the_model_is_given_once() -> None:
    with pytest.raises(UnusableOption):
        parse("org/model", "--model", "org/model")


def test_without_a_model_the_demo_model_is_served_under_its_name() -> None:
    command = parse_demo()
    assert command.engine_args.model == "/models/demo"
    assert command.serving.served_model_names == ("demo",)


def test_the_demo_models_name_can_be_chosen() -> None:
    assert parse_demo("--served-model-name", "a", "b").serving.served_model_names == ("a", "b")


@needs_cpu
def test_the_demo_model_leaves_memory_to_others_unless_told_otherwise() -> None:
    assert parse_demo().engine_args.kv_cache_memory_bytes == 2 * GIB
    assert parse_demo("--gpu-memory-utilization", "0.5").engine_args.kv_cache_memory_bytes is None
    given = parse_demo("--kv-cache-memory-bytes", "1G").engine_args.kv_cache_memory_bytes
    assert given == GIB
    assert parse("m").engine_args.kv_cache_memory_bytes is None


@needs_cpu
def test_the_demo_model_is_not_compiled_unless_told_so() -> None:
    assert parse_demo().engine_args.enforce_eager is True
    assert parse_demo("--no-enforce-eager").engine_args.enforce_eager is False
    assert parse("m").engine_args.enforce_eager is False
    assert parse("m", "--enforce-eager").engine_args.enforce_eager is True


@needs_cpu
@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (frozenset({"avx2"}), "float32"),
        (frozenset({"avx2", "avx512_bf16"}), "float32"),
        (frozenset({"amx_bf16"}), "auto"),
        (frozenset(), "float32"),
    ],
)
def test_the_default_dtype_is_the_fastest_on_this_cpu(flags: frozenset[str], dtype: str) -> None:
    assert parse("m", cpu_flags=flags).engine_args.dtype == dtype


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_an_explicit_dtype_is_honoured(dtype: str) -> None:
    assert parse("m", "--dtype", dtype).engine_args.dtype == dtype


def test_engine_flags_reach_the_engine() -> None:
    engine_args = parse(
        "m", "--max-model-len", "4096", "--block-size", "32", "--no-enable-prefix-caching"
    ).engine_args
    assert engine_args.max_model_len == 4096
    assert engine_args.block_size == 32
    assert engine_args.enable_prefix_caching is False


def test_compiles_yield_to_requests_by_default() -> None:
    assert parse("m").engine_args.scheduling_policy == "priority"
    assert parse("m", "--scheduling-policy", "fcfs").engine_args.scheduling_policy == "fcfs"


def test_a_flag_that_takes_something_away_says_so(caplog: pytest.LogCaptureFixture) -> None:
    parse("m", "--scheduling-policy", "fcfs", "--blend-store-gib", "0")
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "--scheduling-policy fcfs",
        "--blend-store-gib 0",
    ]


def test_full_reuse_is_no_contradiction(caplog: pytest.LogCaptureFixture) -> None:
    """The ratio without a flag is for requests that name another policy."""
    settings = parse("m", "--blend-policy", "none").settings
    assert (settings.policy, settings.recompute_ratio) == (Policy.NONE, 0.10)
    assert parse("m", "--blend-policy", "none", "--blend-ratio", "0").settings.recompute_ratio == 0
    assert caplog.messages == []


def test_our_defaults() -> None:
    command = parse("m")
    settings = command.settings
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.policy, settings.recompute_ratio) == (Policy.SINKS, 0.10)
    assert command.blend_config.store_bytes == 4 * GIB


def test_our_flags() -> None:
    command = parse(
        *("m", "--host", "::", "--port", "81", "--blend-policy", "hkvd", "--blend-ratio", "0.2"),
        *("--blend-check-layer", "2", "--blend-store-gib", "0.5"),
        *("--blend-min-segment-tokens", "8", "--blend-compile-queue-depth", "3"),
        *("--blend-pass-budget-tokens", "512"),
    )
    settings, config = command.settings, command.blend_config
    assert (settings.host, settings.port, settings.policy) == ("::", 81, Policy.HKVD)
    assert (settings.recompute_ratio, settings.check_layer) == (0.2, 2)
    assert (config.store_bytes, config.min_segment_tokens) == (GIB // 2, 8)
    assert (config.compile_queue_depth, config.pass_budget_tokens) == (3, 512)


def test_chat_flags_reach_the_serving_classes() -> None:
    serving = parse(
        *("m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", "qwen3", "--chat-template", "{{ messages }}"),
        *("--default-chat-template-kwargs", '{"a": 1}'),
    ).serving
    assert serving.enable_auto_tool_choice
    assert (serving.tool_call_parser, serving.reasoning_parser) == ("hermes", "qwen3")
    assert serving.chat_template == "{{ messages }}"
    assert serving.default_chat_template_kwargs == {"a": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--blend-ratio", "1.5"),
        ("--blend-ratio", "nan"),
        ("--blend-check-layer", "-1"),
        ("--blend-store-gib", "-1"),
        ("--blend-min-segment-tokens", "0"),
        ("--port", "70000"),
        ("--blend-policy", "none", "--blend-ratio", "0.1"),
        ("--disable-log-stats",),
        ("--enable-auto-tool-choice",),
        ("--enable-lora",),
        ("--model", "/there/is/no/such/folder"),
        ("--model", "./nor/here"),
        ("--worker-extension-cls", "x.Y"),
        ("--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'),
        ("--default-chat-template-kwargs", "[1]"),
    ],
)
def test_flags_that_would_not_work_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UnusableOption):
        parse(*([] if "--model" in arguments else ["m"]), *arguments)
