"""Physical blocks of the KV pool: reference counts, exact prefix cache, least-recently-used
eviction.

Only bookkeeping is here; the tensors are in `kvgraft.kv.cache`. A page is either *used* (reference
count > 0) or *free*. A free page may still hold content that a lookup can find. It keeps the
content until `allocate` reclaims the page, oldest first. Pinned pages are used pages whose
reference the pinned documents hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

PageListener = Callable[[Sequence[int]], None]
# dtype of the counts: `np.add.at` is slow with other dtypes
_ONE = np.int32(1)


class PoolExhausted(RuntimeError):
    """Error of a request for more pages than are free; callers check `num_free` first."""


class PagePool:
    """Reference-counted pages with an exact prefix cache (chained block hashes) over the free ones.

    Args:
        num_pages: pages in the pool.
        block_size: tokens per page.
        on_drop: called with the pages whose content has just become unreachable (tests poison
            them).
    """

    def __init__(
        self, num_pages: int, block_size: int, on_drop: PageListener | None = None
    ) -> None:
        if num_pages < 1 or block_size < 1:
            raise ValueError(
                f"num_pages and block_size must be positive, got {num_pages} and {block_size}"
            )

        self.num_pages = num_pages
        self.block_size = block_size
        self.ref_counts = np.zeros(num_pages, np.int32)
        # increases when a page loses its content
        self.versions = np.zeros(num_pages, np.int64)
        # number of reuses of the page's content
        self.hit_counts = np.zeros(num_pages, np.int64)
        # True for pages whose content is kept while they are free
        self._kept = np.zeros(num_pages, bool)
        # the first page is reclaimed first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_by_hash: dict[bytes, int] = {}
        self._hash_by_page: dict[int, bytes] = {}
        self.on_drop = on_drop

    @property
    def num_free(self) -> int:
        """Number of pages that `allocate` can return, including pages with cached content."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of referenced pages, including pinned ones."""
        return self.num_pages - self.num_free

    def ref_count(self, page: int) -> int:
        """Return the number of references to a page."""
        return int(self.ref_counts[page])

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages with one reference each. Pages with the least recently used content
        are reclaimed first.
        """
        if count > self.num_free:
            raise PoolExhausted(
                f"{count} pages asked for, {self.num_free} of {self.num_pages} are free"
            )
        pages = list(islice(self._free, count))
        for page in pages:
            del self._free[page]

        where = np.array(pages, np.int64)
        self._drop(where[self._kept[where]].tolist())
        self.ref_counts[where] = 1
        return pages

    def acquire(self, pages: Sequence[int] | np.ndarray) -> None:
        """Add a reference to pages that hold content (used or free)."""
        where = np.asarray(pages, np.int64)
        for page in where.tolist():
            self._free.pop(page, None)
        np.add.at(self.ref_counts, where, _ONE)

    def release(self, pages: Sequence[int] | np.ndarray) -> None:
        """Release references, last page first, so that the tail of a request is reclaimed before
        its head.
        """
        where = np.asarray(pages, np.int64)
        np.subtract.at(self.ref_counts, where, _ONE)
        if (missing := self.ref_counts[where] < 0).any():
            np.add.at(self.ref_counts, where, _ONE)
            raise RuntimeError(
                f"page {where[missing][0]} was released more often than it was acquired"
            )

        freed = where[self.ref_counts[where] == 0]
        self._free.update(dict.fromkeys(_last_first(freed)))

        emptied = _last_first(freed[~self._kept[freed]])
        for page in emptied:
            self._free.move_to_end(page, last=False)
        self._drop(emptied)

    def keep(self, pages: Sequence[int]) -> None:
        """Mark content as reusable: it outlives its last reference until the page is reclaimed."""
        self._kept[pages] = True

    def forget(self, pages: Sequence[int]) -> None:
        """Drop the content of these free pages. They are the next to be reclaimed."""
        for page in pages:
            self._free.move_to_end(page, last=False)
        self._drop([page for page in pages if self._kept[page]])

    def publish(self, page: int, key: bytes) -> None:
        """Let prefix lookups find a page's content by this key: a chained hash if it is *exact*.
        The first page with a key stays the canonical one.
        """
        if self._page_by_hash.setdefault(key, page) == page:
            self._hash_by_page[page] = key
        self.keep([page])

    def lookup(self, key: bytes) -> int | None:
        """Return the page that was published under this key, or None."""
        return self._page_by_hash.get(key)

    def lookup_all(self, keys: Iterable[bytes]) -> list[int | None]:
        """Return the result of `lookup` for each key."""
        return list(map(self._page_by_hash.get, keys))

    def versions_of(self, pages: Sequence[int]) -> np.ndarray:
        """Return the version of each page's content, int64 [n]."""
        return self.versions[np.array(pages, np.int64)]

    def is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        """Return whether each page still holds the content of that version, bool of the same
        shape.
        """
        return self.versions[pages] == versions

    def clear(self) -> None:
        """Forget all content of free pages. Apart from pinned pages the pool must be idle."""
        self._drop(
            [
                page
                for page in range(self.num_pages)
                if self._kept[page] and self.ref_counts[page] == 0
            ]
        )

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless the reference counts agree with the live block tables."""
        expected = np.zeros(self.num_pages, np.int32)
        for table in block_tables:
            np.add.at(expected, np.asarray(table, np.int64), 1)
        wrong = np.flatnonzero(expected != self.ref_counts)
        if wrong.size:
            raise RuntimeError(
                f"reference counts of pages {wrong[:8].tolist()} do not follow from the block "
                "tables"
            )
        if set(self._free) != set(np.flatnonzero(self.ref_counts == 0).tolist()):
            raise RuntimeError("the free list is not the set of pages without references")
        if any(self._page_by_hash.get(key) != page for page, key in self._hash_by_page.items()):
            raise RuntimeError("a published page is not the page that its hash finds")

    def _drop(self, pages: Sequence[int]) -> None:
        """Forget the content of pages, and report them to `on_drop`."""
        for page in pages:
            if (key := self._hash_by_page.pop(page, None)) is not None:
                del self._page_by_hash[key]
        if pages:
            self.versions[pages] += 1
            self.hit_counts[pages] = 0
            self._kept[pages] = False
            if self.on_drop is not None:
                self.on_drop(pages)


def distinct(pages: np.ndarray) -> np.ndarray:
    """Return each page once, ascending, int64 [n]: faster than `np.unique` for page numbers."""
    return np.flatnonzero(np.bincount(pages))


def _last_first(pages: np.ndarray) -> list[int]:
    """Return each page once, the last one first."""
    return list(dict.fromkeys(pages.tolist()))[::-1]
