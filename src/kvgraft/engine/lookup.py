"""Cache lookup for a prompt: exact prefix blocks, text that can be grafted, and local heads' pages
of both."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.approximate_prefix import ApproximatePrefixCache, Continued
from kvgraft.core.cost_model import CostEstimate, CostModel
from kvgraft.core.keys import chain_hashes
from kvgraft.core.matches import Match, in_blocks
from kvgraft.core.plan import Plan
from kvgraft.core.retention import GraftedBlockRetention, is_copied
from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.lists import LocalPages
from kvgraft.kv.pages import PagePool, distinct

# Approximate blocks have random keys of this size in the prefix cache; no content hashes to them.
KEY_BYTES = 32


@dataclass(frozen=True)
class Reuse:
    """Cached content that a sequence reuses.

    Attributes:
        hits: block -> page of the first list, exact or `continued`.
        matches: text that is grafted.
        estimate: cost estimate behind the choice of matches; None without a cost model.
        copied: hit blocks whose local pages are copied, since local heads see them.
        continued: approximate hits that the prompt continues from unchanged.
    """

    hits: dict[int, int]
    matches: list[Match]
    estimate: CostEstimate | None
    copied: list[int]
    continued: Continued[bytes] | None = None

    @property
    def sources(self) -> np.ndarray:
        """Distinct pages that are grafted from, ascending: int64 [n]."""
        return distinct(
            np.concatenate([np.zeros(0, np.int64), *(match.pages for match in self.matches)])
        )


class CacheLookup:
    """Content of a page pool by its tokens.

    Args:
        index: index of text that can be grafted.
        continuation: whether prompts continue from approximate blocks of earlier prompts.
        cost_model: decides what is grafted; None grafts all matches.
    """

    def __init__(
        self,
        pool: PagePool,
        layout: StreamLayout,
        index: ReuseIndex,
        *,
        continuation: bool = True,
        cost_model: CostModel | None = None,
    ) -> None:
        self.pool = pool
        self.layout = layout
        self.index = index
        self.continuation = continuation
        self.cost_model = cost_model
        self.local_pages = LocalPages(pool, layout.num_local_lists)
        if layout.num_local_lists:
            index.is_whole = self.local_pages.complete
        self.continuations = ApproximatePrefixCache[bytes](
            lambda key: pool.lookup(key) is not None, pool.num_pages
        )
        self.copies = GraftedBlockRetention(pool)

    def find(self, sequence: SequenceState, grafts: bool) -> Reuse:
        """Return the cached content that a prompt can reuse.

        Grafts need complete pages in every list. Full recomputation needs only the pages that local
        heads see.
        """
        chains = self._chains(sequence)
        known = self._exact_hits(chains)
        if not self.layout.num_local_lists:
            continued = (
                self._continue(sequence, chains, known) if grafts and self.continuation else None
            )
            if not grafts:
                return Reuse(known, [], None, [])
            return Reuse(
                known,
                *self._matches(sequence, known, approximate=continued is not None),
                [],
                continued,
            )

        complete = self.local_pages.complete(known.values())
        whole = {
            block: page for (block, page), held in zip(known.items(), complete, strict=True) if held
        }
        matches, estimate = self._matches(sequence, whole) if grafts else ([], None)
        if matches:
            return Reuse(whole, matches, estimate, list(whole))

        layout, size, hits, copied = self.layout, self.pool.block_size, {}, []
        # Walk backwards: `computed` is the first block that this prompt must compute.
        computed = (sequence.num_prompt - 1) // size
        for block in range(computed - 1, -1, -1):
            seen = bool(layout.seen(np.array(block), computed * size, size))
            if block not in known or (seen and block not in whole):
                computed = block
            else:
                hits[block] = known[block]
                copied += [block] if seen else []

        return Reuse(dict(reversed(hits.items())), [], estimate, copied)

    def offer(self, sequence: SequenceState) -> None:
        """Register the full blocks that the sequence has computed since the last call, so that
        others find them.

        Exact blocks become prefix blocks and virtual blocks. Blocks that hold or follow grafted KV
        are approximate: no prefix lookup finds them. Only prompts that begin with the whole text
        continue from them, and they are virtual blocks up to the depth that the configuration
        allows. Nothing is registered of a prompt whose documents were kept in part.
        """
        size, first = self.pool.block_size, sequence.offer.num_registered
        stop = sequence.num_computed // size
        if not sequence.request.remember or sequence.documents or stop <= first:
            return

        pages = sequence.pages.pages
        tokens = sequence.first_tokens(stop * size)
        chain = sequence.offer.chains(tokens, size)
        depths = sequence.depths(stop)
        exact = first + np.flatnonzero(depths[first:stop] == 0)
        for block in exact.tolist():
            self.pool.publish(int(pages[0, block]), chain[block])

        self._offer_continuation(sequence, chain, depths)
        found = np.array(self.pool.lookup_all([chain[block] for block in exact.tolist()]), np.int64)
        self.local_pages.record(found, pages[1:, exact])
        self.local_pages.record(pages[0, first:stop], pages[1:, first:stop])
        self.index.offer(sequence.offer, tokens, pages[0, :stop], depths)

    def leave(self, sequence: SequenceState) -> None:
        """Note, before a sequence releases its pages, which of them only prompts that continue from
        it can use."""
        if sequence.continuation_keys:
            stop = sequence.offer.num_registered
            is_copy = is_copied(sequence.admitted_plan, sequence.depths(stop), self.index.max_depth)
            self.copies.add(sequence.pages.pages[0, :stop].tolist(), is_copy)

    def make_room(self) -> None:
        """Release grafted copies that occupy room for pages in greater demand."""
        self.copies.learn(self.continuations.take_lost(), self.index.take_lost())
        self.copies.trim()

    def learn(self, sequence: SequenceState, num_computed: float) -> None:
        """Update the cost model after a pass that computed `num_computed` tokens in all layers."""
        plan = sequence.admitted_plan
        if self.cost_model is not None:
            num_new = int(plan.fresh.sum())
            self.cost_model.learn(
                str(sequence.policy), num_computed - num_new, int(plan.grafted.sum()), num_new
            )

    def source_slots(self, plan: Plan) -> Tensor:
        """Current slots of the grafted tokens of a plan in every list: int64 [lists, g], -1 where a
        list has lost one."""
        page, offset = np.divmod(plan.graft_sources.numpy(), self.pool.block_size)
        pages = np.vstack((page[None], self.local_pages.of(page).T))  # [lists, g]
        slots = np.where(pages < 0, -1, pages * self.pool.block_size + offset)
        return torch.from_numpy(np.ascontiguousarray(slots))

    def find_prefix(self, tokens: list[int], scope: bytes) -> list[int]:
        """Return the pages of the leading full blocks of a token sequence, up to the first that is
        not cached."""
        pages = []
        for page in self.pool.lookup_all(
            chain_hashes(np.array(tokens, np.int64), self.pool.block_size, scope)
        ):
            if page is None:
                break
            pages.append(page)
        return pages

    def payload(self, pages: list[int]) -> list[int]:
        """Return the first pages of a text with the local pages of their sinks and last window.

        Local pages that a running sequence holds are left out, since it will release them.
        """
        blocks = np.arange(len(pages))
        seen = self.layout.seen(blocks, len(pages) * self.pool.block_size, self.pool.block_size)
        local = self.local_pages.of(np.array(pages, np.int64)[seen])
        return [*pages, *local[(local >= 0) & (self.pool.ref_counts[local] == 0)].tolist()]

    def _chains(self, sequence: SequenceState) -> list[bytes]:
        """Keys of the blocks that a prompt may share. Its last token's block is never shared."""
        if not sequence.shares_prefix:
            return []
        return sequence.offer.chains(sequence.prompt[:-1], self.pool.block_size)

    def _exact_hits(self, chains: Iterable[bytes]) -> dict[int, int]:
        """Map block -> page for every block whose whole history is cached.

        A chained hash names a block together with all tokens before it, so a hit behind a gap is
        exact, too.
        """
        return {
            block: page
            for block, page in enumerate(self.pool.lookup_all(chains))
            if page is not None
        }

    def _continue(
        self, sequence: SequenceState, chains: list[bytes], hits: dict[int, int]
    ) -> Continued[bytes] | None:
        """Find approximate blocks of an earlier prompt with which this one begins, behind its exact
        blocks. Add them to `hits`."""
        num_exact = next((block for block in range(len(chains)) if block not in hits), len(chains))
        exactness_weight = self.cost_model.exactness_weight if self.cost_model else 0.0
        continued = self.continuations.find(
            sequence.recovery_key, chains, num_exact, exactness_weight
        )
        if continued is not None:
            pages = self.pool.lookup_all(continued.keys)
            hits |= {
                block: page
                for block, page in enumerate(pages, continued.first_block)
                if page is not None
            }

        return continued

    def _offer_continuation(
        self, sequence: SequenceState, chains: list[bytes], depths: np.ndarray
    ) -> None:
        """Let prompts that begin with all tokens of this sequence continue from its approximate
        blocks."""
        if (
            not (self.continuation and (depths > 0).any() and sequence.shares_prefix)
            or self.layout.num_local_lists
        ):
            return

        first, keys = int(np.argmax(depths > 0)), sequence.continuation_keys
        for block in range(first + len(keys), len(depths)):
            keys.append(os.urandom(KEY_BYTES) if depths[block] else chains[block])
            if depths[block]:
                self.pool.publish(int(sequence.pages.pages[0, block]), keys[-1])

        grafted = sequence.admitted_plan.grafted_blocks
        # Blocks of the answer hold no grafted tokens.
        is_grafted = np.pad(grafted, (0, len(depths)))[first : len(depths)].tolist()
        self.continuations.add(
            sequence.recovery_key, chains, first, keys, depths[first:].tolist(), is_grafted
        )

    def _matches(
        self, sequence: SequenceState, hit_blocks: Collection[int], *, approximate: bool = False
    ) -> tuple[list[Match], CostEstimate | None]:
        """Return the matches to graft, and the cost estimate that chose them."""
        size, free = self.pool.block_size, np.ones(sequence.num_prompt, bool)
        in_blocks(free, size)[list(hit_blocks)] = False
        query = self.index.query(
            sequence.prompt,
            (sequence.scope, *sequence.shared),
            free,
            similar=sequence.matches_similar,
            whole=sequence.policy.grafts_local_heads,
        )
        matches = self.index.match(query)
        sequence.report.too_deep_tokens = self.index.num_too_deep
        if self.cost_model is None or not matches:
            return matches, None

        num_known, policy = len(hit_blocks) * size, str(sequence.policy)
        return self.cost_model.choose(
            matches, sequence.num_prompt, num_known, policy, approximate=approximate
        )
