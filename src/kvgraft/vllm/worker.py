"""Worker class of vLLM for the platform, extended to give the connector its model runner."""

from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from kvgraft.kernels.cpu.attention import SCORE_ROWS
from kvgraft.vllm.compat.head_maps import find_head_map
from kvgraft.vllm.compat.support import check_connector
from kvgraft.vllm.connector import KVGraftConnector
from kvgraft.vllm.patches.forced_tokens import add_forced_tokens
from kvgraft.vllm.settings import KVGraftSettings
from kvgraft.vllm.sparse.program import check_installed, install

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class KVGraftWorker(PlatformWorker):
    """Worker for `--worker-cls kvgraft.vllm.worker.KVGraftWorker`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        check_connector(self.vllm_config)
        install(self.vllm_config)
        super().load_model(*args, **kwargs)
        check_installed(self.vllm_config, self.model_runner.get_model())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(connector, KVGraftConnector):
            with torch.inference_mode():
                connector.worker_side.attach(self.model_runner)
            add_forced_tokens(self.model_runner)

    def determine_available_memory(self) -> int:
        """Return bytes for the KV cache, without those for a recovery of the longest prompt.

        A cache size that is set explicitly stays as it is.
        """
        available = int(super().determine_available_memory())
        if (
            self.cache_config.kv_cache_memory_bytes is not None
            or self.vllm_config.kv_transfer_config is None
        ):
            return available
        return int((available - recovery_bytes(self.vllm_config)) * kv_share(self.vllm_config))


def kv_share(config: Any) -> float:
    """Return the share of keys and values in the bytes kept per token.

    Residual streams take the remaining share.
    """
    model, parallel = config.model_config, config.parallel_config
    num_layers = model.get_num_layers(parallel)
    kv_size = kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model).itemsize
    kv = 2 * num_layers * model.get_num_kv_heads(parallel) * model.get_head_size() * kv_size
    streams = len(KVGraftSettings.of(config).kept_residual_layers(num_layers))
    return float(kv / (kv + streams * model.get_hidden_size() * model.dtype.itemsize))


def recovery_bytes(config: Any) -> int:
    """Return an upper bound of a recovery's bytes in addition to vLLM's own activations.

    Numbers per token:

    - two generations of (hidden, residual)
    - the queries of a layer, twice
    - the keys and values of a layer as read, and its keys twice in float32, for the Sparse-Q scores
    - two rows of these scores for each query head
    - with EAGLE-3: what enters the (usually three) layers that the drafter reads, twice
    - with a head map: the keys and values of a layer as computed, with reused ones, and as copied
      for windows; and a little more for the layouts of windows
    """
    model, parallel = config.model_config, config.parallel_config
    tokens = max(model.max_model_len, config.scheduler_config.max_num_batched_tokens)
    heads = model.get_num_attention_heads(parallel)
    width = model.get_num_kv_heads(parallel) * model.get_head_size()
    speculation = config.speculative_config
    generations = 4 if speculation is None or speculation.method != "eagle3" else 4 + 2 * 2 * 3
    copies = 4 if find_head_map(config) is None else 18
    numbers = (
        generations * model.get_hidden_size() + 2 * heads * model.get_head_size() + copies * width
    )
    float_numbers = 2 * width + 2 * SCORE_ROWS * heads
    return int(tokens * (numbers * model.dtype.itemsize + float_numbers * torch.float32.itemsize))
