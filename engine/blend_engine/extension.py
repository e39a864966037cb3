"""The worker extension: hands the loaded model to the connector's worker role.

vLLM mixes this class into its worker (`worker_extension_cls`); the engine then calls `blend_attach`
on every worker by name, once, after start-up.
"""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from blend_engine.connector import BlendConnector
from blend_engine.seeds import draw_only_for_finished_prompts


class BlendWorkerExtension:
    """Methods that vLLM's worker gains."""

    model_runner: Any

    def blend_attach(self) -> str | None:
        """Attach the model; None, or why it is not blended."""
        draw_only_for_finished_prompts(self.model_runner)
        connector = get_kv_transfer_group()
        assert isinstance(connector, BlendConnector)
        return connector.worker.attach_model(self.model_runner.get_model())
