"""Pages of every sequence: admission, windows of local heads, pins, and release."""

import logging
import time
from collections import Counter

import numpy as np

from kvgraft.core.admission import Admission, Reuse
from kvgraft.core.plan import Plan
from kvgraft.core.refresh import Refresh
from kvgraft.engine.lookup import CacheLookup
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.store_tier import StoreTier
from kvgraft.kv.cache import KVCache
from kvgraft.kv.lists import PageLists
from kvgraft.kv.pages import PagePool, PoolExhausted, distinct

logger = logging.getLogger("kvgraft")


class Memory:
    """Manager of the pages that sequences hold.

    Args:
        admission: decides what sequences reuse.
        max_prefill_tokens: tokens of a prompt without grafts that are computed at a time, rounded
            up to whole pages.
        store: tiers for content that left the pool.
    """

    def __init__(
        self,
        admission: Admission[PagePool],
        cache: KVCache,
        max_prefill_tokens: int,
        store: StoreTier | None = None,
    ) -> None:
        self.admission = admission
        self.pool = pool = admission.pool
        self.cache = cache
        self.chunk = -(-max_prefill_tokens // pool.block_size) * pool.block_size
        self.lookup = CacheLookup(admission, cache.layout)
        self.refresh = Refresh(admission.index)
        self.store = store
        self.fallbacks: Counter[str] = Counter()
        # Graft sources stay pinned from the match until they are copied.
        self._pinned: dict[SequenceState, np.ndarray] = {}

    def admit(self, sequence: SequenceState, *, idle: bool) -> bool:
        """Plan a sequence and reserve its pages; False if it must wait for pages.

        Sources are pinned before anything is allocated. When nothing else runs (`idle`), waiting
        cannot help. Then the grafts, whose sources hold pages, are dropped (fallback
        `pool_pressure`).

        Raises:
            PoolExhausted: the sequence cannot fit even then.
        """
        start = time.perf_counter()
        reuse = self._find(sequence)
        fits = self._pin(sequence, reuse)
        if not fits and idle and reuse.matches:
            self.note_fallback(sequence, "pool_pressure")
            reuse = self.lookup.find(sequence)
            fits = self._pin(sequence, reuse)

        if not fits and idle:
            num_pinned = len(self.admission.pins.pages)
            raise PoolExhausted(
                f"{self._num_missing(sequence, reuse)} pages needed, {self.pool.num_free} of "
                f"{self.pool.num_pages} can be freed ({num_pinned} are pinned): "
                "the KV pool must be larger"
            )
        if not fits:
            return False

        self._start(sequence, reuse)
        sequence.report.stages["match"] = time.perf_counter() - start
        return True

    def register(self, sequence: SequenceState, *, ended: bool = False) -> None:
        """Let other requests reuse what the sequence has computed, and store it."""
        self.lookup.register(sequence)
        if self.store is not None:
            self.store.keep(sequence, ended=ended)

    def adopt(self, sequence: SequenceState) -> None:
        """Reserve pages for a sequence whose prompt was computed elsewhere.

        Raises:
            PoolExhausted: it does not fit now.
        """
        reuse = Reuse(Plan.for_prompt(sequence.num_prompt, self.pool.block_size))
        if not self._pin(sequence, reuse):
            raise PoolExhausted(
                f"{self._num_missing(sequence, reuse)} pages needed, {self.pool.num_free} are free"
            )

        lists = self._start(sequence, reuse)
        sequence.num_computed = sequence.num_prompt - sequence.num_dropped
        blocks = np.arange(-(-sequence.num_computed // self.pool.block_size))
        lists.add_local(
            self.pool,
            blocks[self.cache.layout.seen(blocks, sequence.num_computed, self.pool.block_size)],
        )
        self.settle(sequence)

    def reach(self, sequence: SequenceState, positions: np.ndarray) -> None:
        """Allocate pages for positions int [n], ascending, which are computed next.

        Local heads first release the pages that no later query sees. They do so only when they need
        pages, so that no other sequence can take those in between.
        """
        if not self.cache.layout.num_local_lists:
            return
        lists, blocks = sequence.pages, np.unique(positions // self.pool.block_size)
        if (lists.pages[1:, blocks] < 0).any():
            lists.leave_behind(self.pool, int(positions[0]))
            lists.add_local(self.pool, blocks)

    def settle(self, sequence: SequenceState) -> None:
        """Reduce the pages of local heads to those that an answer needs, after the prompt is
        computed."""
        if self.cache.layout.num_local_lists:
            lists = sequence.pages
            lists.leave_behind(self.pool, sequence.num_computed)
            lists.settle(self.pool, self._num_local(lists.pages.shape[1]))

    def shorten(self, sequence: SequenceState, num_kept: int) -> None:
        """Release unneeded pages after a prompt was reduced to `num_kept` tokens in its pages."""
        sequence.num_dropped = sequence.num_prompt - num_kept
        sequence.num_computed = num_kept
        self.pool.release(sequence.pages.shorten(-(-sequence.num_reserved // self.pool.block_size)))

    def drop_documents(self, sequence: SequenceState, reason: str) -> None:
        """Release the sequence, so that its next admission computes it in full."""
        self.release(sequence)
        sequence.documents, sequence.num_dropped = (), 0
        self.note_fallback(sequence, reason)

    def unpin_sources(self, sequence: SequenceState) -> None:
        """Release the graft sources of a sequence, after they were copied or dropped."""
        self.pool.release(self._pinned.pop(sequence, []))

    def drop_grafts(self, sequence: SequenceState, reason: str) -> None:
        """Plan full recomputation of the sequence: what it computes from here on is exact."""
        self.admission.mark(sequence)
        self.note_fallback(sequence, reason)
        sequence.set_plan(sequence.admitted_plan.without_grafts())

    def release(self, sequence: SequenceState) -> None:
        """Release all pages of a sequence. It may be admitted again."""
        self.unpin_sources(sequence)
        if sequence.lists is not None:
            if sequence.continuation_keys:
                stop = sequence.provenance.num_registered
                pages = sequence.lists.pages[0, :stop].tolist()
                self.admission.leave(sequence, pages, sequence.depths(stop))
            self.pool.release(sequence.lists.held)
        sequence.lists, sequence.num_computed, sequence.num_indexed = None, 0, 0
        sequence.provenance.restart()

    def abandon(self, sequence: SequenceState) -> None:
        """Release a sequence whose recovery failed half way. Pages that it rewrote in place can no
        longer be found."""
        plan, size = sequence.admitted_plan, self.pool.block_size
        in_place = plan.in_place[::size].numpy()
        pages = sequence.pages.pages[0, : len(in_place)][in_place].tolist()
        self.release(sequence)
        self.pool.forget(pages)

    def _find(self, sequence: SequenceState) -> Reuse:
        """Find cached content of a prompt. Restore stored blocks if there is room for them."""
        if sequence.documents:
            return self.admission.decide(sequence, {})
        reuse = self.lookup.find(sequence)
        spare = self.pool.num_free - self._num_missing(sequence, reuse)
        if self.store is not None and spare > 0 and self.store.restore(sequence, reuse, spare):
            reuse = self.lookup.find(sequence)
        return reuse

    def _num_missing(self, sequence: SequenceState, reuse: Reuse) -> int:
        """Number of pages to allocate."""
        size = self.pool.block_size
        num_blocks, prompt = -(-sequence.num_reserved // size), -(-sequence.num_prompt // size)
        if not reuse.matches:
            passing = (
                self.cache.layout.window_blocks(size) + -(-self.chunk // size) + len(reuse.copied)
            )
            prompt = min(prompt, passing)
        at_once = self.cache.layout.num_local_lists * prompt
        return num_blocks - len(reuse.hits) + max(at_once, self._num_local(num_blocks))

    def _num_local(self, num_blocks: int) -> int:
        """Local pages of a sequence of `num_blocks` blocks during decode."""
        layout = self.cache.layout
        return layout.num_local_lists * min(num_blocks, layout.window_blocks(self.pool.block_size))

    def _pin(self, sequence: SequenceState, reuse: Reuse) -> bool:
        """Pin what the sequence reuses, if all missing pages can then be free. Sheds pinned pages
        of its namespace."""
        pages = np.array(reuse.sources, np.int64)
        copied = np.array([reuse.hits[block] for block in reuse.copied], np.int64)
        local = self.lookup.local_pages.of(np.concatenate((pages, copied)))
        sources = distinct(np.concatenate((pages, local[local >= 0])))
        held = np.concatenate((np.array(list(reuse.hits.values()), np.int64), sources))
        namespace, num_missing = sequence.request.namespace, self._num_missing(sequence, reuse)
        self.pool.acquire(held)
        if num_missing > self.pool.num_free + self.admission.pins.num_sheddable(namespace):
            self.pool.release(held)
            return False

        self.pool.hit_counts[held] += 1
        self.refresh.note(sequence.scope, namespace, reuse.sources)
        # Pages that were just acquired are not shed.
        self.admission.pins.shed(namespace, num_missing)
        self._pinned[sequence] = sources
        return True

    def _start(self, sequence: SequenceState, reuse: Reuse) -> PageLists:
        """Assign pages and a plan to the sequence."""
        size, layout = self.pool.block_size, self.cache.layout
        num_blocks = -(-sequence.num_reserved // size)
        unused, num_unused = (
            self.pool.allocate(self._num_missing(sequence, reuse)),
            num_blocks - len(reuse.hits),
        )
        lists = sequence.lists = PageLists(layout, num_blocks, size, self.cache.keys.device)
        pages, is_hit = np.empty(num_blocks, np.int64), np.zeros(num_blocks, bool)
        is_hit[list(reuse.hits)] = True
        pages[list(reuse.hits)], pages[~is_hit] = list(reuse.hits.values()), unused[:num_unused]
        lists.place(slice(0, 1), np.arange(num_blocks), pages[None])
        lists.spare = unused[num_unused:]
        copied = np.array(reuse.copied, np.int64)
        # A local page belongs to one sequence, which releases it, so others need a copy.
        if layout.num_local_lists and copied.size:
            lists.add_local(self.pool, copied)
            source = self.lookup.local_pages.of(lists.pages[0, copied])
            self.cache.copy(source.T.ravel().tolist(), lists.pages[1:, copied].ravel().tolist())

        sequence.continuation_keys[:] = sequence.continued.keys if sequence.continued else ()
        self.admission.mark(sequence, reuse)
        sequence.provenance.mark_approximate((span.start, 1) for span in sequence.documents)
        sequence.report.kv_bytes = len(lists.held) * self.cache.page_bytes
        sequence.reason = reuse.reason
        sequence.set_plan(reuse.plan)
        return lists

    def note_fallback(self, sequence: SequenceState, reason: str) -> None:
        """Count and log that a sequence is computed in full, with the reason."""
        sequence.refusal = reason
        self.fallbacks[reason] += 1
        logger.warning("request %d falls back to full recomputation: %s", sequence.index, reason)
