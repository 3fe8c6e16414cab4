"""Control of what vLLM's prefix lookup finds for a request.

`HashMasking` gives a request block hashes that no content has, or the hashes of an approximate
prefix. It has three users:

- `PrefixContinuation`: conversations that continue with the KV of the last turn.
- `PromptTruncation`: prompts that keep only a part of their documents.
- `ShadowMode`: trials of a server in shadow mode.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvgraft.core.approximate_prefix import ApproximatePrefixCache, Continued
from kvgraft.core.report import unknown_reason
from kvgraft.core.retention import GraftedBlockRetention, is_copied
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.vllm.compat import nonce_hash, set_prompt
from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.request_state import Candidate, RequestState
from kvgraft.vllm.groups import Reserved
from kvgraft.vllm.options import NOTE_PLAN
from kvgraft.vllm.pool import SharedPool

# plans to remember, of the requests that came last
REMEMBERED = 256


# Shorter documents (in tokens) are always kept whole.
SHORTEST_DOCUMENT = 64
# Prompts with a smaller share of documents are not truncated.
LEAST_SHARE = 0.1


class HashMasking:
    """Mask block hashes of requests, so that no exact lookup finds approximate blocks.

    The true hashes come back if the request is computed in full.

    Args:
        kv_cache_manager: vLLM's KV cache manager, which knows the blocks of a request.
        pool: pages of vLLM's block pool.
        block_size: tokens per block.
    """

    def __init__(self, kv_cache_manager: Any, pool: SharedPool, block_size: int) -> None:
        self._manager, self._pool, self._block_size = kv_cache_manager, pool, block_size

    def first_block(self, state: RequestState) -> int:
        """Return the number of the first masked block of a request."""
        return state.offer.first_approximate // self._block_size

    def mask(self, state: RequestState, first_token: int) -> None:
        """Mask the block that holds `first_token` and all blocks behind it.

        vLLM chains the hashes of later blocks from masked ones, so these are masked too. Some
        blocks may be masked already if the request was preempted or continues with an earlier one.
        """
        hashes, first = state.request.block_hashes, first_token // self._block_size
        self._pool.forget_hashes(hashes[max(first, self.first_block(state)) :])
        hidden, before = state.hashes or (len(hashes), [])
        state.hashes = (min(first, hidden), [*hashes[first:hidden], *before])
        state.num_continuable = min(state.num_continuable, first)
        self._rename(hashes, first)

    def mask_again(self, state: RequestState) -> None:
        """Mask all blocks of a request again, after its prompt has changed."""
        self._rename(state.request.block_hashes, 0)

    def inject(self, state: RequestState, continued: Continued[Any]) -> None:
        """Let vLLM find an approximate prefix as the prompt's own; mask the blocks behind it."""
        hashes, first, stop = (
            state.request.block_hashes,
            continued.first_block,
            continued.stop_block,
        )
        state.hashes, state.continued = (first, hashes[first:]), continued
        hashes[first:stop] = continued.keys
        self._rename(hashes, stop)
        state.offer.mark_approximate(continued.steps(self._block_size))

    def undo(self, state: RequestState) -> None:
        """Restore vLLM's own hashes, and mark nothing of the request as approximate."""
        if state.hashes is not None:
            first, hashes = state.hashes
            del state.request.block_hashes[first:]
            state.request.block_hashes.extend(hashes)
            state.request.update_block_hashes()
        state.hashes = state.continued = None
        state.offer.reset()

    def unmask(self, state: RequestState) -> None:
        """Unmask a request that is computed in full after all.

        If it continues with an approximate prefix, that prefix and all blocks behind it stay
        masked.
        """
        self.release(state)
        if state.continued is None:
            self.undo(state)
        else:
            state.offer.reset()
            state.offer.mark_approximate(state.continued.steps(self._block_size))

    def release(self, state: RequestState) -> None:
        """Make the masked blocks of a request reclaimable before it frees them.

        vLLM would otherwise treat them as most recently used and evict other blocks first. Blocks
        stay that others can graft from, can continue with, or hold.
        """
        first = max(self.first_block(state), state.num_continuable)
        if state.continued is not None:
            first = max(first, state.continued.stop_block)
        hidden = state.request.block_hashes[first:]
        if hidden:
            own = self._pool.groups.pages_of(self._manager.get_block_ids(state.id))
            self._pool.forget_hashes(hidden, own, state.offer.approximate_pages)

    def _rename(self, hashes: list[Any], first: int) -> None:
        """Give the blocks from number `first` on hashes made from a random nonce."""
        nonce = os.urandom(32)
        for block in range(first, len(hashes)):
            hashes[block] = nonce_hash(nonce, block)


