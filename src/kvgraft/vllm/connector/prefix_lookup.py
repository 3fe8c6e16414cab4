"""Control of what vLLM's prefix lookup finds for a request.

`HashMasking` gives a request block hashes that no content has, or the hashes of an approximate
prefix: a conversation continues with the KV of its last turn. It has two users:

- `PromptTruncation`: prompts that keep only a part of their documents.
- `ShadowMode`: trials of a server in shadow mode.
"""

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgraft.core.admission import Admission, Reuse
from kvgraft.core.approximate_prefix import Continued
from kvgraft.core.report import unknown_reason
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import NOTE_PLAN, TRIAL_OF
from kvgraft.vllm.patches.requests import nonce_hash, set_prompt
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
        admission: finds approximate prefixes.
    """

    def __init__(self, kv_cache_manager: Any, admission: Admission[SharedPool]) -> None:
        self._manager, self._admission, self._pool = kv_cache_manager, admission, admission.pool
        self._block_size = admission.pool.block_size

    def blocks_of(self, state: RequestState) -> list[int]:
        """Return the request's blocks in the main KV cache group, whose hashes identify
        content."""
        blocks: list[int] = self._manager.get_block_ids(state.id)[self._pool.groups.main]
        return blocks

    def inject_approximate_prefix(self, state: RequestState) -> None:
        """Put an approximate prefix into the request's hashes before vLLM looks up its prefix.

        vLLM may look in every step until the request runs. Each call starts again from the true
        hashes.
        """
        if state.recovery_key is None or state.whole or state.admitted:
            return
        self._admission.make_room()
        self.undo(state)
        hashes = state.request.block_hashes[: (len(state.token_ids) - 1) // self._block_size]
        continued = self._admission.find_approximate(state, self._pool.num_cached(hashes))
        if continued is not None:
            self._inject(state, continued)

    def after_lookup(self, state: RequestState, num_prefix: int) -> None:
        """Undo the approximate prefix if vLLM has found none of its blocks.

        This happens when groups with windows have lost their pages. The request is an ordinary one
        then.

        Args:
            num_prefix: tokens that vLLM has found.
        """
        continued = state.continued
        if (
            continued is not None
            and not state.admitted
            and num_prefix <= continued.first_block * self._block_size
        ):
            self.undo(state)

    def first_block(self, state: RequestState) -> int:
        """Return the number of the first masked block of a request."""
        return state.provenance.first_approximate // self._block_size

    def mask(self, state: RequestState, first_token: int) -> None:
        """Mask the block that holds `first_token` and all blocks behind it.

        vLLM chains the hashes of later blocks from masked ones, so these are masked too. Some
        blocks may be masked already if the request was preempted or continues with an earlier one.
        """
        hashes, first = state.request.block_hashes, first_token // self._block_size
        self._pool.forget_hashes(hashes[max(first, self.first_block(state)) :])
        hidden, before = state.hashes or (len(hashes), [])
        state.hashes = (min(first, hidden), [*hashes[first:hidden], *before])
        state.provenance.num_continuable = min(state.provenance.num_continuable, first)
        self._rename(hashes, first)

    def mask_again(self, state: RequestState) -> None:
        """Mask all blocks of a request again, after its prompt has changed."""
        self._rename(state.request.block_hashes, 0)

    def _inject(self, state: RequestState, continued: Continued[Any]) -> None:
        """Let vLLM find an approximate prefix as the prompt's own; mask the blocks behind it."""
        hashes, first, stop = (
            state.request.block_hashes,
            continued.first_block,
            continued.stop_block,
        )
        state.hashes, state.continued = (first, hashes[first:]), continued
        hashes[first:stop] = continued.keys
        self._rename(hashes, stop)
        self._admission.mark(state)

    def undo(self, state: RequestState) -> None:
        """Restore vLLM's own hashes, and mark nothing of the request as approximate."""
        if state.hashes is not None:
            first, hashes = state.hashes
            del state.request.block_hashes[first:]
            state.request.block_hashes.extend(hashes)
            state.request.update_block_hashes()
        state.hashes = state.continued = None
        state.provenance.reset()

    def unmask(self, state: RequestState) -> None:
        """Unmask a request that is computed in full after all.

        If it continues with an approximate prefix, that prefix and all blocks behind it stay
        masked.
        """
        self.release(state)
        if state.continued is None:
            self.undo(state)
        else:
            self._admission.mark(state)

    def release(self, state: RequestState) -> None:
        """Make the masked blocks of a request reclaimable before it frees them.

        vLLM would otherwise treat them as most recently used and evict other blocks first. Blocks
        stay that others can graft from, can continue with, or hold.
        """
        first = max(self.first_block(state), state.provenance.num_continuable)
        if state.continued is not None:
            first = max(first, state.continued.stop_block)
        hidden = state.request.block_hashes[first:]
        if hidden:
            own = self._pool.groups.pages_of(self._manager.get_block_ids(state.id))
            self._pool.forget_hashes(hidden, own, state.provenance.approximate_pages)

    def _rename(self, hashes: list[Any], first: int) -> None:
        """Give the blocks from number `first` on hashes made from a random nonce."""
        nonce = os.urandom(32)
        for block in range(first, len(hashes)):
            hashes[block] = nonce_hash(nonce, block)


