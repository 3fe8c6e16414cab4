"""Queries for text that can be grafted, and matches: the result of every index, from which plans
are made."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgraft.core.keys import as_int32, check_scope
from kvgraft.core.table import IsWhole

# Depths are capped here, so that they fit into 16 bits.
MAX_DEPTH = 2**14
DEEP = 5  # depths from this one on share one name


def depth_name(depth: int) -> str:
    """Name of a depth in tables and metrics. There are few names, to bound the number of labels."""
    return f"{DEEP}+" if depth >= DEEP else str(depth)


def in_blocks(values: np.ndarray, block_size: int) -> np.ndarray:
    """View of a vector [n] by its whole blocks, [n // block_size, block_size]."""
    return values[: len(values) // block_size * block_size].reshape(-1, block_size)


@dataclass(frozen=True, eq=False)
class MatchQuery:
    """A prompt, and the limits on known text that may be grafted into it.

    Attributes:
        tokens: the prompt, int32 [T]; other integers are converted.
        scopes: `scope_digest` of the model and each namespace that the request may read, its own
            first. Entries of other scopes are never found. Each further scope costs about as much
            time as the first.
        free: bool [T], positions that may be grafted; None: all.
        max_depth: greatest depth of blocks that may be used.
        require_clean_context: use only text that its source began with. The KV of other text
            carries the context that it was first read in, which may be hostile.
        similar: also find near-duplicates, if the index supports them.
        is_whole: use only pages for which this is true; None: all pages.

    Raises:
        ValueError: `free` has another dtype or shape, a scope is invalid or occurs twice, or tokens
            are no vector of integers.
    """

    tokens: np.ndarray
    scopes: tuple[bytes, ...]
    free: np.ndarray | None = None
    max_depth: int = 0
    require_clean_context: bool = False
    similar: bool = False
    is_whole: IsWhole | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", as_int32("tokens", self.tokens))
        shape, free = self.tokens.shape, self.free
        if free is not None and (free.dtype != bool or free.shape != shape):
            raise ValueError(f"free is {free.dtype} {free.shape}, expected bool {shape}")
        if len(set(self.scopes)) < len(self.scopes):
            raise ValueError(f"a scope is given twice: {[s.hex()[:8] for s in self.scopes]}")
        for scope in self.scopes:
            check_scope(scope)

    def unclaimed(self) -> np.ndarray:
        """Return a new bool [T]: positions that may be grafted."""
        return np.ones(len(self.tokens), bool) if self.free is None else self.free.copy()


@dataclass(frozen=True, eq=False)
class Match:
    """Tokens [start, start + length) of a prompt that can be grafted from one source.

    Attributes:
        source_start: position in the source of the first token; it may lie within a block.
        pages: int32, physical blocks that cover [source_start, source_start + length) of the
            source.
        depth: greatest depth of the blocks: 0 is exact KV, d + 1 was computed over grafts of depth
            d.
        source: identity of the sequence that the tokens were read in.
        reading: equal for matches that were read in one prompt, though their sources differ; None:
            `source`.
    """

    start: int
    length: int
    source_start: int
    pages: np.ndarray
    depth: int
    source: int
    reading: int | None = None

    def where(self, usable: np.ndarray, block_size: int) -> "list[Match]":
        """Return the parts of the match that lie in pages where `usable` bool [pages] is set."""
        first = self.source_start % block_size  # within the pages
        edges = np.flatnonzero(
            np.diff(np.concatenate(([False], usable, [False])).astype(np.int8))
        ).tolist()
        parts = []
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            start = max(begin * block_size - first, 0)
            length = min(end * block_size - first, self.length) - start
            moved = self.start + start, length, self.source_start + start
            parts.append(
                Match(*moved, self.pages[begin:end], self.depth, self.source, self.reading)
            )

        return parts


def grafted_tokens(
    matches: Sequence[Match], block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the tokens of matches one after the other, int64 [g] each.

    Returns:
        Positions in the prompt, slots in the paged KV pool, and shifts (new minus old position).
    """
    rows = [(m.start, m.length, m.source_start, len(m.pages)) for m in matches]
    starts, lengths, source_starts, num_pages = np.array(rows, np.int64).reshape(-1, 4).T
    pages = np.concatenate([np.zeros(0, np.int64), *(match.pages for match in matches)])
    slots = (pages[:, None] * block_size + np.arange(block_size)).ravel()
    # first slot index of each match
    firsts = block_size * (num_pages.cumsum() - num_pages) + source_starts % block_size
    numbers, before = np.arange(lengths.sum()), lengths.cumsum() - lengths
    places, held = (numbers + (first - before).repeat(lengths) for first in (starts, firsts))

    return places, slots[held], (starts - source_starts).repeat(lengths)
