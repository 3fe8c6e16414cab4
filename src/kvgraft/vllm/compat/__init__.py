"""Everything that depends on vLLM's version or platform.

This module has the names by which vLLM loads KVGraft. `support` says what is supported. `model`
wraps the loaded model. `tests/vllm/test_contract.py` asserts each symbol and signature that the
package `kvgraft.vllm` uses.
"""

from typing import Any

from vllm.config import KVTransferConfig

WORKER_CLASS = "kvgraft.vllm.worker.KVGraftWorker"
CONNECTOR, CONNECTOR_MODULE = "KVGraftConnector", "kvgraft.vllm.connector"

# prefix of our model classes with an attention layer for each KV head
BY_HEAD = "KVGraftByHead"
# key in vLLM's additional_config: path of the head map
HEAD_MAP = "kvgraft_head_map"
# its digest, for caches of compiled models
HEAD_MAP_DIGEST = "kvgraft_head_map_digest"
# key in vLLM's additional_config: the flow that decode steps follow
FLOW = "kvgraft_flow"
# key in vLLM's additional_config: `allow_untested` for a server with a head map
ALLOW_UNTESTED = "kvgraft_allow_untested"


def transfer_config(**settings: Any) -> KVTransferConfig:
    """Return vLLM's `--kv-transfer-config` with these settings (see `KVGraftSettings`)."""
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )
