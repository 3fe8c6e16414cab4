"""vLLM's block pool as pages: virtual and pinned blocks live in it, so nothing is copied."""

from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvgraft.vllm.groups import NULL_PAGE, CacheGroups


class SharedPool:
    """Pages of vLLM's block pool.

    The version of a page is the head of its block hash, which eviction resets. To hold a page of
    the main group is to hold its counterparts in the other groups. A page is live as long as these
    are, except counterparts of local heads, which may be gone.

    Args:
        blocks: vLLM's block pool.
        block_size: tokens per page.
        groups: vLLM's KV cache groups.

    Attributes:
        block_size: tokens per page.
        hit_counts: int64 [pages], uses of each page as a graft source or an exact hit.
    """

    def __init__(self, blocks: Any, block_size: int, groups: CacheGroups) -> None:
        # a vllm.v1.core.block_pool.BlockPool
        self._pool = blocks
        self.block_size, self.groups = block_size, groups
        # by page: its counterparts, one entry for each hold
        self._held: dict[int, list[tuple[int, ...]]] = {}
        self.hit_counts = np.zeros(blocks.num_gpu_blocks, np.int64)

    @property
    def num_pages(self) -> int:
        """Number of pages, without vLLM's null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def pages_of_block(self) -> int:
        """Number of pages of a block in all groups together."""
        return 1 + len(self.groups.others)

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated, including cached pages that nobody holds."""
        return int(self._pool.get_num_free_blocks())

    @property
    def num_used(self) -> int:
        """Number of pages that are held."""
        return self.num_pages - self.num_free

    def ref_count(self, page: int) -> int:
        """Return the number of holders of a page."""
        return int(self._pool.blocks[page].ref_cnt)

    def lookup_all(self, keys: Iterable[Any]) -> list[int | None]:
        """Return the page that vLLM finds by each block hash, or None."""
        main = [self.groups.main]
        found = (self._pool.get_cached_block(key, main) for key in keys)
        return [block[0].block_id if block else None for block in found]

    def find(self, block_hashes: Iterable[Any]) -> list[int]:
        """Return the pages that vLLM finds by these block hashes."""
        return [page for page in self.lookup_all(block_hashes) if page is not None]

    def num_cached(self, block_hashes: Iterable[Any]) -> int:
        """Return the number of leading block hashes that vLLM finds."""
        main = [self.groups.main]
        return sum(
            1
            for _ in takewhile(lambda found: self._pool.get_cached_block(found, main), block_hashes)
        )

    def allocate(self, count: int) -> list[int]:
        """Hold new pages of the main group, each with a counterpart in every other group.

        Raises:
            ValueError: there are not enough free pages.
        """
        blocks = self._pool.get_new_blocks(count * self.pages_of_block)
        tables = np.array([block.block_id for block in blocks]).reshape(self.pages_of_block, count)
        self._held |= {page: [tuple(others)] for page, *others in tables.T.tolist()}
        pages: list[int] = tables[0].tolist()
        return pages

    def publish(self, page: int, key: Any) -> None:
        """Let vLLM find a page that we hold, and its counterparts, by this block hash."""
        hashed, size = SimpleNamespace(block_hashes=[key]), self._pool.hash_block_size
        groups = self.groups.main, *self.groups.others
        for group, held in zip(groups, self.by_group(page), strict=True):
            if held != NULL_PAGE:
                self._pool.cache_full_blocks(hashed, [self._pool.blocks[held]], 0, 1, size, group)

    def forget(self, pages: Iterable[int]) -> None:
        """Remove the block hashes of pages, so that no lookup finds them.

        vLLM reclaims pages that can still be found last, in the order of their last use. So free
        pages among these are reclaimed first, and held ones once they are released.
        """
        for page in pages:
            for block in self._blocks(page, self.groups.counterparts(page) or ()):
                self._forget(block.block_id)

    def forget_hashes(
        self, block_hashes: Iterable[Any], own: Container[int] = (), keep: Container[int] = ()
    ) -> None:
        """Remove these block hashes from the pages that vLLM finds by them.

        Pages that somebody holds stay.

        Args:
            own: pages that the caller itself holds once.
            keep: pages that stay.
        """
        for block_hash in block_hashes:
            for group in (self.groups.main, *self.groups.others):
                while found := self._pool.get_cached_block(block_hash, [group]):
                    page = found[0].block_id
                    if page in keep or found[0].ref_cnt > (page in own):
                        break
                    self._forget(page)

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages, so that their content stays.

        The first holder of a page may have found fewer of its counterparts.
        """
        for page in pages:
            found, holders = (
                self.groups.counterparts(page) or self._none,
                self._held.setdefault(page, []),
            )
            if holders:
                found = tuple(held or new for held, new in zip(holders[-1], found, strict=True))
            holders.append(found)
            self._pool.touch(self._blocks(page, found))

    def release(self, pages: Sequence[int]) -> None:
        """Release pages. The last page of a text is reclaimed first.

        Of several holds, the one with the fewest counterparts ends first, no matter who releases.
        """
        for page in reversed(pages):
            counterparts = self._held[page].pop(0)
            if not self._held[page]:
                del self._held[page]
            self._pool.free_blocks(self._blocks(page, counterparts))

    def by_group(self, page: int) -> tuple[int, ...]:
        """Return a held page and its counterparts; `NULL_PAGE` where it has none."""
        return (page, *self._held[page][-1])

    def tables_of(self, pages: Sequence[int]) -> np.ndarray:
        """Return held pages and their counterparts by group, int64 [groups, n]."""
        found = np.array([self.by_group(page) for page in pages], np.int64)
        return found.reshape(-1, self.pages_of_block).T

    def held(self, page: int) -> list[int]:
        """Return a held page and the counterparts that exist."""
        return [held for held in self.by_group(page) if held != NULL_PAGE]

    def complete(self, pages: Iterable[int]) -> np.ndarray:
        """Return for each page of the main group if it has all counterparts, bool [n].

        This includes those of local heads.
        """
        found = (self.groups.counterparts(page) for page in pages)
        return np.array(
            [counterparts is not None and NULL_PAGE not in counterparts for counterparts in found],
            bool,
        )

    def keep(self, pages: Sequence[int]) -> None:
        """Do nothing: vLLM keeps what it knows by a hash until it reclaims it."""

    def num_hashed(self, pages: Sequence[int]) -> int:
        """Return the number of leading pages that hold full blocks with a block hash."""
        unknown = np.flatnonzero(self.versions_of(pages) == 0)
        return int(unknown[0]) if unknown.size else len(pages)

    def versions_of(self, pages: Iterable[int]) -> np.ndarray:
        """Return the versions of pages, int64 [n]; 0 for a page without a block hash."""
        blocks = self._pool.blocks
        return np.array([_version(blocks[page].block_hash) for page in pages], np.int64)

    def is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        """Return for each page if it still holds its content under that version, bool [n]."""
        live = (self.versions_of(pages.tolist()) == versions) & (versions != 0)
        if self.groups.others:
            live[live] = [
                self.groups.counterparts(page) is not None for page in pages[live].tolist()
            ]
        return live

    @property
    def _none(self) -> tuple[int, ...]:
        """Counterparts of a page that has none."""
        return (NULL_PAGE,) * len(self.groups.others)

    def _blocks(self, page: int, counterparts: Iterable[int]) -> list[Any]:
        """Return vLLM's block objects of a page and its counterparts."""
        return [self._pool.blocks[held] for held in (page, *counterparts) if held != NULL_PAGE]

    def _forget(self, page: int) -> None:
        self._pool.touch([self._pool.blocks[page]])
        self._pool.evict_blocks({page})
        self._pool.free_blocks([self._pool.blocks[page]])


def _version(block_hash: bytes | None) -> int:
    """Return the version for a block hash, int64; 0 for None."""
    return 0 if block_hash is None else int.from_bytes(block_hash[:8], "little", signed=True)
