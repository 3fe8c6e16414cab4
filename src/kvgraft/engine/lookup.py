"""What is cached of a prompt: exact prefix blocks, text that can be grafted, what local heads still hold of both."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.sequence_state import SequenceState
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.lists import LocalPages
from kvgraft.kv.pages import PagePool
from kvgraft.prefill.plan import Plan
from kvgraft.reuse.index import ReuseIndex
from kvgraft.segments.keys import chain_hashes
from kvgraft.segments.matches import Match


@dataclass(frozen=True)
class Reuse:
    """What a sequence takes of what is cached.

    Attributes:
        hits: block -> page of the first list, exact.
        matches: what is grafted.
        copied: hit blocks whose local pages are copied: those that local heads see.
    """

    hits: dict[int, int]
    matches: list[Match]
    copied: list[int]


class CacheLookup:
    """Content of a page pool by its tokens.

    Args:
        index: what can be grafted.
    """

    def __init__(self, pool: PagePool, layout: StreamLayout, index: ReuseIndex) -> None:
        self.pool = pool
        self.layout = layout
        self.index = index
        self.local_pages = LocalPages(pool, layout.num_local_lists)

    def find(self, sequence: SequenceState, grafts: bool) -> Reuse:
        """What is cached of a prompt. Grafts need every list whole, full recomputation only what local heads see."""
        known = self._exact_hits(sequence)
        complete = self.local_pages.complete(known.values())
        whole = {block: page for (block, page), held in zip(known.items(), complete, strict=True) if held}
        matches = self._matches(sequence, whole) if grafts else []
        if matches or not self.layout.num_local_lists:
            return Reuse(whole, matches, list(whole) if self.layout.num_local_lists else [])
        layout, size, hits, copied = self.layout, self.pool.block_size, {}, []
        computed = (sequence.num_prompt - 1) // size  # the first block known to be computed
        for block in range(computed - 1, -1, -1):
            seen = bool(layout.seen(np.array(block), computed * size, size))
            if block not in known or (seen and block not in whole):
                computed = block
            else:
                hits[block] = known[block]
                copied += [block] if seen else []
        return Reuse(dict(reversed(hits.items())), [], copied)

    def offer(self, sequence: SequenceState) -> None:
        """Let others find the full blocks that the sequence has computed since the last offer.

        Exact blocks become prefix blocks and virtual blocks. Blocks that hold or follow grafted KV are approximate:
        no prefix lookup ever finds them, and they are virtual blocks only if the configuration says so. Of a prompt
        whose documents were kept in part nothing is offered.
        """
        size, first = self.pool.block_size, sequence.offer.num_registered
        stop = sequence.num_computed // size
        if not sequence.request.remember or sequence.documents or stop <= first:
            return
        pages = sequence.pages.pages
        tokens = np.array(sequence.tokens[: stop * size], np.int64)
        chain = chain_hashes(tokens, size, sequence.scope)
        is_exact = sequence.exact_blocks(stop)
        exact = first + np.flatnonzero(is_exact[first:stop])
        for block in exact.tolist():
            self.pool.publish(int(pages[0, block]), chain[block])
        found = np.array([self.pool.lookup(chain[block]) for block in exact], np.int64)
        self.local_pages.record(found, pages[1:, exact])
        self.local_pages.record(pages[0, first:stop], pages[1:, first:stop])
        self.index.offer(sequence.offer, tokens, pages[0, :stop], is_exact)

    def source_slots(self, plan: Plan) -> Tensor:
        """Where the grafted tokens of a plan lie now, in every list: int64 [lists, g], -1 where a list has lost one."""
        page, offset = np.divmod(plan.graft_sources.numpy(), self.pool.block_size)
        pages = np.vstack((page[None], self.local_pages.of(page).T))  # [lists, g]
        return torch.from_numpy(np.where(pages < 0, -1, pages * self.pool.block_size + offset))

    def find_prefix(self, tokens: list[int], scope: bytes) -> list[int]:
        """Pages of the leading full blocks of a token sequence, as far as they are cached."""
        pages = []
        for key in chain_hashes(np.array(tokens, np.int64), self.pool.block_size, scope):
            if (page := self.pool.lookup(key)) is None:
                break
            pages.append(page)
        return pages

    def payload(self, pages: list[int]) -> list[int]:
        """What is kept of the first pages of a text: those pages, and of local heads the sinks and the last window; but
        no local page that a running sequence is to give back."""
        blocks = np.arange(len(pages))
        seen = self.layout.seen(blocks, len(pages) * self.pool.block_size, self.pool.block_size)
        local = self.local_pages.of(np.array(pages, np.int64)[seen])
        return [*pages, *local[(local >= 0) & (self.pool.ref_counts[local] == 0)].tolist()]

    def _exact_hits(self, sequence: SequenceState) -> dict[int, int]:
        """Block -> page of every block whose whole history is cached as it is; never the block of the last token.

        A chained hash names a block together with all tokens before it, so a hit is exact behind a gap, too.
        """
        if not sequence.shares_prefix:
            return {}
        chain = chain_hashes(sequence.prompt[:-1], self.pool.block_size, sequence.scope)
        found = ((block, self.pool.lookup(key)) for block, key in enumerate(chain))
        return {block: page for block, page in found if page is not None}

    def _matches(self, sequence: SequenceState, hit_blocks: Iterable[int]) -> list[Match]:
        free = np.ones(sequence.num_prompt, bool)
        for block in hit_blocks:
            free[block * self.pool.block_size : (block + 1) * self.pool.block_size] = False
        matches = self.index.match(sequence.prompt, sequence.scope, free=free, similar=sequence.matches_similar)
        if not (sequence.policy.grafts_local_heads and self.layout.num_local_lists):
            return matches
        return [
            part
            for match in matches
            for part in match.where(self.local_pages.complete(match.pages), self.pool.block_size)
        ]
