"""Index of stored chunks: numbers for their blocks, found by content at any offset or by their
chain hash."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvgraft.core.chunk import Chunk, ChunkRecord
from kvgraft.core.keys import check_scope
from kvgraft.core.matches import Match, MatchQuery
from kvgraft.core.segment_index import SegmentIndex
from kvgraft.core.segmentation import Similarity

# Numbers that must be freed before one is reused, so that numbers of callers stay unambiguous.
_RESTING = 1 << 16
_Place = tuple[bytes, int, int]  # scope, source, position


class ChunkIndex:
    """Records by the number of their blocks: number of the chunk * chunk_blocks + place in it.

    Args:
        block_size: tokens of a block.
        chunk_blocks: greatest number of blocks in a chunk.
        similarity, anchors: of near-duplicates (`SimilarIndex`); None finds identical text only.
    """

    def __init__(
        self,
        block_size: int,
        chunk_blocks: int,
        similarity: Similarity | None = None,
        anchors: Iterable[Sequence[int]] = (),
    ) -> None:
        if chunk_blocks < 1:
            raise ValueError(f"chunk_blocks is {chunk_blocks}, must be at least 1")

        self.block_size = block_size
        self.chunk_blocks = chunk_blocks
        self._index = SegmentIndex(block_size, self._is_live, similarity, anchors)
        self._records: dict[int, ChunkRecord] = {}
        self._numbers: dict[bytes, int] = {}  # by key
        # by chunk number; a version grows when the number is freed
        self._versions = np.zeros(8, np.int64)
        self._resting: deque[int] = deque()
        self._by_chain: dict[bytes, list[int]] = {}  # blocks of exact payload
        self._first: dict[_Place, int] = {}  # the chunk that begins there
        # the chunk that ends there, and the entry of its last block
        self._last: dict[_Place, tuple[int, int]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._numbers

    def __len__(self) -> int:
        return len(self._records)

    def can_hold(self, chunk: Chunk) -> bool:
        """Return whether the chunk has this block size and no more than chunk_blocks blocks."""
        return chunk.block_size == self.block_size and chunk.num_blocks <= self.chunk_blocks

    def get(self, key: bytes) -> ChunkRecord | None:
        """Return the record of a chunk, or None."""
        return self._records[self._numbers[key]] if key in self._numbers else None

    def find(self, block: int, *scopes: bytes) -> tuple[ChunkRecord, int] | None:
        """Return the record that has a block, and its place there; None if it is gone or outside
        these scopes."""
        number, place = divmod(int(block), self.chunk_blocks)
        record = self._records.get(number)
        if record is None or record.chunk.scope not in scopes or place >= record.chunk.num_blocks:
            return None
        return record, place

    def add(self, record: ChunkRecord) -> None:
        """Register a chunk, replacing one with the same key, and link it to its neighbours in the
        source."""
        self.remove(record.key)
        chunk, number = record.chunk, self._new_number()
        blocks = self._blocks(number, chunk)
        before, after = _edges(chunk)
        entries = self._name(
            number, chunk, chunk.num_blocks, after=self._last.get(before, (-1, -1))[1]
        )
        if after in self._first:
            following = self._first[after]
            self._name(following, self._records[following].chunk, 1, after=int(entries[-1]))

        self._records[number], self._numbers[chunk.key] = record, number
        self._first[before], self._last[after] = number, (number, int(entries[-1]))
        if not record.int8:
            for chain, block in zip(chunk.chains, blocks.tolist(), strict=True):
                self._by_chain.setdefault(chain, []).append(block)

    def remove(self, key: bytes) -> None:
        """Forget a chunk. Unknown keys are ignored."""
        if (number := self._numbers.pop(key, None)) is None:
            return

        record = self._records.pop(number)
        chunk = record.chunk
        self._versions[number] += 1
        self._resting.append(number)
        before, after = _edges(chunk)
        if self._first.get(before) == number:
            del self._first[before]

        if after in self._last and self._last[after][0] == number:
            del self._last[after]

        if not record.int8:
            for chain, block in zip(
                chunk.chains, self._blocks(number, chunk).tolist(), strict=True
            ):
                self._by_chain[chain].remove(block)
                if not self._by_chain[chain]:
                    del self._by_chain[chain]

    def match(self, query: MatchQuery) -> list[Match]:
        """Return the parts of a prompt that are stored: matches whose pages are block numbers."""
        return self._index.match(replace(query, is_whole=None))

    def prefix(self, chain_keys: Sequence[bytes], scope: bytes) -> list[int]:
        """Return the block with exact payload for each chain, or -1."""
        check_scope(scope)
        found = [self._by_chain.get(chain, [-1])[-1] for chain in chain_keys]
        return [block if block >= 0 and self.find(block, scope) else -1 for block in found]

    def _name(self, number: int, chunk: Chunk, count: int, *, after: int) -> np.ndarray:
        """Insert the first blocks of a chunk into the index. Return their entries, int32
        [count]."""
        return self._index.insert(
            chunk.tokens[: count * self.block_size],
            self._blocks(number, chunk)[:count],
            np.full(count, self._versions[number]),
            source=chunk.source,
            source_start=chunk.source_start,
            scope=chunk.scope,
            after=after,
        )

    def _blocks(self, number: int, chunk: Chunk) -> np.ndarray:
        return number * self.chunk_blocks + np.arange(chunk.num_blocks)

    def _new_number(self) -> int:
        if len(self._resting) > _RESTING:
            return self._resting.popleft()
        number = len(self._records) + len(self._resting)
        if number == len(self._versions):
            self._versions = np.concatenate((self._versions, np.zeros_like(self._versions)))
        return number

    def _is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        return self._versions[pages // self.chunk_blocks] == versions


def _edges(chunk: Chunk) -> tuple[_Place, _Place]:
    """Return the places in its source at which the chunk begins and ends."""
    return (chunk.scope, chunk.source, chunk.source_start), (
        chunk.scope,
        chunk.source,
        chunk.source_end,
    )
