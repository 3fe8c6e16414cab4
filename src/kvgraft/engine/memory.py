"""What a sequence may reuse and what it leaves behind: pages, exact prefix hits, virtual blocks, frozen content."""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.sequence import Sequence
from kvgraft.kv.cache import KVCache
from kvgraft.kv.lists import LocalPages, PageLists
from kvgraft.kv.pages import PagePool, PoolExhausted
from kvgraft.prefill.plan import Plan
from kvgraft.segments.frozen import FrozenPool
from kvgraft.segments.index import Lineage, Match, VirtualBlockIndex
from kvgraft.segments.keys import chain_hashes

logger = logging.getLogger("kvgraft")
NEVER = 1 << 62  # a position behind every token


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


class Memory:
    """The page pool with everything that finds content in it.

    Args:
        chunk: tokens of a prompt that are computed at a time, if nothing is grafted.
        approximate_sources: let content computed after grafts be grafted again (off: exact content only).
        require_clean_context: graft only text that stood at the beginning of what it was read in.
    """

    def __init__(
        self,
        pool: PagePool,
        cache: KVCache,
        frozen: FrozenPool,
        chunk: int,
        approximate_sources: bool = False,
        require_clean_context: bool = False,
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.frozen = frozen
        self.chunk = chunk
        self.local_pages = LocalPages(pool, cache.layout.num_local_lists)
        self.index = VirtualBlockIndex(pool.block_size, pool.is_live)
        self.approximate_sources = approximate_sources
        self.require_clean_context = require_clean_context
        self.fallbacks: Counter[str] = Counter()
        self._pinned: dict[Sequence, list[int]] = {}  # graft sources, from the match to the copy

    def admit(self, sequence: Sequence, *, idle: bool) -> bool:
        """Plan a sequence and reserve its pages; False if it must wait for pages.

        Sources are pinned before anything is allocated. When nothing else runs (`idle`), waiting cannot help: then the
        grafts, whose sources hold pages, are given up (fallback `pool_pressure`).

        Raises:
            PoolExhausted: the sequence cannot fit even then.
        """
        start = time.perf_counter()
        reuse = self._find(sequence, sequence.policy.uses_grafts)
        fits = self._pin(sequence, reuse)
        if not fits and idle and reuse.matches:
            reuse = self._find(sequence, grafts=False)
            self._note_fallback(sequence, "pool_pressure")
            fits = self._pin(sequence, reuse)
        if not fits and idle:
            raise PoolExhausted(
                f"{self._num_missing(sequence, reuse)} pages needed, {self.pool.num_free} of {self.pool.num_pages} can "
                f"be freed ({len(self.frozen.pages)} are frozen): the KV pool must be larger"
            )
        if not fits:
            return False
        self._start(sequence, reuse)
        sequence.report.stages["match"] = time.perf_counter() - start
        return True

    def reach(self, sequence: Sequence, plan: Plan) -> None:
        """Have pages for what `plan` computes next; local heads leave behind what is not seen from there on."""
        lists = sequence.lists
        if lists is None or not self.cache.layout.num_local_lists:
            return
        active = plan.active.nonzero()[:, 0].numpy()
        lists.leave_behind(self.pool, int(active[0]) if active.size else plan.num_tokens)
        lists.add_local(self.pool, np.unique(active // self.pool.block_size))

    def settle(self, sequence: Sequence) -> None:
        """The prompt has been computed: local heads keep what an answer needs."""
        if sequence.lists is not None and self.cache.layout.num_local_lists:
            sequence.lists.leave_behind(self.pool, sequence.num_computed)
            sequence.lists.settle(self.pool, self._num_local(sequence.lists.pages.shape[1]))

    def step(self, sequence: Sequence) -> None:
        """Have a page for the next position, after `settle`."""
        block, offset = divmod(sequence.num_computed, self.pool.block_size)
        if sequence.lists is not None and self.cache.layout.num_local_lists and not offset:
            sequence.lists.leave_behind(self.pool, sequence.num_computed)
            sequence.lists.add_local(self.pool, np.array([block]))

    def source_slots(self, plan: Plan) -> Tensor:
        """Where the grafted tokens of a plan lie now, in every list: int64 [lists, g], -1 where a list has lost one."""
        page, offset = np.divmod(plan.graft_sources.numpy(), self.pool.block_size)
        pages = np.vstack((page[None], self.local_pages.of(page).T))  # [lists, g]
        return torch.from_numpy(np.where(pages < 0, -1, pages * self.pool.block_size + offset))

    def unpin_sources(self, sequence: Sequence) -> None:
        """The grafts have been copied (or are not wanted any more)."""
        self.pool.release(self._pinned.pop(sequence, []))

    def drop_grafts(self, sequence: Sequence, reason: str) -> None:
        """The sequence is recomputed in full: what it computes from here on is exact."""
        if sequence.plan is None:
            raise ValueError("the sequence has no plan yet")
        sequence.first_approximate = NEVER
        self._set_plan(sequence, sequence.plan.without_grafts())
        self._note_fallback(sequence, reason)

    def offer(self, sequence: Sequence) -> None:
        """Let others find the full blocks that the sequence has computed since the last offer.

        Exact blocks become prefix blocks and virtual blocks. Blocks that hold or follow grafted KV are approximate:
        no prefix lookup ever finds them, and they are virtual blocks only if the configuration says so.
        """
        size, first = self.pool.block_size, sequence.num_offered
        stop = sequence.num_computed // size
        lists = sequence.lists
        if not sequence.request.remember or stop <= first or lists is None:
            return
        tokens = np.array(sequence.tokens[: stop * size], np.int64)
        chain = chain_hashes(tokens, size, sequence.scope)
        is_exact = self._exact_blocks(sequence, stop)
        exact = first + np.flatnonzero(is_exact[first:stop])
        for block in exact.tolist():
            self.pool.publish(int(lists.pages[0, block]), chain[block])
        found = np.array([self.pool.lookup(chain[block]) for block in exact], np.int64)
        self.local_pages.record(found, lists.pages[1:, exact])
        while first < stop:
            last = first + 1
            while last < stop and is_exact[last] == is_exact[first]:
                last += 1
            self._insert(sequence, lists, tokens, range(first, last), is_exact[first])
            first = last
        sequence.num_offered = stop

    def release(self, sequence: Sequence) -> None:
        """Give all its pages back; it may be admitted again."""
        self.unpin_sources(sequence)
        if sequence.lists is not None:
            self.pool.release(sequence.lists.held)
        sequence.lists, sequence.num_computed, sequence.num_offered, sequence.last_entry = None, 0, 0, -1

    def find_prefix(self, tokens: list[int], scope: bytes) -> list[int]:
        """Pages of the leading full blocks of a token sequence, as far as they are cached."""
        pages = []
        for key in chain_hashes(np.array(tokens, np.int64), self.pool.block_size, scope):
            if (page := self.pool.lookup(key)) is None:
                break
            pages.append(page)
        return pages

    def payload(self, pages: list[int]) -> list[int]:
        """What is kept of the first pages of a text: those pages, and of local heads the sinks and the last window."""
        blocks = np.arange(len(pages))
        seen = self.cache.layout.seen(blocks, len(pages) * self.pool.block_size, self.pool.block_size)
        local = self.local_pages.of(np.array(pages, np.int64)[seen])
        return [*pages, *local[local >= 0].tolist()]

    def _find(self, sequence: Sequence, grafts: bool) -> Reuse:
        """What is cached of a prompt. Grafts need every list whole, full recomputation only what local heads see."""
        known = self._exact_hits(sequence)
        whole = np.fromiter(known, np.int64)[self.local_pages.complete(known.values())].tolist()
        matches = self._matches(sequence, whole) if grafts else []
        if matches:
            return Reuse({block: known[block] for block in whole}, matches, whole)
        layout, size, hits, copied = self.cache.layout, self.pool.block_size, {}, []
        computed = (sequence.num_prompt - 1) // size  # the first block known to be computed
        for block in range(computed - 1, -1, -1):
            seen = bool(layout.seen(np.array(block), computed * size, size))
            if block not in known or (seen and block not in whole):
                computed = block
            else:
                hits[block] = known[block]
                copied += [block] if seen else []
        return Reuse(dict(reversed(hits.items())), [], copied)

    def _num_missing(self, sequence: Sequence, reuse: Reuse) -> int:
        """Pages to be allocated."""
        size = self.pool.block_size
        num_blocks, prompt = -(-sequence.num_reserved // size), -(-sequence.num_prompt // size)
        if not reuse.matches:
            passing = self.cache.layout.window_blocks(size) + -(-self.chunk // size) + len(reuse.copied)
            prompt = min(prompt, passing)
        at_once = self.cache.layout.num_local_lists * prompt
        return num_blocks - len(reuse.hits) + max(at_once, self._num_local(num_blocks))

    def _num_local(self, num_blocks: int) -> int:
        """Local pages of a sequence of so many blocks while it is answered."""
        layout = self.cache.layout
        return layout.num_local_lists * min(num_blocks, layout.window_blocks(self.pool.block_size))

    def _pin(self, sequence: Sequence, reuse: Reuse) -> bool:
        """Hold what the sequence reuses if all that is missing can be free then; sheds frozen pages of its own."""
        pages = {int(page) for match in reuse.matches for page in match.pages}
        owners = np.array([*pages, *(reuse.hits[block] for block in reuse.copied)], np.int64)
        local = self.local_pages.of(owners)
        sources = sorted(pages | set(local[local >= 0].tolist()))
        held = [*reuse.hits.values(), *sources]
        namespace, num_missing = sequence.request.namespace, self._num_missing(sequence, reuse)
        self.pool.acquire(held)
        if num_missing > self.pool.num_free + self.frozen.num_sheddable(namespace):
            self.pool.release(held)
            return False
        self.frozen.shed(namespace, num_missing)
        self.pool.hit_counts[held] += 1
        self._pinned[sequence] = sources
        return True

    def _start(self, sequence: Sequence, reuse: Reuse) -> None:
        """Give the sequence its pages and its plan."""
        size, layout = self.pool.block_size, self.cache.layout
        num_blocks = -(-sequence.num_reserved // size)
        unused = iter(self.pool.allocate(self._num_missing(sequence, reuse)))
        lists = sequence.lists = PageLists(layout, num_blocks, size, self.cache.keys.device)
        pages = [reuse.hits[block] if block in reuse.hits else next(unused) for block in range(num_blocks)]
        lists.place(slice(0, 1), np.arange(num_blocks), np.array([pages]))
        lists.spare = list(unused)
        copied = np.array(reuse.copied, np.int64)
        if layout.num_local_lists and copied.size:  # a local page belongs to one sequence, which gives it back
            lists.add_local(self.pool, copied)
            source = self.local_pages.of(lists.pages[0, copied])
            self.cache.copy(source.T.ravel().tolist(), lists.pages[1:, copied].ravel().tolist())
        sequence.first_approximate = reuse.matches[0].start if reuse.matches else NEVER
        self._set_plan(sequence, Plan.for_prompt(sequence.num_prompt, size, reuse.hits, reuse.matches))

    def _set_plan(self, sequence: Sequence, plan: Plan) -> None:
        sequence.plan = plan
        sequence.report.prefix_tokens = int(plan.prefix.sum())
        sequence.report.grafted_tokens = int(plan.grafted.sum())
        sequence.report.fresh_tokens = int(plan.fresh.sum())

    def _exact_hits(self, sequence: Sequence) -> dict[int, int]:
        """Block -> page of every block whose whole history is cached as it is; never the block of the last token.

        A chained hash names a block together with all tokens before it, so a hit is exact behind a gap, too.
        """
        chain = chain_hashes(sequence.prompt[:-1], self.pool.block_size, sequence.scope)
        found = ((block, self.pool.lookup(key)) for block, key in enumerate(chain))
        return {block: page for block, page in found if page is not None}

    def _matches(self, sequence: Sequence, hit_blocks: Iterable[int]) -> list[Match]:
        free = np.ones(sequence.num_prompt, bool)
        for block in hit_blocks:
            free[block * self.pool.block_size : (block + 1) * self.pool.block_size] = False
        matches = self.index.match(
            sequence.prompt,
            sequence.scope,
            free=free,
            allow_approximate=self.approximate_sources,
            require_clean_context=self.require_clean_context,
        )
        if not (sequence.policy.grafts_local_heads and self.cache.layout.num_local_lists):
            return matches
        return [
            part
            for match in matches
            for part in match.where(self.local_pages.complete(match.pages), self.pool.block_size)
        ]

    def _exact_blocks(self, sequence: Sequence, count: int) -> np.ndarray:
        """bool [count]: blocks before the first graft, and exact hits behind it."""
        size = self.pool.block_size
        is_exact = np.arange(1, count + 1) * size <= sequence.first_approximate
        if sequence.plan is not None:
            hits = sequence.plan.prefix[: count * size : size].numpy()
            is_exact[: hits.size] |= hits
        return is_exact

    def _insert(self, sequence: Sequence, lists: PageLists, tokens: np.ndarray, blocks: range, exact: bool) -> None:
        """Name consecutive blocks of one lineage."""
        if not (exact or self.approximate_sources):
            sequence.last_entry = -1
            return
        size, where = self.pool.block_size, slice(blocks.start, blocks.stop)
        pages = lists.pages[0, where]
        self.pool.keep(pages.tolist())
        self.local_pages.record(pages, lists.pages[1:, where])
        entries = self.index.insert(
            tokens[blocks.start * size : blocks.stop * size],
            pages.astype(np.int32),
            self.pool.versions[pages],
            source=sequence.source,
            source_start=blocks.start * size,
            scope=sequence.scope,
            lineage=Lineage.EXACT if exact else Lineage.APPROXIMATE,
            after=sequence.last_entry,
        )
        sequence.last_entry = int(entries[-1])

    def _note_fallback(self, sequence: Sequence, reason: str) -> None:
        sequence.report.fallback = reason
        self.fallbacks[reason] += 1
        logger.warning("request %d falls back to full recomputation: %s", sequence.index, reason)
