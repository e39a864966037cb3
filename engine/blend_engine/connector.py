"""The connectors that vLLM loads. They choose a role and forward; no logic."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from blend_engine.attached import UnsupportedModel, bytes_per_token
from blend_engine.budget import PassBudget
from blend_engine.config import BlendConfig
from blend_engine.messages import BlendMetadata
from blend_engine.prom_metrics import BlendPromMetrics
from blend_engine.reporting import BlendStats
from blend_engine.scheduler import BlendScheduler
from blend_engine.worker import BlendWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class BlendConnector(KVConnectorBase_V1):
    """vLLM's connector contract over the two roles. `kv_role` must be ``kv_both``."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: BlendScheduler | None = None
        self._worker: BlendWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            transfer = vllm_config.kv_transfer_config
            assert transfer is not None
            dtype = vllm_config.model_config.dtype
            assert isinstance(dtype, torch.dtype)
            try:
                token_bytes = bytes_per_token(kv_cache_config, dtype.itemsize)
            except UnsupportedModel:
                # The worker role refuses this model with the reason, so nothing is ever stored;
                # the engine serves it exactly.
                token_bytes = 1
            config = BlendConfig.from_extra_config(transfer.kv_connector_extra_config)
            step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self._scheduler = BlendScheduler(
                config,
                block_size=vllm_config.cache_config.block_size,
                bytes_per_token=token_bytes,
                num_layers=sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups),
                budget=PassBudget.of_steps(config.pass_budget_tokens or step_tokens, step_tokens),
            )
        else:
            self._worker = BlendWorker(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is handed to another engine, so a preempted request loses nothing."""
        return False

    @property
    def scheduler(self) -> BlendScheduler:
        """The scheduler role, in the process that has it."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> BlendWorker:
        """The worker role, in the process that has it."""
        assert self._worker is not None
        return self._worker

    # Worker role.

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register_kv_caches(kv_caches)

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        self.worker.run(metadata)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the forward starts."""

    @override
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is harvested from live requests (decision 2)."""

    @override
    def wait_for_save(self) -> None:
        """Captures are complete when their pass is."""

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing is sent; received is what an asynchronous pass has filled."""
        return None, self.worker.take_received() or None

    @override
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_ack()

    # Scheduler role.

    @override
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids: Sequence[int] = blocks.get_block_ids()[0]
        self.scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    @override
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler.build_connector_meta(scheduler_output)

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.update_connector_output(connector_output)

    @override
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.request_finished(request)
        return False, None

    @override
    def reset_cache(self) -> bool | None:
        return self.scheduler.reset_cache()

    @override
    def get_kv_connector_stats(self) -> BlendStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        return BlendStats(data=data or {})

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> BlendPromMetrics:
        return BlendPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class HybridConnector(BlendConnector, SupportsHMA):
    """For models with recurrent layers: vLLM starts them under its hybrid cache manager alone.

    They are never blended. `BlendConnector` does not take that manager, since it would give null
    blocks to the sliding-window layers of models that are.
    """

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])
