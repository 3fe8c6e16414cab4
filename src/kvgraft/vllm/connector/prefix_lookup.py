"""What vLLM's prefix lookup finds for a request.

`HashMasking` gives a request block hashes that nobody else has, or those of an approximate prefix.
It is used by conversations that go on with the KV of the last turn (`Continuing`), by prompts of
which a part is kept (`PromptTruncation`), and by trials of a server in shadow mode (`ShadowMode`).
"""

import os
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.report import unknown_reason
from kvgraft.reuse.approximate_prefix import ApproximatePrefixCache, Continued
from kvgraft.reuse.retention import GraftedBlockRetention, is_copied
from kvgraft.vllm.compat import nonce_hash, set_prompt
from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.request_state import Candidate, RequestState
from kvgraft.vllm.groups import Reserved
from kvgraft.vllm.options import NOTE_PLAN
from kvgraft.vllm.pool import SharedPool

REMEMBERED = 256  # plans, of the watched requests that came last


SHORTEST_DOCUMENT = 64  # tokens of a document of which a part may be kept
LEAST_SHARE = 0.1  # of a prompt that documents make up


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


@dataclass(frozen=True, eq=False)
class Found:
    """A plan, and in which namespace it was made."""

    scope: bytes
    candidate: Candidate


class ShadowMode:
    """Remembers plans for a while; nothing that they would graft from is held."""

    def __init__(self, masking: HashMasking) -> None:
        self._masking = masking
        self._found: OrderedDict[str, Found] = OrderedDict()

    def note(self, state: RequestState, candidate: Candidate) -> None:
        """This would have been grafted; the plan is remembered if the API server may want to try
        it."""
        if (state.request.kv_transfer_params or {}).get(NOTE_PLAN):
            self._found[state.id] = Found(state.offer.scope, candidate)
            if len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
        state.report.shadow_graftable_tokens = int(
            (candidate.plan.grafted & ~candidate.plan.in_place).sum()
        )

    def try_out(self, state: RequestState, of: str) -> None:
        """A request with the prompt of an earlier one of its namespace is to graft what that would
        have: vLLM finds the same prefix as then, and nothing that has been computed since."""
        found = self._found.get(of)
        state.is_counted, state.recovery_key = True, None
        if found is not None and found.scope == state.offer.scope:
            state.candidate = replace(found.candidate, reserved=Reserved())
            self._masking.mask(state, found.candidate.num_prefix)

    def clear(self) -> None:
        """Forget all plans."""
        self._found.clear()


class PromptTruncation:
    """Puts a shorter prompt in the place of a request's own, and the whole one back if nothing can
    be kept after all.

    Args:
        known: finds the documents.
        masking: nobody may find the blocks of a shorter prompt: they have the hashes of a nonce.
    """

    def __init__(self, known: Planner, masking: HashMasking) -> None:
        self._known, self._masking = known, masking
        # prompts of requests of which workers know a shorter one
        self._restored: dict[str, list[int]] = {}

    def shorten(self, state: RequestState, policy: KeepsDocuments) -> None:
        """Let vLLM see as many tokens as the policy keeps at most, if enough of the prompt is
        known."""
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
        set_prompt(state.request, tokens[-num_kept:])  # only the last of them will ever be read
        self._masking.mask(state, 0)
        state.offer.mark_approximate([(0, 1)])

    def settle(self, state: RequestState, kept: np.ndarray) -> None:
        """A recovery has kept these tokens (`RecoveryResult.kept`): vLLM, which still waits for
        more, sees as many, and blocks behind them are free. If the request is preempted it keeps
        the same: its answer goes on with them."""
        request, num_kept = state.request, int(np.unpackbits(kept[0]).sum())
        num_prompt = len(state.whole) - sum(map(len, state.documents)) + num_kept
        state.kept = kept
        if num_prompt < request.num_prompt_tokens:
            set_prompt(request, list(state.whole[-num_prompt:]))
            self._masking.hide_again(state)
            request.num_computed_tokens = request.num_tokens
            self._known.groups.trim(state.id, request.num_tokens)

    def restore(self, state: RequestState, reason: str) -> None:
        """The request has its whole prompt again and is computed in full; if it was preempted, with
        the answer so far, which goes on as if all of that were a prompt."""
        self._masking.release(state)
        set_prompt(state.request, list(state.whole))
        if state.kept is not None:
            self._restored[state.id] = list(state.whole)
        state.whole, state.documents, state.hashes, state.kept = (), (), None, None
        state.offer.reset(state.num_exact)
        state.refusal = reason

    def take_restored(self) -> dict[str, list[int]]:
        """What workers must know before these requests are resumed, by request id: since the last
        call."""
        restored, self._restored = self._restored, {}
        return restored
