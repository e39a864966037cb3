"""Flags of `blendgate serve`: vLLM's engine flags, ours, and those of vLLM's chat route."""

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from blend_engine.config import BlendConfig
from blend_engine.protocol import Policy
from blend_gateway.serving.options import ServingOptions
from blend_gateway.settings import Settings

_log = logging.getLogger(__name__)
_GIB = 1 << 30
_DEMO_CACHE_BYTES = 2 * _GIB
_SCHEDULING_POLICY = "priority"
_DEFAULTS = Settings()
_BLEND_DEFAULTS = BlendConfig()


class UnusableOption(ValueError):
    """A flag, or a combination of flags, that would have no effect or a wrong one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """Everything `blendgate serve` needs to run."""

    engine_args: AsyncEngineArgs
    blend_config: BlendConfig
    serving: ServingOptions
    settings: Settings
    log_level: str
    access_log: bool


_FLAG_OF = {
    "recompute_ratio": "--blend-ratio",
    "check_layer": "--blend-check-layer",
    "port": "--port",
    "drain_s": "--drain-timeout",
    "store_bytes": "--blend-store-gib",
    "min_segment_tokens": "--blend-min-segment-tokens",
    "compile_queue_depth": "--blend-compile-queue-depth",
    "pass_budget_tokens": "--blend-pass-budget-tokens",
}
"""Settings by the names that their errors use."""


def make_parser() -> FlexibleArgumentParser:
    """The parser of `blendgate serve`."""
    parser = FlexibleArgumentParser(
        prog="blendgate serve",
        description="Serve a model, reusing documents' KV wherever they stand in a prompt.",
    )
    parser.add_argument("model_tag", nargs="?", help="The model; the same as --model.")
    _add_server_flags(parser)
    _add_blend_flags(parser)
    _add_chat_flags(parser)
    AsyncEngineArgs.add_cli_args(parser)
    if not any("--model" in action.option_strings for action in parser._actions):
        # vLLM leaves it out of its own help, where the model is positional.
        parser.add_argument("--model", default=None, help="Name or folder of the model.")
    # None says that the flag was not given. Compiles only yield to requests under `priority`.
    parser.set_defaults(
        model=None,
        dtype=None,
        enforce_eager=None,
        gpu_memory_utilization=None,
        scheduling_policy=_SCHEDULING_POLICY,
    )
    return parser


def parse_serve(
    arguments: Sequence[str],
    *,
    prepare_demo: Callable[[], Path],
    cpu_flags: Callable[[], frozenset[str]] | None = None,
) -> ServeCommand:
    """Read the command line.

    Args:
        arguments: What follows `serve`.
        prepare_demo: Called where no model is named; returns the demo model's folder.
        cpu_flags: The CPU's features; read from the kernel by default.

    Raises:
        UnusableOption: A flag would have no effect or a wrong one.
    """
    args = _parse(arguments)
    _check(args)
    _warn(args)
    _choose_model(args, prepare_demo)
    if args.dtype is None:
        args.dtype = _default_dtype(cpu_flags or _read_cpu_flags)
    args.enforce_eager = bool(args.enforce_eager)
    if args.gpu_memory_utilization is None:
        args.gpu_memory_utilization = AsyncEngineArgs.gpu_memory_utilization
    try:
        settings = Settings(
            host=args.host,
            port=args.port,
            policy=Policy(args.blend_policy),
            recompute_ratio=_DEFAULTS.recompute_ratio
            if args.blend_ratio is None
            else args.blend_ratio,
            check_layer=args.blend_check_layer,
            drain_s=args.drain_timeout,
        )
        blend_config = BlendConfig(
            store_bytes=round(args.blend_store_gib * _GIB),
            min_segment_tokens=args.blend_min_segment_tokens,
            compile_queue_depth=args.blend_compile_queue_depth,
            pass_budget_tokens=args.blend_pass_budget_tokens,
        )
    except ValueError as error:
        message = str(error)
        for name, flag in _FLAG_OF.items():
            message = message.replace(f"`{name}`", flag)
        raise UnusableOption(message) from error
    return ServeCommand(
        engine_args=AsyncEngineArgs.from_cli_args(args),
        blend_config=blend_config,
        serving=_serving_options(args),
        settings=settings,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
    )


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse; a mistake is one line, since the usage of all of vLLM's flags is hundreds."""
    parser = make_parser()
    parser.usage = "blendgate serve [MODEL] [flags]; blendgate serve --help=all lists them"
    args: Namespace = parser.parse_args(list(arguments))
    return args