class PrefixContinuation:
    """Let vLLM's prefix lookup find approximate blocks for requests that may continue with them.

    Args:
        known: the planner, whose pool holds the approximate blocks under masked hashes.
        masking: swaps the hashes of a request.
    """

    def __init__(self, known: Planner, masking: HashMasking) -> None:
        self._pool, self._index, self._masking = known.pool, known.index, masking
        self._exact_value = known.cost_model.exactness_weight
        self._known = ApproximatePrefixCache[Any](
            lambda key: bool(self._pool.find([key])), self._pool.num_pages
        )
        self._copies = GraftedBlockRetention(self._pool)

    def inject_approximate_prefix(self, state: RequestState) -> None:
        """Put an approximate prefix into the request's hashes before vLLM looks up its prefix.

        vLLM may look in every step until the request runs. Each call starts again from the true
        hashes.
        """
        if state.recovery_key is None or state.whole or state.admitted:
            return
        self._copies.learn(self._known.take_lost(), self._index.take_lost())
        self._copies.trim()
        self._masking.undo(state)
        chains = self._chains(state, (len(state.token_ids) - 1) // self._pool.block_size)
        num_exact = self._pool.num_cached(state.request.block_hashes[: len(chains)])
        continued = self._known.find(state.recovery_key, chains, num_exact, self._exact_value)
        if continued is not None:
            self._masking.inject(state, continued)

    def after_lookup(self, state: RequestState, num_prefix: int) -> None:
        """Undo the approximate prefix if vLLM has found none of its blocks.

        This happens when groups with windows have lost their pages. The request is an ordinary one
        then.

        Args:
            num_prefix: tokens that vLLM has found.
        """
        continued, size = state.continued, self._pool.block_size
        if (
            continued is not None
            and not state.admitted
            and num_prefix <= continued.first_block * size
        ):
            self._masking.undo(state)

    def remember(self, state: RequestState, blocks: list[int], num_tokens: int) -> None:
        """Let others continue with the approximate blocks of the first `num_tokens` tokens."""
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

        # Generated tokens behind the plan hold no grafts.
        is_grafted = np.pad(grafted, (0, stop))[first:stop].tolist()
        left = hashes[first:stop], depths, is_grafted
        num_added = self._known.add(state.recovery_key, chains, first, *left)
        state.num_continuable = first + num_added

    def leave(self, state: RequestState, blocks: list[int]) -> None:
        """Record the blocks of an ending request that only its continuations will want."""
        # A request that was preempted and not resumed has fewer blocks than before.
        if stop := min(state.num_continuable, len(blocks)):
            depths = state.offer.depths(stop, self._pool.block_size)
            self._copies.add(blocks[:stop], is_copied(state.plan, depths, self._index.max_depth))

    def clear(self) -> None:
        """Forget all approximate prefixes."""
        self._known.clear()
        self._copies = GraftedBlockRetention(self._pool)

    def _chains(self, state: RequestState, count: int) -> list[bytes]:
        """Return a key for each of the first `count` blocks: a hash of all tokens up to its end."""
        size = self._pool.block_size
        return state.offer.chains(state.token_ids[: count * size], size)


@dataclass(frozen=True, eq=False)
class Found:
    """A plan, with the scope (model and namespace) that it was made in."""

    scope: bytes
    candidate: Candidate


class ShadowMode:
    """Remember plans of a server in shadow mode for later trials. Their sources are not pinned."""

    def __init__(self, masking: HashMasking) -> None:
        self._masking = masking
        self._found: OrderedDict[str, Found] = OrderedDict()

    def note(self, state: RequestState, candidate: Candidate) -> None:
        """Report what the plan would have grafted, and remember the plan if a trial may follow."""
        if (state.request.kv_transfer_params or {}).get(NOTE_PLAN):
            self._found[state.id] = Found(state.offer.scope, candidate)
            if len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
        state.report.shadow_graftable_tokens = int(
            (candidate.plan.grafted & ~candidate.plan.in_place).sum()
        )

    def try_out(self, state: RequestState, of: str) -> None:
        """Give a trial request the plan of an earlier request of the same namespace.

        The request has the same prompt. It finds the same prefix as the earlier one did, and
        nothing that has been computed since.

        Args:
            of: vLLM's id of the earlier request.
        """
        found = self._found.get(of)
        state.is_counted, state.recovery_key = True, None
        if found is not None and found.scope == state.offer.scope:
            state.candidate = replace(found.candidate, reserved=Reserved())
            self._masking.mask(state, found.candidate.num_prefix)

    def clear(self) -> None:
        """Forget all plans."""
        self._found.clear()


class PromptTruncation:
    """Replace the prompt of a request by a shorter one, and restore it if nothing can be kept.

    Args:
        known: the planner, which finds the documents.
        masking: hides the blocks of shorter prompts from every lookup.
    """

    def __init__(self, known: Planner, masking: HashMasking) -> None:
        self._known, self._masking = known, masking
        # whole prompts of requests whose shorter prompt the workers know
        self._restored: dict[str, list[int]] = {}

    def shorten(self, state: RequestState, policy: KeepsDocuments) -> None:
        """Give vLLM a prompt as long as the policy keeps at most, if enough of the prompt is known.

        If not, the reason is set as the request's refusal.
        """
        known, tokens = self._known.documents(state), state.token_ids
        matches = [match for match in known if match.length >= SHORTEST_DOCUMENT]
        state.documents = tuple(range(match.start, match.start + match.length) for match in matches)
        lengths = [match.length for match in matches]
        if not matches:
            state.refusal = (
                "too_short" if known else unknown_reason(len(tokens), self._known.block_size)
            )
            return

        if sum(lengths) < LEAST_SHARE * len(tokens):
            state.refusal = "too_little_known"
            return

        for match in matches:
            self._known.pool.hit_counts[match.pages] += 1

        num_kept = len(tokens) - sum(lengths) + policy.num_kept(lengths)
        state.whole = tuple(tokens)

        # vLLM computes only the last of these tokens, so any others would do.
        set_prompt(state.request, tokens[-num_kept:])
        self._masking.mask(state, 0)
        state.offer.mark_approximate([(0, 1)])

    def settle(self, state: RequestState, kept: np.ndarray) -> None:
        """Fit the prompt to the tokens that a recovery has kept, and free the blocks behind it.

        vLLM still waits for the recovery then. A preempted request keeps the same tokens, because
        its answer continues from them.

        Args:
            kept: bits [L, T / 8] (see `RecoveryResult.kept`).
        """
        request, num_kept = state.request, int(np.unpackbits(kept[0]).sum())
        num_prompt = len(state.whole) - sum(map(len, state.documents)) + num_kept
        state.kept = kept
        if num_prompt < request.num_prompt_tokens:
            set_prompt(request, list(state.whole[-num_prompt:]))
            self._masking.mask_again(state)
            request.num_computed_tokens = request.num_tokens
            self._known.groups.trim(state.id, request.num_tokens)

    def restore(self, state: RequestState, reason: str) -> None:
        """Give the request its whole prompt again, so that it is computed in full.

        The answer of a preempted request continues behind the whole prompt.
        """
        self._masking.release(state)
        set_prompt(state.request, list(state.whole))
        if state.kept is not None:
            self._restored[state.id] = list(state.whole)
        state.whole, state.documents, state.hashes, state.kept = (), (), None, None
        state.offer.reset()
        state.refusal = reason

    def take_restored(self) -> dict[str, list[int]]:
        """Return the prompts restored since the last call, by request id.

        Workers must know them before vLLM resumes the requests.
        """
        restored, self._restored = self._restored, {}
        return restored
