"""What a sequence may reuse and what it leaves behind: pages, exact prefix hits, virtual blocks, frozen content."""

import logging
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np

from kvgraft.engine.sequence import Sequence
from kvgraft.kv.cache import KVCache, slots_of
from kvgraft.kv.pages import PagePool, PoolExhausted
from kvgraft.prefill.plan import Plan
from kvgraft.segments.frozen import FrozenPool
from kvgraft.segments.index import Lineage, Match, VirtualBlockIndex
from kvgraft.segments.keys import chain_hashes

logger = logging.getLogger("kvgraft")
NEVER = 1 << 62  # a position behind every token


class Memory:
    """The page pool with everything that finds content in it.

    Args:
        approximate_sources: let content computed after grafts be grafted again (off: exact content only).
        require_clean_context: graft only text that stood at the beginning of what it was read in.
    """

    def __init__(
        self,
        pool: PagePool,
        cache: KVCache,
        frozen: FrozenPool,
        approximate_sources: bool = False,
        require_clean_context: bool = False,
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.frozen = frozen
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
        hits = self._exact_hits(sequence)
        matches = self._matches(sequence, hits)
        num_missing = -(-sequence.num_reserved // self.pool.block_size) - len(hits)
        fits = self._pin(sequence, hits, matches, num_missing)
        if not fits and idle and matches:
            matches = []
            self._note_fallback(sequence, "pool_pressure")
            fits = self._pin(sequence, hits, matches, num_missing)
        if not fits and idle:
            raise PoolExhausted(
                f"{num_missing} pages needed, {self.pool.num_free} of {self.pool.num_pages} can be freed "
                f"({len(self.frozen.pages)} are frozen): the KV pool must be larger"
            )
        if not fits:
            return False
        self._start(sequence, hits, matches, self.pool.allocate(num_missing))
        sequence.report.stages["match"] = time.perf_counter() - start
        return True

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
        if not sequence.request.remember or stop <= first:
            return
        tokens = np.array(sequence.tokens[: stop * size], np.int64)
        chain = chain_hashes(tokens, size, sequence.scope)
        is_exact = self._exact_blocks(sequence, stop)
        for block in range(first, stop):
            if is_exact[block]:
                self.pool.publish(sequence.pages[block], chain[block])
        while first < stop:
            last = first + 1
            while last < stop and is_exact[last] == is_exact[first]:
                last += 1
            self._insert(sequence, tokens, first, last, Lineage.EXACT if is_exact[first] else Lineage.APPROXIMATE)
            first = last
        sequence.num_offered = stop

    def release(self, sequence: Sequence) -> None:
        """Give all its pages back."""
        self.unpin_sources(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []

    def find_prefix(self, tokens: list[int], scope: bytes) -> list[int]:
        """Pages of the leading full blocks of a token sequence, as far as they are cached."""
        pages = []
        for key in chain_hashes(np.array(tokens, np.int64), self.pool.block_size, scope):
            if (page := self.pool.lookup(key)) is None:
                break
            pages.append(page)
        return pages

    def _pin(self, sequence: Sequence, hits: dict[int, int], matches: list[Match], num_missing: int) -> bool:
        """Hold what the sequence reuses if `num_missing` more pages can be free then; sheds frozen pages of its own."""
        sources = sorted({int(page) for match in matches for page in match.pages})
        held = [*hits.values(), *sources]
        namespace = sequence.request.namespace
        self.pool.acquire(held)
        if num_missing > self.pool.num_free + self.frozen.num_sheddable(namespace):
            self.pool.release(held)
            return False
        self.frozen.shed(namespace, num_missing)
        self.pool.hit_counts[held] += 1
        self._pinned[sequence] = sources
        return True

    def _start(self, sequence: Sequence, hits: dict[int, int], matches: list[Match], fresh_pages: list[int]) -> None:
        """Give the sequence its block table and its plan."""
        unused = iter(fresh_pages)
        num_blocks = len(hits) + len(fresh_pages)
        sequence.pages = [hits[block] if block in hits else next(unused) for block in range(num_blocks)]
        sequence.slots = slots_of(sequence.pages, self.pool.block_size).to(self.cache.keys.device)
        sequence.first_approximate = matches[0].start if matches else NEVER
        self._set_plan(sequence, Plan.for_prompt(sequence.num_prompt, self.pool.block_size, hits, matches))

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
        if not sequence.policy.uses_grafts:
            return []
        free = np.ones(sequence.num_prompt, bool)
        for block in hit_blocks:
            free[block * self.pool.block_size : (block + 1) * self.pool.block_size] = False
        return self.index.match(
            sequence.prompt,
            sequence.scope,
            free=free,
            allow_approximate=self.approximate_sources,
            require_clean_context=self.require_clean_context,
        )

    def _exact_blocks(self, sequence: Sequence, count: int) -> np.ndarray:
        """bool [count]: blocks before the first graft, and exact hits behind it."""
        size = self.pool.block_size
        is_exact = np.arange(1, count + 1) * size <= sequence.first_approximate
        if sequence.plan is not None:
            hits = sequence.plan.prefix[: count * size : size].numpy()
            is_exact[: hits.size] |= hits
        return is_exact

    def _insert(self, sequence: Sequence, tokens: np.ndarray, first: int, last: int, lineage: Lineage) -> None:
        if lineage is Lineage.APPROXIMATE and not self.approximate_sources:
            sequence.last_entry = -1
            return
        size = self.pool.block_size
        pages = np.array(sequence.pages[first:last], np.int32)
        self.pool.keep(pages.tolist())
        entries = self.index.insert(
            tokens[first * size : last * size],
            pages,
            self.pool.versions[pages],
            source=sequence.source,
            source_start=first * size,
            scope=sequence.scope,
            lineage=lineage,
            after=sequence.last_entry,
        )
        sequence.last_entry = int(entries[-1])

    def _note_fallback(self, sequence: Sequence, reason: str) -> None:
        sequence.report.fallback = reason
        self.fallbacks[reason] += 1
        logger.warning("request %d falls back to full recomputation: %s", sequence.index, reason)
