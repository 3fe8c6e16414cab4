"""What one request leaves behind for others to reuse, and how much of it they know of."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvgraft.reuse.readings import Span
from kvgraft.segments.keys import chain_hashes
from kvgraft.segments.matches import MAX_DEPTH
from kvgraft.segments.store import Chunk

NEVER = 1 << 62  # a position behind every token
_numbers = count()


@dataclass(eq=False)
class BlockProvenance:
    """The full blocks of a request, as a source of segments.

    Attributes:
        scope: digest of model and namespace, the root of every key of its content.
        source: number of this token sequence, of no other one.
        first_approximate: position from which its KV may differ from full recomputation.
        steps: (position, depth) of what it rests on: from that position on its KV has at least this
            depth.
        spans: what it was read behind, see `Readings.add`.
        num_registered: leading blocks that were offered; `last_entry` is the index entry of the
            last of them.
        num_stored: leading blocks that the store was given.
        num_entries: index entries that it has added.
        approximate_pages: those of its pages that others may graft from although they are
            approximate.
    """

    scope: bytes
    source: int = -1
    first_approximate: int = NEVER
    steps: tuple[tuple[int, int], ...] = ()
    spans: tuple[Span, ...] = ()
    num_registered: int = 0
    last_entry: int = -1
    num_stored: int = 0
    num_entries: int = 0
    approximate_pages: set[int] = field(default_factory=set)
    _chains: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.source < 0:
            self.source = next(_numbers)

    def chains(self, tokens: Sequence[int] | np.ndarray, block_size: int) -> list[bytes]:
        """`chain_hashes` of its first tokens, whose blocks are hashed once however often they are
        asked for."""
        known, count = self._chains, len(tokens) // block_size
        if count > len(known):
            new = np.array(tokens[len(known) * block_size : count * block_size], np.int64)
            known += chain_hashes(new, block_size, known[-1] if known else self.scope)
        return known[:count]

    def reset(self, num_exact: int = NEVER) -> None:
        """It rests on nothing approximate; behind its first num_exact tokens its KV is approximate
        anyway."""
        self.steps, self.spans, self.first_approximate = (), (), num_exact

    def mark_approximate(
        self, steps: Iterable[tuple[int, int]], spans: Iterable[Span] = ()
    ) -> None:
        """From these positions on its KV has at least these depths; it was read behind these
        spans."""
        known = ((position, min(depth, MAX_DEPTH)) for position, depth in steps)
        self.steps, self.spans = (*self.steps, *known), (*self.spans, *spans)
        self.first_approximate = min(
            [self.first_approximate, *(position for position, _ in self.steps)]
        )

    def restart(self) -> None:
        """Its blocks have been given back, and it will have others; what was stored stays
        stored."""
        self.num_registered, self.last_entry = 0, -1
        self.approximate_pages.clear()

    @property
    def depth(self) -> int:
        """The greatest that it rests on."""
        return max((depth for _, depth in self.steps), default=0)

    def depths(
        self, num_blocks: int, block_size: int, hits: np.ndarray | None = None
    ) -> np.ndarray:
        """How far its first blocks are from exact KV, int16 [num_blocks]: 0 for those that end
        before the first graft, and for exact `hits` bool [h] behind it; d + 1 behind grafts of
        depth d, or behind what it goes on with."""
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
        """What the store does not have yet of the blocks of `tokens` int64 [n * block_size]: chunks
        of exact ones, and which blocks each has.

        Args:
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
