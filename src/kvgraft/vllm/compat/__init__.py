"""Everything that depends on vLLM's version or platform: the names that vLLM loads us by, and small
dealings with it.

`support` says what is supported, `model` reaches the loaded model. `tests/vllm/test_contract.py`
asserts each symbol and signature used here and in the connector."""

import hashlib
import os
from collections.abc import Callable
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import BlockHash

WORKER_CLASS = "kvgraft.vllm.worker.KVGraftWorker"
CONNECTOR, CONNECTOR_MODULE = "KVGraftConnector", "kvgraft.vllm.connector"

# before the name of a model class: the same with an attention layer for each KV head
BY_HEAD = "KVGraftByHead"
HEAD_MAP = "kvgraft_head_map"  # in vLLM's additional_config: the path of the map
FLOW = "kvgraft_flow"  # likewise: the flow that decode steps follow
ALLOW_UNTESTED = "kvgraft_allow_untested"  # likewise: beside a map, the setting `allow_untested`


def transfer_config(**settings: Any) -> KVTransferConfig:
    """What vLLM's `--kv-transfer-config` must say; `settings` are those of `settings.py`."""
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )


def nonce_hash(nonce: bytes, block: int) -> Any:
    """A block hash that no content has."""
    return BlockHash(hashlib.sha256(nonce + block.to_bytes(8, "little")).digest())


def hide_answer(request: Any, block_size: int) -> None:
    """Give blocks that hold generated tokens hashes that no content has."""
    hasher, nonce = request._block_hasher, os.urandom(32)

    def hidden(request: Any) -> list[Any]:
        first = len(request.block_hashes)
        return [
            found
            if (block + 1) * block_size <= request.num_prompt_tokens
            else nonce_hash(nonce, block)
            for block, found in enumerate(hasher(request), first)
        ]

    request._block_hasher = hidden


def salt_hashes(request: Any, salt: str) -> None:
    """Give the blocks of a request hashes that only others with this salt have, beside its own
    one."""
    hasher = request._block_hasher

    def salted(request: Any) -> list[Any]:
        own, request.cache_salt = request.cache_salt, f"{salt}/{request.cache_salt or ''}"
        try:
            found: list[Any] = hasher(request)
        finally:
            request.cache_salt = own
        return found

    request._block_hasher = salted
    request.block_hashes.clear()
    request.update_block_hashes()


def set_prompt(request: Any, token_ids: list[int]) -> None:
    """Give a request that waits another prompt; block hashes are those of the new one. What workers
    know of one that has run is another thing: `set_known_prompt`."""
    request.prompt_token_ids, request.num_prompt_tokens = token_ids, len(token_ids)
    request._all_token_ids[:] = [*token_ids, *request.output_token_ids]
    request.block_hashes.clear()
    request.update_block_hashes()


def set_known_prompt(runner: Any, request_id: str, token_ids: list[int]) -> None:
    """Have a worker know another prompt of a preempted request before that is resumed.

    Args:
        runner: vLLM's model runner. V1 keeps the prompts of preempted requests and is told of their
            blocks only; V2 forgets them, and is told everything again.
    """
    known = getattr(runner, "requests", {}).get(request_id)
    if known is not None:
        known.prompt_token_ids, known.num_prompt_tokens = token_ids, len(token_ids)


def before_prefix_lookup(kv_cache_manager: Any, callback: Callable[[Any], object]) -> None:
    """Run callback with a request before vLLM looks for the beginning of its prompt: vLLM has no
    hook there."""
    look_up = kv_cache_manager.get_computed_blocks

    def get_computed_blocks(request: Any, *args: Any) -> Any:
        callback(request)
        return look_up(request, *args)

    kv_cache_manager.get_computed_blocks = get_computed_blocks


def on_cache_reset(kv_cache_manager: Any, callback: Callable[[], bool]) -> None:
    """Run callback before vLLM resets its prefix cache: vLLM has no hook there, and refuses while
    blocks are pinned. If it returns False the cache stays."""
    reset = kv_cache_manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        return callback() and bool(reset())

    kv_cache_manager.reset_prefix_cache = reset_prefix_cache
