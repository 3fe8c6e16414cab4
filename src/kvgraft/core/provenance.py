"""Provenance of a request's blocks: their depths, the text they were computed behind, and what is
registered or stored of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvgraft.core.chunk import Chunk
from kvgraft.core.keys import chain_hashes
from kvgraft.core.matches import MAX_DEPTH
from kvgraft.core.readings import Span

NEVER = 1 << 62  # a position behind every token
_numbers = count()


@dataclass(eq=False)
class BlockProvenance:
    """The full blocks of a request, as a source of segments.

    Attributes:
        scope: digest of model and namespace, the root of every key of its content.
        source: unique number of this token sequence.
        num_exact: leading tokens whose KV is exact unless grafts precede it.
        first_approximate: position from which its KV may differ from full recomputation.
        steps: (position, depth) pairs: from that position on its KV has at least this depth.
        spans: text of other sources that it was computed behind, see `Readings.add`.
        num_registered: leading blocks that are registered in the index; `last_entry` is the index
            entry of the last of them.
        num_stored: leading blocks that were given to the store.
        num_entries: index entries that it has added.
        approximate_pages: its approximate pages that others may graft from.
        num_continuable: leading blocks that prompts which begin with its text can reuse.
    """

    scope: bytes
    source: int = -1
    num_exact: int = NEVER
    first_approximate: int = NEVER
    steps: tuple[tuple[int, int], ...] = ()
    spans: tuple[Span, ...] = ()
    num_registered: int = 0
    last_entry: int = -1
    num_stored: int = 0
    num_entries: int = 0
    approximate_pages: set[int] = field(default_factory=set)
    num_continuable: int = 0
    _chains: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.source < 0:
            self.source = next(_numbers)

    def chains(self, tokens: Sequence[int] | np.ndarray, block_size: int) -> list[bytes]:
        """Return `chain_hashes` of its first tokens. Each block is hashed once and cached."""
        known, count = self._chains, len(tokens) // block_size
        if count > len(known):
            new = np.array(tokens[len(known) * block_size : count * block_size], np.int64)
            known += chain_hashes(new, block_size, known[-1] if known else self.scope)
        return known[:count]

    def reset(self) -> None:
        """Clear all steps and spans. KV behind the first `num_exact` tokens still counts as
        approximate."""
        self.steps, self.spans, self.first_approximate = (), (), self.num_exact

    def mark_approximate(
        self, steps: Iterable[tuple[int, int]], spans: Iterable[Span] = ()
    ) -> None:
        """Note that its KV has at least these depths from these positions on, and was computed
        behind these spans."""
        known = ((position, min(depth, MAX_DEPTH)) for position, depth in steps)
        self.steps, self.spans = (*self.steps, *known), (*self.spans, *spans)
        self.first_approximate = min(
            [self.first_approximate, *(position for position, _ in self.steps)]
        )

    def restart(self) -> None:
        """Forget which blocks are registered, after its pages were released. Stored blocks stay
        stored."""
        self.num_registered, self.last_entry = 0, -1
        self.approximate_pages.clear()

    @property
    def depth(self) -> int:
        """Greatest depth of its KV."""
        return max((depth for _, depth in self.steps), default=0)

    def depths(
        self, num_blocks: int, block_size: int, hits: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the depths of its first blocks, int16 [num_blocks].

        The depth is 0 for blocks that end before the first graft, and for exact `hits` bool [h]
        behind it. It is d + 1 behind grafts of depth d, and at least that of the blocks it
        continues from.
        """
        found = np.zeros(num_blocks, np.int16)
        for position, depth in (*self.steps, (self.first_approximate, 1)):
            found[position // block_size :] = np.maximum(found[position // block_size :], depth)
        if hits is not None:
            found[: hits.size][hits[:num_blocks]] = 0
        return found

    def chunks(
        self,
        tokens: np.ndarray,
        is_exact: np.ndarray,
        namespace: str,
        first_source: int,
        chunk_blocks: int,
    ) -> Iterator[tuple[Chunk, slice]]:
        """Yield chunks of exact blocks that the store does not have yet, with the blocks of each.

        Args:
            tokens: int64 [n * block_size].
            is_exact: bool [n].
            first_source: number from which this process counts its sources.
        """
        stop = len(is_exact)
        size = len(tokens) // stop if stop else 1
        chains = self.chains(tokens, size)
        for begin in range(self.num_stored, stop, chunk_blocks):
            exact = is_exact[begin : begin + chunk_blocks]
            where = slice(begin, begin + (len(exact) if exact.all() else int(exact.argmin())))
            if where.stop > begin:
                named, part = tuple(chains[where]), tokens[begin * size : where.stop * size]
                yield (
                    Chunk(
                        self.scope, namespace, named, part, first_source + self.source, begin * size
                    ),
                    where,
                )

        self.num_stored = max(stop, self.num_stored)
