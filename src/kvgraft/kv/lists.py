"""Page lists of one sequence, and the local pages that belong to pages of the first list."""

from collections.abc import Iterable

import numpy as np
import torch

from kvgraft.kernels.upload import upload
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.pages import PagePool


class PageLists:
    """Pages of one sequence by list and block, and their slots for the kernels.

    Attributes:
        pages: int64 [lists, blocks], -1 where a list holds no page of a block.
        slots: int64 [lists, blocks * block_size] on the pool's device, -1 where there is no page.
        spare: pages reserved for the local lists of the sequence.
    """

    def __init__(
        self, layout: StreamLayout, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.layout = layout
        self.block_size = block_size
        self.pages = np.full((layout.num_lists, num_blocks), -1, np.int64)
        self.slots = torch.full(
            (layout.num_lists, num_blocks * block_size), -1, dtype=torch.int64, device=device
        )
        self.spare: list[int] = []

    @property
    def held(self) -> list[int]:
        """All pages, each once, in the order for release: the pool reclaims the last one first."""
        return [
            *self.pages[0][self.pages[0] >= 0].tolist(),
            *self.pages[1:][self.pages[1:] >= 0].tolist(),
            *self.spare,
        ]

    def place(self, lists: slice, blocks: np.ndarray, pages: np.ndarray) -> None:
        """Put pages int [lists, b] into blocks int [b]; -1 removes them."""
        self.pages[lists, blocks] = pages
        slots = pages[..., None] * self.block_size + np.arange(self.block_size)
        slots[pages < 0] = -1
        places, placed = upload(
            self.slots.device, torch.from_numpy(blocks), torch.from_numpy(slots)
        )
        self.slots.view(len(self.slots), -1, self.block_size)[lists, places] = placed

    def shorten(self, num_blocks: int) -> list[int]:
        """Keep only the first blocks, and return the pages of the others."""
        dropped = self.pages[:, num_blocks:]
        self.pages = self.pages[:, :num_blocks]
        self.slots = self.slots[:, : num_blocks * self.block_size]
        return dropped[dropped >= 0].tolist()

    def add_local(self, pool: PagePool, blocks: np.ndarray) -> None:
        """Add pages for blocks int [b] to all local lists. Reserved pages are used first."""
        missing = blocks[(self.pages[1:, blocks] < 0).any(0)]
        count = missing.size * self.layout.num_local_lists
        if count:
            taken, self.spare = self.spare[:count], self.spare[count:]
            taken += pool.allocate(count - len(taken))
            self.place(slice(1, None), missing, np.array(taken).reshape(-1, missing.size))

    def leave_behind(self, pool: PagePool, first: int) -> None:
        """Release the local pages that no query from position `first` on sees."""
        held = np.flatnonzero((self.pages[1:] >= 0).any(0))
        gone = held[~self.layout.seen(held, first, self.block_size)]
        if gone.size:
            pool.release(self.pages[1:, gone].ravel().tolist())
            self.place(slice(1, None), gone, np.full((self.layout.num_local_lists, gone.size), -1))

    def settle(self, pool: PagePool, num_local: int) -> None:
        """Reserve or release pages until the sequence holds exactly `num_local` local pages, spare
        ones included.
        """
        count = num_local - int((self.pages[1:] >= 0).sum())
        if count < len(self.spare):
            pool.release(self.spare[count:])
            self.spare = self.spare[:count]
        else:
            self.spare += pool.allocate(count - len(self.spare))


class LocalPages:
    """Pages of the local lists that hold the same tokens as each page of the first list.

    The pool may reclaim each of them at any time. Pages that a window has passed are reclaimed
    first.
    """

    def __init__(self, pool: PagePool, num_local_lists: int) -> None:
        self._pool = pool
        self._pages = np.full((pool.num_pages, num_local_lists), -1, np.int64)
        self._versions = np.zeros((pool.num_pages, num_local_lists), np.int64)
        self._owner_versions = np.zeros((pool.num_pages, num_local_lists), np.int64)

    def record(self, pages: np.ndarray, local: np.ndarray) -> None:
        """Record local pages of the first list's pages.

        Args:
            pages: int [b], pages of the first list.
            local: int [local lists, b]; -1 leaves a recorded page unchanged.
        """
        new = local.T >= 0  # [b, lists]
        rows = np.repeat(pages[:, None], new.shape[1], axis=1)[new]
        columns = np.broadcast_to(np.arange(new.shape[1]), new.shape)[new]
        self._pages[rows, columns] = local.T[new]
        self._versions[rows, columns] = self._pool.versions[local.T[new]]
        self._owner_versions[rows, columns] = self._pool.versions[rows]
        self._pool.keep(local.T[new].tolist())

    def of(self, pages: np.ndarray) -> np.ndarray:
        """Return the local pages that still hold their tokens, int64 [b, local lists]; -1 for
        others.
        """
        known, versions = self._pages[pages], self._pool.versions
        same_page = self._versions[pages] == versions[known]
        same_owner = self._owner_versions[pages] == versions[pages, None]
        return np.where((known >= 0) & same_page & same_owner, known, -1)

    def complete(self, pages: Iterable[int]) -> np.ndarray:
        """Return whether every local list still holds these tokens, bool [b]."""
        return np.asarray((self.of(np.fromiter(pages, np.int64)) >= 0).all(axis=1))