def _add_server_flags(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("server", "Where and how the gateway listens.")
    group.add_argument("--host", default=_DEFAULTS.host, help="Address to listen on.")
    group.add_argument("--port", type=int, default=_DEFAULTS.port, help="Port to listen on.")
    group.add_argument(
        "--drain-timeout",
        type=int,
        default=_DEFAULTS.drain_s,
        help="Seconds that running requests get at shutdown.",
    )
    group.add_argument(
        "--uvicorn-log-level",
        default="info",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        help="Log level of the HTTP server and of the gateway.",
    )
    group.add_argument(
        "--disable-uvicorn-access-log", action="store_true", help="No line for every request."
    )


def _add_blend_flags(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("blend", "How documents' KV is stored and reused.")
    group.add_argument(
        "--blend-policy",
        choices=[policy.value for policy in Policy],
        default=_DEFAULTS.policy.value,
        help="Which reused tokens are recomputed where a request does not say.",
    )
    group.add_argument(
        "--blend-ratio",
        type=float,
        default=None,
        help="Share of reused tokens to recompute where a request does not say, in [0, 1]. "
        f"Default: {_DEFAULTS.recompute_ratio}.",
    )
    group.add_argument(
        "--blend-check-layer",
        type=int,
        default=_DEFAULTS.check_layer,
        help="Layer whose KV deviation the policy hkvd ranks by.",
    )
    group.add_argument(
        "--blend-store-gib",
        type=float,
        default=_BLEND_DEFAULTS.store_bytes / _GIB,
        help="Host memory for documents' KV, in GiB.",
    )
    group.add_argument(
        "--blend-min-segment-tokens",
        type=int,
        default=_BLEND_DEFAULTS.min_segment_tokens,
        help="Shorter documents and system prompts are always computed.",
    )
    group.add_argument(
        "--blend-compile-queue-depth",
        type=int,
        default=_BLEND_DEFAULTS.compile_queue_depth,
        help="Compiles waiting at most; beyond it a miss stays a miss.",
    )
    group.add_argument(
        "--blend-pass-budget-tokens",
        type=int,
        default=_BLEND_DEFAULTS.pass_budget_tokens,
        help="Tokens that blending may compute in one step; longer work is spread over steps. "
        "Default: --max-num-batched-tokens.",
    )


def _add_chat_flags(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("chat", "As the flags of `vllm serve`.")
    group.add_argument("--chat-template", help="Path or source of a Jinja chat template.")
    group.add_argument(
        "--chat-template-content-format", default="auto", choices=("auto", "string", "openai")
    )
    group.add_argument("--default-chat-template-kwargs", type=json.loads, default={})
    group.add_argument("--response-role", default="assistant")
    group.add_argument("--enable-auto-tool-choice", action="store_true")
    group.add_argument("--exclude-tools-when-tool-choice-none", action="store_true")
    group.add_argument("--tool-call-parser", help="Name of a parser, or one of the plugin's.")
    group.add_argument("--tool-parser-plugin", default="", help="Path of a module with parsers.")
    group.add_argument(
        "--tool-strict-level", default="auto", choices=("auto", "function", "parameter")
    )
    group.add_argument("--return-tokens-as-token-ids", action="store_true")


def _check(args: Namespace) -> None:
    if args.model_tag is not None and args.model is not None:
        raise UnusableOption("give the model once: as MODEL or as --model")
    if args.disable_log_stats:
        raise UnusableOption("--disable-log-stats would lose the reports that say what was reused")
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise UnusableOption("--enable-auto-tool-choice needs --tool-call-parser")
    if args.kv_transfer_config is not None or args.worker_extension_cls:
        raise UnusableOption(
            "--kv-transfer-config and --worker-extension-cls are taken by the blend connector"
        )
    if args.enable_lora:
        raise UnusableOption("--enable-lora: adapters cannot be named by requests here")
    if not isinstance(args.default_chat_template_kwargs, dict):
        raise UnusableOption("--default-chat-template-kwargs must be a JSON object")
    if args.blend_policy == Policy.NONE and args.blend_ratio:
        raise UnusableOption(
            f"--blend-ratio {args.blend_ratio} contradicts --blend-policy none, which recomputes "
            "nothing"
        )


def _warn(args: Namespace) -> None:
    """Say what a flag takes away, where that is a choice that one may make."""
    if args.scheduling_policy != _SCHEDULING_POLICY:
        _log.warning(
            "--scheduling-policy %s: compiles of documents do not yield to requests; they do "
            "under %r",
            args.scheduling_policy,
            _SCHEDULING_POLICY,
        )
    if args.blend_store_gib == 0:
        _log.warning("--blend-store-gib 0: no document's KV is kept, so every one is computed")


def _choose_model(args: Namespace, prepare_demo: Callable[[], Path]) -> None:
    args.model = args.model_tag if args.model is None else args.model
    if args.model is None:
        folder = prepare_demo()
        args.model = str(folder)
        args.served_model_name = args.served_model_name or [folder.name]
        _fit_demo(args)
    elif args.model.startswith(("/", "./", "../", "~")):
        # vLLM would take a folder that is not there for a name on a hub, and say so at length.
        folder = Path(args.model).expanduser()
        if not (folder / "config.json").is_file():
            raise UnusableOption(f"--model {args.model}: no folder with a config.json")
        args.model = str(folder)


def _fit_demo(args: Namespace) -> None:
    """Start the small demo model fast, and beside other programs.

    Left alone on a CPU, vLLM claims most of the host's memory and compiles for minutes.
    """
    if not current_platform.is_cpu():
        return
    args.enforce_eager = True if args.enforce_eager is None else args.enforce_eager
    is_sized = args.kv_cache_memory_bytes is not None or args.gpu_memory_utilization is not None
    if not is_sized and not envs.VLLM_CPU_KVCACHE_SPACE:
        args.kv_cache_memory_bytes = _DEMO_CACHE_BYTES


def _serving_options(args: Namespace) -> ServingOptions:
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    return ServingOptions(
        model=args.model,
        served_model_names=tuple(args.served_model_name or [args.model]),
        chat_template=args.chat_template,
        chat_template_content_format=args.chat_template_content_format,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        response_role=args.response_role,
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
        tool_call_parser=args.tool_call_parser,
        tool_strict_level=args.tool_strict_level,
        reasoning_parser=args.reasoning_parser or "",
        return_tokens_as_token_ids=args.return_tokens_as_token_ids,
    )


def _default_dtype(cpu_flags: Callable[[], frozenset[str]]) -> str:
    """VLLM's choice on a GPU; on a CPU the fastest.

    Checkpoints are mostly bf16, which vLLM then keeps. Without AMX its prefills are slower than
    fp32's: three times on AVX2, one and a half to two times on a Xeon with AVX512-BF16 (matrix
    products of 2,304 tokens by 576 x 576 and 576 x 1,536, one thread).
    """
    if not current_platform.is_cpu() or "amx_bf16" in cpu_flags():
        return "auto"
    return "float32"


def _read_cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
