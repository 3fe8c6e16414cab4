"""vLLM's block pool as our own code sees pages: virtual and pinned blocks live in it, nothing is
copied."""

from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvgraft.vllm.groups import NULL_PAGE, CacheGroups


class SharedPool:
    """Pages of vLLM's block pool. A page's version is the head of its block hash, which eviction
    resets.

    Who holds a page of the main group holds its counterparts in the other ones, and it is live as
    long as they are, but for those of local heads: these may be gone.

    Args:
        blocks: vLLM's block pool.
        groups: vLLM's KV cache groups.

    Attributes:
        block_size: tokens of a page.
        hit_counts: int64 [pages], how often each page was a graft source or an exact hit.
    """

    def __init__(self, blocks: Any, block_size: int, groups: CacheGroups) -> None:
        self._pool = blocks  # vllm.v1.core.block_pool.BlockPool
        self.block_size, self.groups = block_size, groups
        # by page: its counterparts, by who holds it
        self._held: dict[int, list[tuple[int, ...]]] = {}
        self.hit_counts = np.zeros(blocks.num_gpu_blocks, np.int64)

    @property
    def num_pages(self) -> int:
        """Without vLLM's null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, among them cached ones that nobody holds."""
        return int(self._pool.get_num_free_blocks())

    @property
    def num_used(self) -> int:
        """Pages that someone holds."""
        return self.num_pages - self.num_free

    def ref_count(self, page: int) -> int:
        """How many hold this page."""
        return int(self._pool.blocks[page].ref_cnt)

    def find(self, block_hashes: Iterable[Any]) -> list[int]:
        """The pages that vLLM finds by these hashes."""
        found = (
            self._pool.get_cached_block(block_hash, [self.groups.main])
            for block_hash in block_hashes
        )
        return [block[0].block_id for block in found if block]

    def num_cached(self, block_hashes: Iterable[Any]) -> int:
        """How many of these, from the first on, vLLM finds."""
        main = [self.groups.main]
        return sum(
            1
            for _ in takewhile(lambda found: self._pool.get_cached_block(found, main), block_hashes)
        )

    def allocate(self, count: int) -> list[int]:
        """Take pages that nobody holds; ValueError if there are not so many."""
        pages = [block.block_id for block in self._pool.get_new_blocks(count)]
        self._held |= {page: [self._none] for page in pages}
        return pages

    def name(self, page: int, block_hash: Any) -> None:
        """Let vLLM find a page that we hold by this hash, as it finds its own."""
        hashed = SimpleNamespace(block_hashes=[block_hash])
        self._pool.cache_full_blocks(
            hashed, [self._pool.blocks[page]], 0, 1, self._pool.hash_block_size, 0
        )

    def forget(self, pages: Iterable[int]) -> None:
        """Let nobody find what these pages hold. Free ones become the first to be reclaimed, held
        ones when they are given back: vLLM reclaims pages that can be found last, and in the order
        of their last use."""
        for page in pages:
            for block in self._blocks(page, self.groups.counterparts(page) or ()):
                self._forget(block.block_id)

    def forget_hashes(
        self, block_hashes: Iterable[Any], own: Container[int] = (), keep: Container[int] = ()
    ) -> None:
        """`forget` the pages that vLLM finds by these hashes, except those in `keep` and those that
        somebody holds; of pages in `own` one holder is who asks."""
        for block_hash in block_hashes:
            for group in (self.groups.main, *self.groups.others):
                while found := self._pool.get_cached_block(block_hash, [group]):
                    page = found[0].block_id
                    if page in keep or found[0].ref_cnt > (page in own):
                        break
                    self._forget(page)

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages, so that they stay what they are. Who holds one first may have found fewer of
        its counterparts."""
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
        """Give pages back; the last of a text is reclaimed first. Whoever does, the fewest
        counterparts go."""
        for page in reversed(pages):
            counterparts = self._held[page].pop(0)
            if not self._held[page]:
                del self._held[page]
            self._pool.free_blocks(self._blocks(page, counterparts))

    def by_group(self, page: int) -> tuple[int, ...]:
        """A page that is held, and its counterparts; `NULL_PAGE` where it has none."""
        return (page, *self._held[page][-1])

    def held(self, page: int) -> list[int]:
        """A page that is held, and the counterparts that it has."""
        return [held for held in self.by_group(page) if held != NULL_PAGE]

    def complete(self, pages: Iterable[int]) -> np.ndarray:
        """bool [n]: whether each page of the main group has all its counterparts, those of local
        heads, too."""
        found = (self.groups.counterparts(page) for page in pages)
        return np.array(
            [counterparts is not None and NULL_PAGE not in counterparts for counterparts in found],
            bool,
        )

    def keep(self, pages: Sequence[int]) -> None:
        """Nothing to do: vLLM keeps what it knows by its hash until it is reclaimed."""

    def num_hashed(self, pages: Sequence[int]) -> int:
        """How many of these pages, from the first on, hold full blocks that vLLM knows by their
        hash."""
        unknown = np.flatnonzero(self.versions_of(pages) == 0)
        return int(unknown[0]) if unknown.size else len(pages)

    def versions_of(self, pages: Iterable[int]) -> np.ndarray:
        """int64 [n]; 0 for a page that holds no full block that vLLM knows by its hash."""
        blocks = self._pool.blocks
        return np.array([_version(blocks[page].block_hash) for page in pages], np.int64)

    def is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        """bool [n]: whether each page still holds what it held under that version."""
        live = (self.versions_of(pages.tolist()) == versions) & (versions != 0)
        if self.groups.others:
            live[live] = [
                self.groups.counterparts(page) is not None for page in pages[live].tolist()
            ]
        return live

    @property
    def _none(self) -> tuple[int, ...]:
        """No counterparts."""
        return (NULL_PAGE,) * len(self.groups.others)

    def _blocks(self, page: int, counterparts: Iterable[int]) -> list[Any]:
        """vLLM's, of a page and the counterparts that it has."""
        return [self._pool.blocks[held] for held in (page, *counterparts) if held != NULL_PAGE]

    def _forget(self, page: int) -> None:
        self._pool.touch([self._pool.blocks[page]])
        self._pool.evict_blocks({page})
        self._pool.free_blocks([self._pool.blocks[page]])


def _version(block_hash: bytes | None) -> int:
    return 0 if block_hash is None else int.from_bytes(block_hash[:8], "little", signed=True)
