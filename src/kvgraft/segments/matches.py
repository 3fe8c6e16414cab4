"""What can be grafted where: the result of every index, and what plans are made of."""

from dataclasses import dataclass

import numpy as np


def in_blocks(values: np.ndarray, block_size: int) -> np.ndarray:
    """View of a vector [n] by its whole blocks, [n // block_size, block_size]."""
    return values[: len(values) // block_size * block_size].reshape(-1, block_size)


@dataclass(frozen=True, eq=False)
class Match:
    """Tokens [start, start + length) of a prompt that can be grafted from one source.

    Attributes:
        source_start: position in the source of the first token; any token, not only a block's first.
        pages: int32, physical blocks that cover [source_start, source_start + length) of the source.
        depth: the greatest of the blocks: 0 is exact KV, d + 1 what was computed over grafts of depth d.
        source: identity of the sequence that the tokens were read in.
    """

    start: int
    length: int
    source_start: int
    pages: np.ndarray
    depth: int
    source: int

    def source_slots(self, block_size: int) -> np.ndarray:
        """Slot of each token in the paged KV pool, int64 [length]."""
        first = self.source_start % block_size  # within the pages
        slots = self.pages[:, None].astype(np.int64) * block_size + np.arange(block_size)
        return slots.ravel()[first : first + self.length]

    def where(self, usable: np.ndarray, block_size: int) -> "list[Match]":
        """The parts of the match that lie in pages where `usable` bool [pages] is set."""
        first = self.source_start % block_size  # within the pages
        edges = np.flatnonzero(np.diff(np.concatenate(([False], usable, [False])).astype(np.int8))).tolist()
        parts = []
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            start = max(begin * block_size - first, 0)
            length = min(end * block_size - first, self.length) - start
            moved = self.start + start, length, self.source_start + start
            parts.append(Match(*moved, self.pages[begin:end], self.depth, self.source))
        return parts