@dataclass(frozen=True, eq=False)
class Found:
    """A decision, with the scope (model and namespace) that it was made in."""

    scope: bytes
    reuse: Reuse


class ShadowMode:
    """Remember plans of a server in shadow mode for later trials. Their sources are not pinned."""

    def __init__(self, masking: HashMasking) -> None:
        self._masking = masking
        self._found: OrderedDict[str, Found] = OrderedDict()

    def note(self, state: RequestState, reuse: Reuse) -> None:
        """Report what the plan would have grafted, and remember the plan if a trial may follow."""
        if (state.request.kv_transfer_params or {}).get(NOTE_PLAN):
            self._found[state.id] = Found(state.provenance.scope, reuse)
            if len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
        state.report.shadow_graftable_tokens = int(
            (reuse.plan.grafted & ~reuse.plan.in_place).sum()
        )

    def try_out(self, state: RequestState) -> None:
        """Give a trial request the plan of the earlier request that it names, of its namespace.

        The request has the same prompt. It finds the same prefix as the earlier one did, and
        nothing that has been computed since.
        """
        found = self._found.get(str(state.request.kv_transfer_params[TRIAL_OF]))
        state.is_counted, state.recovery_key = True, None
        if found is not None and found.scope == state.provenance.scope:
            state.candidate = found.reuse
            self._masking.mask(state, found.reuse.num_known)

    def clear(self) -> None:
        """Forget all plans."""
        self._found.clear()


class PromptTruncation:
    """Replace the prompt of a request by a shorter one, and restore it if nothing can be kept.

    Args:
        admission: finds the documents.
        masking: hides the blocks of shorter prompts from every lookup.
    """

    def __init__(self, admission: Admission[SharedPool], masking: HashMasking) -> None:
        self._admission, self._masking = admission, masking
        # whole prompts of requests whose shorter prompt the workers know
        self._restored: dict[str, list[int]] = {}

    def shorten(self, state: RequestState, policy: KeepsDocuments) -> None:
        """Give vLLM a prompt as long as the policy keeps at most, if enough of the prompt is known.

        If not, the reason is set as the request's refusal.
        """
        pool, index, tokens = self._admission.pool, self._admission.index, state.token_ids
        # The last token is always computed.
        free = np.ones(len(tokens) - 1, bool)
        query = self._admission.query(state, np.array(tokens[:-1], np.int64), free)
        known = index.match(query, state.report)
        matches = [match for match in known if match.length >= SHORTEST_DOCUMENT]
        lengths = [match.length for match in matches]
        if not matches:
            state.refusal = "too_short" if known else unknown_reason(len(tokens), pool.block_size)
            return

        if sum(lengths) < LEAST_SHARE * len(tokens):
            state.refusal = "too_little_known"
            return

        for match in matches:
            pool.hit_counts[match.pages] += 1

        num_kept = len(tokens) - sum(lengths) + policy.num_kept(lengths)
        state.whole = tuple(tokens)
        state.documents = tuple(range(match.start, match.start + match.length) for match in matches)

        # vLLM computes only the last of these tokens, so any others would do.
        set_prompt(state.request, tokens[-num_kept:])
        self._masking.mask(state, 0)
        state.provenance.mark_approximate([(0, 1)])

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
            self._admission.pool.groups.trim(state.id, request.num_tokens)

    def restore(self, state: RequestState, reason: str) -> None:
        """Give the request its whole prompt again, so that it is computed in full.

        The answer of a preempted request continues behind the whole prompt.
        """
        self._masking.release(state)
        set_prompt(state.request, list(state.whole))
        if state.kept is not None:
            self._restored[state.id] = list(state.whole)
        state.whole, state.documents, state.hashes, state.kept = (), (), None, None
        state.provenance.reset()
        state.refusal = reason

    def take_restored(self) -> dict[str, list[int]]:
        """Return the prompts restored since the last call, by request id.

        Workers must know them before vLLM resumes the requests.
        """
        restored, self._restored = self._restored, {}
        return restored
