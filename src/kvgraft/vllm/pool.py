"""vLLM's block pool as our own code sees pages: virtual and frozen blocks live in it, nothing is copied."""

from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np


class SharedPool:
    """Pages of vLLM's block pool. A page's version is the head of its block hash, which eviction resets.

    Attributes:
        block_size: tokens of a page.
        hit_counts: int64 [pages], how often each page was a graft source or an exact hit.
    """

    def __init__(self, blocks: Any, block_size: int) -> None:
        self._pool = blocks  # vllm.v1.core.block_pool.BlockPool
        self.block_size = block_size
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
        found = (self._pool.get_cached_block(block_hash, [0]) for block_hash in block_hashes)
        return [block[0].block_id for block in found if block]

    def num_cached(self, block_hashes: Iterable[Any]) -> int:
        """How many of these, from the first on, vLLM finds."""
        return sum(1 for _ in takewhile(lambda block_hash: self._pool.get_cached_block(block_hash, [0]), block_hashes))

    def allocate(self, count: int) -> list[int]:
        """Take pages that nobody holds; ValueError if there are not so many."""
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def name(self, page: int, block_hash: Any) -> None:
        """Let vLLM find a page that we hold by this hash, as it finds its own."""
        hashed = SimpleNamespace(block_hashes=[block_hash])
        self._pool.cache_full_blocks(hashed, [self._pool.blocks[page]], 0, 1, self._pool.hash_block_size, 0)

    def forget(self, pages: Iterable[int]) -> None:
        """Let nobody find what these pages hold. Free ones become the first to be reclaimed, held ones when they are
        given back: vLLM reclaims pages that can be found last, and in the order of their last use."""
        for page in pages:
            self.acquire([page])
            self._pool.evict_blocks({page})
            self.release([page])

    def forget_hashes(self, block_hashes: Iterable[Any], own: Container[int] = (), keep: Container[int] = ()) -> None:
        """`forget` the pages that vLLM finds by these hashes, except those in `keep` and those that somebody holds;
        of pages in `own` one holder is who asks."""
        for block_hash in block_hashes:
            while found := self._pool.get_cached_block(block_hash, [0]):
                page = found[0].block_id
                if page in keep or found[0].ref_cnt > (page in own):
                    break
                self.forget([page])

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages, so that they stay what they are."""
        self._pool.touch([self._pool.blocks[page] for page in pages])

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back; the last of a text is reclaimed first."""
        self._pool.free_blocks([self._pool.blocks[page] for page in reversed(pages)])

    def keep(self, pages: Sequence[int]) -> None:
        """Nothing to do: vLLM keeps what it knows by its hash until it is reclaimed."""

    def num_hashed(self, pages: Sequence[int]) -> int:
        """How many of these pages, from the first on, hold full blocks that vLLM knows by their hash."""
        unknown = np.flatnonzero(self.versions_of(pages) == 0)
        return int(unknown[0]) if unknown.size else len(pages)

    def versions_of(self, pages: Iterable[int]) -> np.ndarray:
        """int64 [n]; 0 for a page that holds no full block that vLLM knows by its hash."""
        blocks = self._pool.blocks
        return np.array([_version(blocks[page].block_hash) for page in pages], np.int64)

    def is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        """bool [n]: whether each page still holds what it held under that version."""
        return (self.versions_of(pages.tolist()) == versions) & (versions != 0)


def _version(block_hash: bytes | None) -> int:
    return 0 if block_hash is None else int.from_bytes(block_hash[:8], "little", signed=True)
