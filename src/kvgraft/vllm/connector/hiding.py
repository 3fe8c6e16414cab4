"""Blocks that exact lookups must not find: those that hold or follow grafts, and what stands for a longer prompt."""

import os
from typing import Any

from kvgraft.vllm.compat import nonce_hash
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.pool import SharedPool


class Hiding:
    """Gives such blocks hashes that no content has; the true ones come back if the request is computed in full.

    Args:
        kv_cache_manager: vLLM's; it knows the blocks of a request.
    """

    def __init__(self, kv_cache_manager: Any, pool: SharedPool, block_size: int) -> None:
        self._manager, self._pool, self._block_size = kv_cache_manager, pool, block_size

    def first_block(self, state: RequestState) -> int:
        """The first hidden block of a request."""
        return state.offer.first_approximate // self._block_size

    def hide(self, state: RequestState, first_token: int) -> None:
        """Hide the block of this token and what follows; hashes of generated blocks chain from there. A request that
        was preempted may have hidden some before."""
        hashes, first = state.request.block_hashes, first_token // self._block_size
        self._pool.forget_hashes(hashes[max(first, self.first_block(state)) :])
        hidden, before = state.hashes or (len(hashes), [])
        state.hashes = (min(first, hidden), [*hashes[first:hidden], *before])
        state.offer.first_approximate = min(state.offer.first_approximate, first_token)
        nonce = os.urandom(32)
        for block in range(first, len(hashes)):
            hashes[block] = nonce_hash(nonce, block)

    def reveal(self, state: RequestState) -> None:
        """The request is computed in full after all: vLLM's own hashes stand again."""
        self.give_up(state)
        if state.hashes is not None:
            first, hashes = state.hashes
            del state.request.block_hashes[first:]
            state.request.block_hashes.extend(hashes)
            state.request.update_block_hashes()
        state.hashes, state.offer.first_approximate = None, state.num_exact

    def give_up(self, state: RequestState) -> None:
        """Let go of what a request has hidden, before it gives its blocks back: vLLM would take them for its most
        recent ones and push out others. Those that can be grafted from stay, and those that somebody else holds."""
        hidden = state.request.block_hashes[self.first_block(state) :]
        if hidden:
            own = set(self._manager.get_block_ids(state.id)[0])
            self._pool.forget_hashes(hidden, own, state.offer.approximate_pages)
