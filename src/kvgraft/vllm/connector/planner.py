"""Plans of requests over vLLM's block pool, and registration of what requests have computed."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from kvgraft.core.cost_model import CostModel
from kvgraft.core.costs import TOKENS
from kvgraft.core.matches import Match
from kvgraft.core.pins import PinnedDocuments
from kvgraft.core.plan import Plan
from kvgraft.core.readings import spans_of
from kvgraft.core.report import unknown_reason
from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.vllm.connector.request_state import Candidate, RequestState
from kvgraft.vllm.groups import CacheGroups
from kvgraft.vllm.options import Control, RequestOptions
from kvgraft.vllm.pool import SharedPool
from kvgraft.vllm.settings import KVGraftSettings


class Planner:
    """Find known text for prompts, make plans, and register the blocks of requests.

    Args:
        kv_cache_manager: vLLM's KV cache manager.
        block_size: tokens per block.
        settings: settings of the server.
        pin_capacity: share of the pool that pinned blocks may take.
        anchors: token sequences that begin a segment, for near-duplicates.
    """

    def __init__(
        self,
        kv_cache_manager: Any,
        block_size: int,
        settings: KVGraftSettings,
        pin_capacity: float,
        anchors: Iterable[Sequence[int]] = (),
    ) -> None:
        self.groups = CacheGroups.of(kv_cache_manager, block_size)
        self.pool = SharedPool(kv_cache_manager.block_pool, block_size, self.groups)
        self.index = ReuseIndex(
            self.pool,
            max_depth=settings.max_depth,
            require_clean_context=settings.require_clean_context,
            similarity=settings.similarity,
            anchors=anchors,
        )
        if self.groups.local:
            self.index.is_whole = self.pool.complete

        self.pins = PinnedDocuments(self.pool, settings.watermark, pin_capacity)
        self.block_size = block_size
        self.cost_model = CostModel(settings.given_costs or TOKENS, settings.exactness_weight)

    def plan(self, state: RequestState, num_prefix: int) -> tuple[str | None, Candidate | None]:
        """Return a plan that is expected to be worth it, or the reason why there is none.

        Args:
            num_prefix: tokens that vLLM already has as an exact prefix.
        """
        tokens = np.array(state.token_ids, np.int64)

        # the documents are read on their own, so the plan needs no sources
        if state.whole:
            plan = Plan.for_documents(len(tokens), self.block_size, state.documents)
            return None, Candidate(plan, 0, [], np.zeros(0, np.int64))

        in_place = self._in_place(state, num_prefix)
        pages = tuple(state.prefix[block] for block in in_place)
        kept, asked = state.candidate, (num_prefix, len(tokens), pages)
        if (
            kept
            and (kept.num_prefix, kept.plan.num_tokens, kept.in_place) == asked
            and self._is_live(state, kept)
        ):
            return None, kept

        if state.is_trial:
            return "shadow", None

        free = np.ones(len(tokens), bool)
        free[:num_prefix] = False
        matches = self._match(state, tokens, free)
        reason: str | None = unknown_reason(len(tokens) - num_prefix, self.block_size)
        if matches:
            matches, reason = self._choose(state, matches, len(tokens), num_prefix)

        if not matches and not in_place:
            return reason, None

        prefix = range(num_prefix // self.block_size)
        hits, matches = self.index.label(dict(zip(prefix, state.prefix, strict=False)), matches)
        plan = Plan.for_prompt(len(tokens), self.block_size, prefix, matches, in_place, hits)

        sources = sorted(set((plan.graft_sources // self.block_size).tolist()))
        steps = tuple((match.start, match.depth + 1) for match in matches)
        versions, spans = self.pool.versions_of(sources), tuple(spans_of(matches))

        return None, Candidate(plan, num_prefix, sources, versions, steps, spans, pages)

    def documents(self, state: RequestState) -> list[Match]:
        """Return the stretches of a prompt that were read before, without its last token."""
        tokens = np.array(state.token_ids[:-1], np.int64)
        free = np.ones(len(tokens), bool)
        return self._match(state, tokens, free)

    def make_room(self, state: RequestState, num_blocks: int, spare: Container[int]) -> None:
        """Shed the namespace's pinned blocks if `num_blocks` more would pass the watermark.

        Args:
            spare: blocks that stay pinned.
        """
        self.pins.shed(state.pin_namespace, num_blocks, spare)

    def pin(self, candidate: Candidate) -> None:
        """Pin the sources, so that vLLM cannot reclaim them before they are copied."""
        self.pool.acquire(candidate.sources)

    def release(self, candidate: Candidate) -> None:
        """Unpin the sources and release the reserved pages."""
        self.pool.release(candidate.sources)
        self.groups.release(candidate.reserved)

    def offer(self, state: RequestState, blocks: list[int], num_tokens: int) -> None:
        """Register the full blocks of the first `num_tokens` tokens that vLLM has hashed.

        Blocks that hold or follow grafts are registered with their depth. Trials register nothing.
        """
        if state.is_trial:
            return

        offer, size = state.offer, self.block_size
        first, stop = offer.num_registered, min(num_tokens // size, len(blocks))
        stop = first + self.pool.num_hashed(blocks[first:stop])
        if stop > first:
            tokens = np.array(state.request.all_token_ids[: stop * size], np.int64)
            unlimited = isinstance(state.options, Control)
            self.index.offer(
                offer,
                tokens,
                np.array(blocks[:stop]),
                offer.depths(stop, size),
                unlimited=unlimited,
            )

    def clear(self) -> bool:
        """Unpin all pinned text and clear the index.

        Returns:
            False, with nothing changed, if other blocks are held too. vLLM refuses a reset then.
        """
        if self.pool.num_used > len(
            {held for page in self.pins.pages for held in self.pool.held(page)}
        ):
            return False
        for entry in self.pins.list():
            self.pins.delete(entry.name, entry.namespace)
        self.index.clear()
        return True

    def _match(self, state: RequestState, tokens: np.ndarray, free: np.ndarray) -> list[Match]:
        """Return the known segments that a request may graft.

        Sources must be complete in groups of local heads, unless the policy computes those heads.
        """
        query = self.index.query(
            tokens,
            (state.offer.scope, *state.shared),
            free,
            similar=state.matches_similar,
            whole=state.grafts_local_heads,
        )
        matches = self.index.match(query)
        state.report.too_deep_tokens = self.index.num_too_deep
        return matches

    def _choose(
        self, state: RequestState, matches: list[Match], num_tokens: int, num_prefix: int
    ) -> tuple[list[Match], str | None]:
        """Return the matches that are worth grafting, or the reason why none is."""
        approximate, report = state.continued is not None, state.report
        chosen, estimate = self.cost_model.choose(
            matches, num_tokens, num_prefix, state.policy_name, approximate=approximate
        )
        report.estimated_full_s, report.estimated_reuse_s = estimate.full_s, estimate.reuse_s
        return chosen, estimate.reason

    def _in_place(self, state: RequestState, num_prefix: int) -> list[int]:
        """Return the blocks of an approximate prefix that the policy can recover where they are.

        These blocks hold grafted tokens of an earlier prompt, and no other request reads them.
        """
        if state.continued is None or not isinstance(state.options, RequestOptions):
            return []
        # Block tables of groups with windows no longer hold these blocks.
        if not state.options.policy.recovers_in_place or self.groups.others:
            return []
        blocks = [
            block
            for block in state.continued.grafted_blocks
            if block < num_prefix // self.block_size
        ]
        return [block for block in blocks if not self.pool.ref_count(state.prefix[block])]

    def _is_live(self, state: RequestState, candidate: Candidate) -> bool:
        """Return True if the sources of a plan still hold the content that it was made for."""
        live = self.pool.is_live(np.array(candidate.sources, np.int64), candidate.versions).all()
        if self.groups.local and state.grafts_local_heads:
            return bool(live and self.pool.complete(candidate.sources).all())
        return bool(live)
