"""How vLLM is told to load the connector, and what is refused before it loads anything."""

import asyncio
import multiprocessing
import threading
from collections.abc import Callable

from vllm.config import KVTransferConfig, ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from blend_engine.config import BlendConfig
from blend_engine.protocol import DEFAULT_CHECK_LAYER

WORKER_EXTENSION = "blend_engine.extension.BlendWorkerExtension"


def kv_transfer_config(config: BlendConfig, *, is_hybrid: bool = False) -> KVTransferConfig:
    """The transfer configuration that makes vLLM load the connector.

    Args:
        config: The connector's settings.
        is_hybrid: Whether the model mixes attention with recurrent layers.
    """
    return KVTransferConfig(
        kv_connector="HybridConnector" if is_hybrid else "BlendConnector",
        kv_connector_module_path="blend_engine.connector",
        kv_role="kv_both",
        kv_connector_extra_config=config.to_extra_config(),
    )


def check_arguments(engine_args: AsyncEngineArgs) -> None:
    """Refuse arguments that leave the connector no place or no way to tell what it did.

    Raises:
        ValueError: They name another connector or worker extension, or leave no statistics.
    """
    if engine_args.kv_transfer_config is not None or engine_args.worker_extension_cls:
        raise ValueError(
            "`kv_transfer_config` and `worker_extension_cls` are taken by the blend connector"
        )
    if engine_args.disable_log_stats:
        raise ValueError("`disable_log_stats` would lose the reports that say what was reused")


def check_model(model_config: ModelConfig, *, check_layer: int) -> None:
    """Refuse what needs no weights to be known.

    Args:
        model_config: As vLLM read it.
        check_layer: The check layer that requests will name.

    Raises:
        ValueError: The model is an encoder-decoder, or has no such layer.
    """
    if model_config.is_encoder_decoder:
        # vLLM would say so, too, in an assertion after the weights are loaded.
        raise ValueError(
            f"{model_config.model!r} is an encoder-decoder, and vLLM serves none with a KV "
            "connector"
        )
    last = model_config.get_total_num_hidden_layers() - 1
    # The default stands for the last layer of a model that has only one.
    if not 0 <= check_layer <= max(last, DEFAULT_CHECK_LAYER):
        raise ValueError(
            f"`check_layer` must be in [0, {last}], the layers of {model_config.model!r}, "
            f"got {check_layer!r}"
        )


async def load_in_thread(load: Callable[[], AsyncLLM]) -> AsyncLLM:
    """Loading takes minutes; in a thread, so that the caller's event loop answers probes meanwhile.

    Whoever stops waiting leaves no engine behind: its processes are ended, and an engine that comes
    up all the same is shut down.
    """
    is_abandoned = threading.Event()

    def run() -> AsyncLLM:
        engine = load()
        if is_abandoned.is_set():
            engine.shutdown()
        return engine

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        is_abandoned.set()
        for process in multiprocessing.active_children():
            process.kill()
        raise
