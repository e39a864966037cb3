"""The command `blendgate`: serve, models, bench.

vLLM takes seconds to import, so it is imported by the commands that need it.
"""

import argparse
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blend_gateway import demo_model

if TYPE_CHECKING:
    from fastapi import FastAPI

    from blend_gateway.serve_options import ServeCommand

_USAGE = """\
usage: blendgate COMMAND ...

commands:
  serve [MODEL] [flags]   serve a model; the demo model where none is named
                          (blendgate serve --help, --help=all, --help=blend)
  models [list]           show the models that can be prepared
  models prepare [NAME]   fetch one into the cache folder
  models verify [NAME]    compare it with its checksums
  bench [flags]           measure time to first token (blendgate bench --help)
  --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the command's own name; the process' by default.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "models": _models,
        "bench": _bench,
    }
    if command in ("-V", "--version", "version"):
        print(f"blendgate {_version()}")
        return 0
    if command in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    if command not in commands:
        print(f"blendgate: no command {command!r}\n\n{_USAGE}", end="", file=sys.stderr)
        return 2
    return commands[command](rest)


def _version() -> str:
    try:
        return importlib.metadata.version("blendgate")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed, run from its sources)"


def _models(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="blendgate models")
    parser.add_argument("action", nargs="?", choices=("list", "prepare", "verify"), default="list")
    parser.add_argument("name", nargs="?", default=demo_model.DEMO_MODEL)
    parsed = parser.parse_args(arguments)
    if parsed.action == "list":
        for model in demo_model.list_models():
            state = f"prepared in {model.folder}" if model.prepared else "not prepared"
            print(f"{model.name}: {model.description}; {state}")
        return 0
    try:
        if parsed.action == "verify":
            demo_model.verify(parsed.name)
            print(f"{parsed.name}: as it was prepared")
        else:
            print(demo_model.prepare(parsed.name, progress=print))
    except (demo_model.UnknownModel, demo_model.ModelPreparationError) as error:
        print(f"blendgate: {error}", file=sys.stderr)
        return 1
    return 0


def _bench(arguments: list[str]) -> int:
    from blend_engine.device import describe_device

    apart = os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0"
    worker = "in a process of its own" if apart else "in the engine's process"
    machine = f"{describe_device()}; vLLM's worker {worker}"
    status: int = importlib.import_module("blend_gateway.bench").main(arguments, machine=machine)
    return status


def _serve(arguments: list[str]) -> int:
    # Forked workers inherit locks of the threads that vLLM's imports have started.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from blend_gateway.serve_options import UnusableOption, parse_serve

    try:
        command = parse_serve(arguments, prepare_demo=_prepare_demo)
    except UnusableOption as error:
        print(f"blendgate serve: {error}", file=sys.stderr)
        return 2
    except demo_model.ModelPreparationError as error:
        print(f"blendgate serve: {error}", file=sys.stderr)
        return 1
    _configure_logging(command.log_level)
    return _run(command)


def _prepare_demo() -> Path:
    return demo_model.prepare(progress=lambda line: print(line, flush=True))


def _configure_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
    for name in ("blend_gateway", "blend_engine"):
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        logger.addHandler(handler)
        logger.propagate = False


def _run(command: "ServeCommand") -> int:
    import uvicorn

    app = build_app(command, on_fatal=lambda: setattr(server, "should_exit", True))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=command.settings.host,
            port=command.settings.port,
            log_level=command.log_level,
            access_log=command.access_log,
            timeout_graceful_shutdown=command.settings.drain_s,
            server_header=False,
        )
    )
    server.run()
    return 1 if app.state.runtime.failure is not None else 0


def build_app(command: "ServeCommand", *, on_fatal: Callable[[], None]) -> "FastAPI":
    """The application of a parsed `serve` command.

    Args:
        command: What to serve and how.
        on_fatal: Called when the engine failed to start.
    """
    from blend_engine.async_engine import BlendAsyncLLM
    from blend_gateway.app import create_app
    from blend_gateway.serving import VllmBackend

    async def start_backend(metrics: Any) -> VllmBackend:
        engine = await BlendAsyncLLM.start(
            command.engine_args, command.blend_config, check_layer=command.settings.check_layer
        )
        return VllmBackend(
            engine,
            engine,
            command.serving,
            command.settings,
            on_assembled=metrics.assemble_seconds.observe,
        )

    return create_app(command.settings, start_backend, on_fatal=on_fatal)


if __name__ == "__main__":
    sys.exit(main())
