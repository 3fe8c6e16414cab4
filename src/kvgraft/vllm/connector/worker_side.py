"""Worker side of the connector: recoveries after the forward pass of every step."""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvgraft.core.costs import Costs
from kvgraft.kv.documents import DocumentStore
from kvgraft.kv.profiles import last_layers
from kvgraft.prefill.documents.library import Library
from kvgraft.vllm.compat.head_maps import find_head_map, map_of_rank
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.connector.metadata import Metadata, WorkerMetadata
from kvgraft.vllm.connector.store_worker import StoreWorker
from kvgraft.vllm.patches.requests import set_known_prompt
from kvgraft.vllm.prefill import measure_costs
from kvgraft.vllm.recovery import RecoveryQueue, RecoveryResult
from kvgraft.vllm.settings import KVGraftSettings
from kvgraft.vllm.warm_up import warm_up


class WorkerSide:
    """Recover prompts into this rank's share of the KV cache."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._runner: Any = None
        self._host: ModelHost | None = None
        self._queue: RecoveryQueue | None = None
        self._store: StoreWorker | None = None
        self._ended: dict[str, RecoveryResult] = {}
        self._reported: dict[str, RecoveryResult] = {}
        # last report of documents: bytes and number
        self._last_held = (0, 0)
        # measured costs until they are reported
        self._costs: Costs | None = None

    def attach(self, runner: Any) -> None:
        """Build everything that needs the loaded model.

        Our worker class calls this once the cache exists.

        Args:
            runner: vLLM's model runner.
        """
        self._runner = runner
        limit = max(
            self._config.model_config.max_model_len,
            self._config.scheduler_config.max_num_batched_tokens,
        )

        settings = KVGraftSettings.of(self._config)
        capacity = int(settings.document_gib * 2**30)
        num_layers = self._config.model_config.get_num_layers(self._config.parallel_config)
        host = self._host = ModelHost(runner, settings.kept_residual_layers(num_layers))

        library = Library(DocumentStore(capacity), last_layers(host.num_layers))
        head_map, rank = find_head_map(self._config), self._config.parallel_config.rank
        own_map = None if head_map is None else map_of_rank(head_map, self._config, rank)
        self._queue = RecoveryQueue(host, limit, library, own_map)

        longest = self._config.model_config.max_model_len

        with host.fused_operators():
            # CUDA kernels are compiled at their first call.
            if host.device.type == "cuda":
                warm_up(host, settings.default.policy, longest)
            if settings.given_costs is None:
                self._costs = measure_costs(host, longest)

        if settings.store is not None:
            parallel = self._config.parallel_config
            self._store = StoreWorker(host, settings.store, parallel.rank, parallel.world_size)

    def learn_prompts(self, metadata: Metadata) -> None:
        """Give the model runner the whole prompts of preempted requests before it resumes them."""
        for request_id, token_ids in metadata.prompts.items():
            set_known_prompt(self._runner, request_id, token_ids)

    def step(self, metadata: Metadata) -> None:
        """Take the step's orders, and recover as far as the step's budget allows.

        Runs after the step's forward pass, because every load of this connector is asynchronous to
        vLLM. So prefix blocks and sources that the same step computes are complete.
        """
        if self._queue is None:
            raise RuntimeError("the worker class never attached its model runner")
        if metadata.forget:
            self._queue.library.store.clear()
        self._queue.add(metadata.jobs)
        self._queue.cancel(metadata.cancelled)
        self._ended |= self._queue.advance(metadata.spare_tokens, metadata.costs)
        if self._store is not None:
            self._store.step(metadata.store)

    def take_results(self) -> KVConnectorTransferResults:
        """Return the requests whose recovery has ended. vLLM computes the failed ones again."""
        self._reported, self._ended = self._ended, {}
        failed = {name for name, outcome in self._reported.items() if outcome.failure}
        return KVConnectorTransferResults(
            finished_recving=set(self._reported), failed_recving=failed
        )

    def take_worker_metadata(self) -> WorkerMetadata | None:
        """Return outcomes of the last `take_results`, and other news for the scheduler."""
        outcomes, self._reported = self._reported, {}
        store = self._store.take_report() if self._store is not None else None
        documents = self._take_documents()
        stores = {} if store is None else {self._config.parallel_config.rank: store}
        costs, self._costs = self._costs, None
        adapters = {} if self._host is None else self._host.adapters.take_loaded()
        found = outcomes, stores, documents, costs, adapters
        return WorkerMetadata(*found) if any(found) else None

    def _take_documents(self) -> tuple[int, int] | None:
        """Return bytes and number of the documents in host memory, or None if unchanged."""
        held = (
            (0, 0)
            if self._queue is None
            else (self._queue.library.store.nbytes, len(self._queue.library.store))
        )
        if held == self._last_held:
            return None
        self._last_held = held
        return held

    def close(self) -> None:
        """Write what the store has not written yet."""
        if self._store is not None:
            self._store.close()
