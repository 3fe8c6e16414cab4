"""Prompts that go on with what an earlier one has left in vLLM's blocks, grafts and all: no copies,
no recovery."""

from typing import Any

import numpy as np

from kvgraft.reuse.approximate_prefix import ApproximatePrefixCache
from kvgraft.reuse.retention import GraftedBlockRetention, is_copied
from kvgraft.vllm.connector.hash_masking import HashMasking
from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.request_state import RequestState


class Continuing:
    """Lets vLLM's own prefix lookup find approximate blocks for those requests that may go on with
    them.

    Args:
        known: vLLM's blocks, of which approximate ones have hashes that no content has; and what
            can be grafted.
        masking: gives a request such hashes, and its own ones back.
    """

    def __init__(self, known: Planner, masking: HashMasking) -> None:
        self._pool, self._index, self._masking = known.pool, known.index, masking
        self._exact_value = known.cost_model.exactness_weight
        self._known = ApproximatePrefixCache[Any](
            lambda key: bool(self._pool.find([key])), self._pool.num_pages
        )
        self._copies = GraftedBlockRetention(self._pool)

    def inject_approximate_prefix(self, state: RequestState) -> None:
        """vLLM is about to look for the beginning of a prompt, which has not run yet: it may do so
        in every step."""
        if state.recovery_key is None or state.whole or state.admitted:
            return
        self._copies.learn(self._known.take_lost(), self._index.take_lost())
        self._copies.trim()
        self._masking.undo(state)
        chains = self._chains(state, (len(state.token_ids) - 1) // self._pool.block_size)
        num_exact = self._pool.num_cached(state.request.block_hashes[: len(chains)])
        continued = self._known.find(state.recovery_key, chains, num_exact, self._exact_value)
        if continued is not None:
            self._masking.go_on(state, continued)

    def after_lookup(self, state: RequestState, num_prefix: int) -> None:
        """vLLM has found so many tokens. If windows have lost all that the prompt was to go on
        with, it is an ordinary one: nothing of it is approximate, and what it computes is no other
        version of what is known."""
        continued, size = state.continued, self._pool.block_size
        if (
            continued is not None
            and not state.admitted
            and num_prefix <= continued.first_block * size
        ):
            self._masking.undo(state)

    def remember(self, state: RequestState, blocks: list[int], num_tokens: int) -> None:
        """Let others go on with the approximate blocks that a request has computed, up to this
        token."""
        size, hashes = self._pool.block_size, state.request.block_hashes
        first, stop = (
            state.offer.first_approximate // size,
            min(num_tokens // size, len(blocks), len(hashes)),
        )
        if state.recovery_key is None or state.whole or stop <= max(first, state.num_continuable):
            return
        stop = first + self._pool.num_hashed(blocks[first:stop])
        depths = state.offer.depths(stop, size)[first:].tolist()
        plan, chains = state.plan, self._chains(state, stop)
        grafted = np.zeros(0, bool) if plan is None else plan.grafted_blocks
        is_grafted = np.pad(grafted, (0, stop))[first:stop].tolist()  # answers hold none
        left = hashes[first:stop], depths, is_grafted, state.offer.source
        num_added = self._known.add(state.recovery_key, chains, first, *left)
        state.num_continuable = first + num_added

    def leave(self, state: RequestState, blocks: list[int]) -> None:
        """A request gives its blocks back: those are noted that only prompts want which go on with
        it."""
        # fewer, if it was preempted and has not come back
        if stop := min(state.num_continuable, len(blocks)):
            depths = state.offer.depths(stop, self._pool.block_size)
            self._copies.add(blocks[:stop], is_copied(state.plan, depths, self._index.max_depth))

    def clear(self) -> None:
        """Nobody goes on with what was computed so far."""
        self._known.clear()
        self._copies = GraftedBlockRetention(self._pool)

    def _chains(self, state: RequestState, count: int) -> list[bytes]:
        """Keys of the first blocks of a request by all their tokens, in its namespace."""
        size = self._pool.block_size
        return state.offer.chains(state.token_ids[: count * size], size)
