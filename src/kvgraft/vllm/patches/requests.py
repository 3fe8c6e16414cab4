"""Prompts of vLLM's requests, and hashes of their blocks."""

import hashlib
import os
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash


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
        if runner.uses_mrope:
            runner._init_mrope_positions(known)
