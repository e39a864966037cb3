"""How vLLM is told to load the connector."""

from vllm.config import KVTransferConfig

from blend_engine.config import BlendConfig

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
