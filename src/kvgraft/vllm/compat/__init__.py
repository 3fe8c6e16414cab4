"""Everything that depends on vLLM's version or platform.

This module has the names by which vLLM loads KVGraft, and small changes to vLLM's objects.
`support` says what is supported. `model` wraps the loaded model. `tests/vllm/test_contract.py`
asserts each symbol and signature used here and in the connector.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any

from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import BlockHash

WORKER_CLASS = "kvgraft.vllm.worker.KVGraftWorker"
CONNECTOR, CONNECTOR_MODULE = "KVGraftConnector", "kvgraft.vllm.connector"

# prefix of our model classes with an attention layer for each KV head
BY_HEAD = "KVGraftByHead"
# key in vLLM's additional_config: path of the head map
HEAD_MAP = "kvgraft_head_map"
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


def nonce_hash(nonce: bytes, block: int) -> Any:
    """Return a block hash that no content has."""
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
    """Add a salt to the block hashes of a request, in addition to its own cache salt."""
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
    """Replace the prompt of a waiting request and rehash its blocks.

    If the request has run before, `set_known_prompt` must update the workers too.
    """
    request.prompt_token_ids, request.num_prompt_tokens = token_ids, len(token_ids)
    request._all_token_ids[:] = [*token_ids, *request.output_token_ids]
    request.block_hashes.clear()
    request.update_block_hashes()


def set_known_prompt(runner: Any, request_id: str, token_ids: list[int]) -> None:
    """Replace the prompt of a preempted request in a worker before vLLM resumes the request.

    Args:
        runner: vLLM's model runner. V1 keeps the prompts of preempted requests and receives only
            their blocks again. V2 forgets them and receives everything again.
    """
    known = getattr(runner, "requests", {}).get(request_id)
    if known is not None:
        known.prompt_token_ids, known.num_prompt_tokens = token_ids, len(token_ids)


def before_prefix_lookup(kv_cache_manager: Any, callback: Callable[[Any], object]) -> None:
    """Call `callback` with a request before vLLM looks up its prefix. vLLM has no hook there."""
    look_up = kv_cache_manager.get_computed_blocks

    def get_computed_blocks(request: Any, *args: Any) -> Any:
        callback(request)
        return look_up(request, *args)

    kv_cache_manager.get_computed_blocks = get_computed_blocks


def on_cache_reset(kv_cache_manager: Any, callback: Callable[[], bool]) -> None:
    """Call `callback` before vLLM resets its prefix cache; keep the cache if it returns False.

    vLLM has no hook there, and refuses the reset while blocks are pinned.
    """
    reset = kv_cache_manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        return callback() and bool(reset())

    kv_cache_manager.reset_prefix_cache = reset_prefix_cache
