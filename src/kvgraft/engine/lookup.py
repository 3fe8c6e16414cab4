"""Prefix lookup in the page pool, registration of computed blocks, and local heads' pages of
both."""

import os
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.admission import Admission, Reuse
from kvgraft.core.keys import chain_hashes
from kvgraft.core.plan import Plan
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.lists import LocalPages
from kvgraft.kv.pages import PagePool

# Approximate blocks have random keys of this size in the prefix cache; no content hashes to them.
KEY_BYTES = 32


class CacheLookup:
    """Content of a page pool by its tokens.

    Args:
        admission: decides what of it a prompt reuses.
    """

    def __init__(self, admission: Admission[PagePool], layout: StreamLayout) -> None:
        self.admission = admission
        self.pool = admission.pool
        self.layout = layout
        self.local_pages = LocalPages(self.pool, layout.num_local_lists)
        if layout.num_local_lists:
            admission.index.is_whole = self.local_pages.complete

    def find(self, sequence: SequenceState) -> Reuse:
        """Decide which cached content a prompt reuses.

        Grafts need complete pages in every list. Full recomputation needs only the pages that local
        heads see.
        """
        self.admission.make_room()
        known = self._exact_hits(sequence)
        if not self.layout.num_local_lists:
            return self.admission.decide(sequence, known | self._continue(sequence, known))

        complete = self.local_pages.complete(known.values())
        whole = {
            block: page for (block, page), held in zip(known.items(), complete, strict=True) if held
        }
        reuse = self.admission.decide(sequence, whole)
        if reuse.matches:
            return replace(reuse, copied=list(whole))

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

        hits = dict(reversed(hits.items()))
        plan = Plan.for_prompt(sequence.num_prompt, size, hits)
        return replace(reuse, plan=plan, hits=hits, copied=copied)

    def register(self, sequence: SequenceState) -> None:
        """Register the full blocks that the sequence has computed since the last call, so that
        others find them.

        Exact blocks become prefix blocks and virtual blocks. Blocks that hold or follow grafted KV
        are approximate: no prefix lookup finds them. Only prompts that begin with the whole text
        continue from them, and they are virtual blocks up to the depth that the configuration
        allows. Nothing is registered of a prompt whose documents were kept in part.
        """
        size, first = self.pool.block_size, sequence.provenance.num_registered
        stop = sequence.num_computed // size
        if not sequence.request.remember or sequence.documents or stop <= first:
            return

        pages = sequence.pages.pages
        chain = sequence.provenance.chains(sequence.first_tokens(stop * size), size)
        depths = sequence.depths(stop)
        exact = first + np.flatnonzero(depths[first:stop] == 0)
        for block in exact.tolist():
            self.pool.publish(int(pages[0, block]), chain[block])

        found = np.array(self.pool.lookup_all([chain[block] for block in exact.tolist()]), np.int64)
        self.local_pages.record(found, pages[1:, exact])
        self.local_pages.record(pages[0, first:stop], pages[1:, first:stop])
        keys = self._publish_approximate(sequence, chain, depths)
        self.admission.register(sequence, pages[0, :stop], depths, keys)

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

    def _exact_hits(self, sequence: SequenceState) -> dict[int, int]:
        """Map block -> page for every block whose whole history is cached.

        A chained hash names a block together with all tokens before it, so a hit behind a gap is
        exact, too. The block of the last token is never shared.
        """
        if not sequence.shares_prefix:
            return {}
        chains = sequence.provenance.chains(sequence.prompt[:-1], self.pool.block_size)
        return {
            block: page
            for block, page in enumerate(self.pool.lookup_all(chains))
            if page is not None
        }

    def _continue(self, sequence: SequenceState, hits: dict[int, int]) -> dict[int, int]:
        """Return the pages of approximate blocks that a prompt continues from, by block."""
        num_exact = next(block for block in range(len(hits) + 1) if block not in hits)
        continued = self.admission.find_approximate(sequence, num_exact)
        sequence.continued = continued
        if continued is None:
            return {}
        pages = self.pool.lookup_all(continued.keys)
        return {
            block: page
            for block, page in enumerate(pages, continued.first_block)
            if page is not None
        }

    def _publish_approximate(
        self, sequence: SequenceState, chains: list[bytes], depths: np.ndarray
    ) -> list[bytes]:
        """Publish approximate blocks under random keys, for prompts that continue from them.

        Returns:
            The keys of all blocks from the first approximate one on.
        """
        keys, is_continuable = sequence.continuation_keys, sequence.recovery_key is not None
        if self.admission.continuation and is_continuable and (depths > 0).any():
            for block in range(int(np.argmax(depths > 0)) + len(keys), len(depths)):
                keys.append(os.urandom(KEY_BYTES) if depths[block] else chains[block])
                if depths[block]:
                    self.pool.publish(int(sequence.pages.pages[0, block]), keys[-1])
        return keys
