"""Blocks that exact lookups must not find: those that hold or follow grafts, and what stands for a
longer prompt."""

import os
from typing import Any

from kvgraft.reuse.approximate_prefix import Continued
from kvgraft.vllm.compat import nonce_hash
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.pool import SharedPool


class HashMasking:
    """Gives such blocks hashes that no content has; the true ones come back if the request is
    computed in full.

    Args:
        kv_cache_manager: vLLM's; it knows the blocks of a request.
    """

    def __init__(self, kv_cache_manager: Any, pool: SharedPool, block_size: int) -> None:
        self._manager, self._pool, self._block_size = kv_cache_manager, pool, block_size

    def first_block(self, state: RequestState) -> int:
        """The first hidden block of a request."""
        return state.offer.first_approximate // self._block_size

    def mask(self, state: RequestState, first_token: int) -> None:
        """Hide the block of this token and what follows; hashes of generated blocks chain from
        there. A request that was preempted, or goes on with an earlier one, may have hidden some
        before."""
        hashes, first = state.request.block_hashes, first_token // self._block_size
        self._pool.forget_hashes(hashes[max(first, self.first_block(state)) :])
        hidden, before = state.hashes or (len(hashes), [])
        state.hashes = (min(first, hidden), [*hashes[first:hidden], *before])
        state.num_continuable = min(state.num_continuable, first)
        self._rename(hashes, first)

    def hide_again(self, state: RequestState) -> None:
        """Hide all blocks of a request that was hidden as a whole, and has another prompt since."""
        self._rename(state.request.block_hashes, 0)

    def go_on(self, state: RequestState, continued: Continued[Any]) -> None:
        """Let vLLM find, as the prompt's own, the blocks that it goes on with; what follows them is
        hidden."""
        hashes, first, stop = (
            state.request.block_hashes,
            continued.first_block,
            continued.stop_block,
        )
        state.hashes, state.continued = (first, hashes[first:]), continued
        hashes[first:stop] = continued.keys
        self._rename(hashes, stop)
        state.offer.mark_approximate(continued.steps(self._block_size), continued.spans)

    def undo(self, state: RequestState) -> None:
        """vLLM's own hashes stand again, and nothing is approximate."""
        if state.hashes is not None:
            first, hashes = state.hashes
            del state.request.block_hashes[first:]
            state.request.block_hashes.extend(hashes)
            state.request.update_block_hashes()
        state.hashes = state.continued = None
        state.offer.reset(state.num_exact)

    def unmask(self, state: RequestState) -> None:
        """The request is computed in full after all, behind what it goes on with: that stays
        hidden, and so does what follows it."""
        self.release(state)
        if state.continued is None:
            self.undo(state)
        else:
            state.offer.reset(state.num_exact)
            state.offer.mark_approximate(
                state.continued.steps(self._block_size), state.continued.spans
            )

    def release(self, state: RequestState) -> None:
        """Let go of what a request has hidden, before it gives its blocks back: vLLM would take
        them for its most recent ones and push out others. Those stay that others can graft from or
        go on with, or hold."""
        first = max(self.first_block(state), state.num_continuable)
        if state.continued is not None:
            first = max(first, state.continued.stop_block)
        hidden = state.request.block_hashes[first:]
        if hidden:
            own = self._pool.groups.pages_of(self._manager.get_block_ids(state.id))
            self._pool.forget_hashes(hidden, own, state.offer.approximate_pages)

    def _rename(self, hashes: list[Any], first: int) -> None:
        nonce = os.urandom(32)
        for block in range(first, len(hashes)):
            hashes[block] = nonce_hash(nonce, block)
