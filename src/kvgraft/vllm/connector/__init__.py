"""The KV connector, vLLM's extension point for KV caches.

`scheduler_side` runs in the scheduler's process and plans. `worker_side` runs in each worker and
recovers KV.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvgraft.vllm.compat.support import check_supported
from kvgraft.vllm.connector.metadata import Metadata, WorkerMetadata
from kvgraft.vllm.connector.scheduler_side import SchedulerSide
from kvgraft.vllm.connector.worker_side import WorkerSide
from kvgraft.vllm.process_lifetime import leave_signals_to_server
from kvgraft.vllm.stats import PromMetrics, Stats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


class KVGraftConnector(KVConnectorBase_V1, SupportsHMA):
    """Graft known text into requests. vLLM sees an asynchronous load of the whole prompt.

    vLLM allocates the prompt's blocks and lets the request wait. The workers recover the prompt
    after the forward passes of one or more steps. Then vLLM computes the last token and decodes as
    usual.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        leave_signals_to_server()
        at_scheduler = role == KVConnectorRole.SCHEDULER
        self._scheduler_side = SchedulerSide(vllm_config) if at_scheduler else None
        self._worker_side = None if at_scheduler else WorkerSide(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no other engine receives the KV, so a preempted request keeps its output."""
        return False

    # Scheduler side

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler side; raises RuntimeError in a worker."""
        if self._scheduler_side is None:
            raise RuntimeError("this connector lives in a worker")
        return self._scheduler_side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self.scheduler_side.admit(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_side.end_of_schedule(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.on_outcomes(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler_side.finish(request, block_ids)

    def reset_cache(self) -> bool | None:
        return self.scheduler_side.forget()

    # Worker side

    @property
    def worker_side(self) -> WorkerSide:
        """The worker side; raises RuntimeError in the scheduler's process."""
        if self._worker_side is None:
            raise RuntimeError("this connector lives beside the scheduler")
        return self._worker_side

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Update prompts before the model runner reads the step's schedule."""
        self.worker_side.learn_prompts(_ours(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.step(_ours(self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker_side.take_results()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self.worker_side.take_worker_metadata()

    def shutdown(self) -> None:
        """Write what the store has not written yet."""
        if self._worker_side is not None:
            self._worker_side.close()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after its recovery."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: virtual blocks live in vLLM's own pool."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing was saved."""

    # Metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler_side.take_stats() if self._scheduler_side else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Stats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return PromMetrics(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)


def _ours(metadata: KVConnectorMetadata) -> Metadata:
    """Return the metadata as ours; raise TypeError if another connector made it."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"metadata of another connector: {type(metadata).__name__}")
    return metadata
