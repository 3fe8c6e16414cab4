"""Near-duplicate matching: text that is known except for edits (cross-query reuse, segment
discovery and retrieval).

Segments are windows at content-defined offsets and stretches between anchors. MinHash and LSH only
propose similar segments. An exact alignment of their tokens then decides which runs are identical
and may be grafted. Edited tokens are fresh.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import LCSseq

from kvgraft.core.block_index import VirtualBlockIndex
from kvgraft.core.keys import as_int32
from kvgraft.core.matches import Match, MatchQuery
from kvgraft.core.minhash import band_keys, bands, compact, similarity
from kvgraft.core.segmentation import MAX_SEGMENT, WINNOW, Segmenter, Segments, Similarity
from kvgraft.core.table import EntryTable, Table, occurrence

# Weight of a missed segment against a false proposal, which costs little.
_MISS_WEIGHT = 0.9
_MAX_BUCKET = 16  # segments of one bucket; further ones are not stored


class SegmentTable(Table):
    """Stored segments, found by the buckets of their bands. A segment lives as long as the entry of
    its first block."""

    def __init__(
        self, entries: EntryTable, num_bands: int, permutations: int, with_context: bool
    ) -> None:
        self.entry = np.empty(0, np.int32)
        self.source = np.empty(0, np.int64)
        self.start = np.empty(0, np.int32)  # position of the first token in the source
        self.length = np.empty(0, np.int32)
        self.signature = np.empty((0, permutations), np.uint8)
        self.context = np.empty((0, permutations if with_context else 0), np.uint8)
        super().__init__(num_bands)
        self._entries = entries

    def live(self, ids: np.ndarray) -> np.ndarray:
        entry, start = self.entry[ids], self.start[ids]
        block_start = start - start % self._entries.tokens.shape[1]
        same: np.ndarray = self._entries.holds(entry, self.source[ids], block_start)
        same[same] = self._entries.live(entry[same])
        return same


class SimilarIndex:
    """Finds runs of known text between edits, which exact matching misses. For one thread.

    Args:
        blocks: the index of the blocks that segments lie in.
        options: definition of near-duplicates.
        anchors: token sequences that begin a segment wherever they occur.
    """

    def __init__(
        self,
        blocks: VirtualBlockIndex,
        options: Similarity | None = None,
        anchors: Iterable[Sequence[int]] = (),
    ) -> None:
        self.blocks = blocks
        self.options = options = options or Similarity()
        self.segmenter = Segmenter(options, anchors)
        self._bands = bands(options.tau, options.permutations, _MISS_WEIGHT)
        self._table = SegmentTable(
            blocks.entries, self._bands[0], options.permutations, options.context_tau > 0
        )

    def __len__(self) -> int:
        """Segments held, live and stale."""
        return len(self._table)

    def nbytes(self) -> int:
        """Host memory in bytes, including spare capacity. The tokens belong to the block index."""
        return self._table.nbytes

    def insert(self, ids: np.ndarray, scope: bytes) -> int:
        """Register the segments that end in consecutive blocks of one source, and return how many
        were added.

        Args:
            ids: entries of the blocks, as `VirtualBlockIndex.insert` returned them, int32 [m].
        """
        known = np.flatnonzero(ids >= 0)
        runs = np.split(ids[known], np.flatnonzero(np.diff(known) > 1) + 1)
        return sum(self._insert(run, scope) for run in runs if len(run))

    def _insert(self, ids: np.ndarray, scope: bytes) -> int:
        size, entries = self.blocks.block_size, self.blocks.entries
        reach = MAX_SEGMENT + max(self.options.context_tokens, WINNOW)
        before = entries.walk(int(ids[0]), -1, -(-reach // size))[::-1]
        # begin: first new token
        begin, ids = size * len(before), np.array([*before, *ids], np.int32)
        root = self.blocks.lookup_scope(scope)
        segments = self.segmenter.cut(entries.tokens[ids].ravel(), root)
        rows = np.flatnonzero(segments.stops > begin)
        entry = ids[segments.starts[rows] // size]
        columns = {
            "entry": entry,
            "source": entries.source[entry],
            "start": entries.source_start[ids[0]] + segments.starts[rows],
            "length": segments.stops[rows] - segments.starts[rows],
            "signature": compact(segments.signatures[rows]),
            "context": segments.contexts[rows],
        }
        keys = band_keys(segments.signatures[rows], *self._bands, root)
        new = self._is_new(keys, columns)
        self._table.add(keys[new], **{name: column[new] for name, column in columns.items()})

        return int(new.sum())

    def match(self, query: MatchQuery) -> list[Match]:
        """Return the exact matches (`VirtualBlockIndex.match`), and near-duplicates."""
        matches = self.blocks.match(query)
        unclaimed = query.unclaimed()
        for match in matches:
            unclaimed[match.start : match.start + match.length] = False

        regions = [
            region
            for scope in query.scopes
            for region in self._regions(query.tokens, unclaimed, scope)
        ]
        depth, clean = query.max_depth, query.require_clean_context
        # The sort is stable, so of equally long regions those of the own scope come first.
        for region in sorted(regions, key=lambda region: region.start - region.stop):
            matches += self._graft(query.tokens, region, unclaimed, depth, clean)

        if (is_whole := query.is_whole) is not None:
            matches = [
                part for m in matches for part in m.where(is_whole(m.pages), self.blocks.block_size)
            ]
        return sorted(matches, key=lambda match: match.start)

    def propose(self, tokens: np.ndarray, scope: bytes) -> list[tuple[range, int, range]]:
        """Return stored segments that resemble segments of a prompt: tokens of the prompt, source,
        and tokens there."""
        segments, rows, ids = self._candidates(as_int32("tokens", tokens), scope)
        table = self._table
        return [
            (
                range(segments.starts[row], segments.stops[row]),
                int(table.source[i]),
                range(start, start + table.length[i]),
            )
            for row, i, start in zip(rows, ids, table.start[ids].tolist(), strict=True)
        ]

    def _is_new(self, keys: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Return which segments are not stored and have no full bucket: bool [n]. keys: uint64 [n,
        bands]."""
        rows, ids = self._table.find(keys.ravel())
        held = np.bincount(rows, minlength=keys.size).reshape(keys.shape)
        earlier = np.stack([occurrence(band) for band in keys.T], axis=1)
        new: np.ndarray = (held + earlier < _MAX_BUCKET).all(axis=1)
        rows //= self._bands[0]
        same = [
            getattr(self._table, name)[ids] == columns[name][rows]
            for name in ("source", "start", "length")
        ]
        new[rows[np.logical_and.reduce(same)]] = False
        return new

    def _candidates(
        self, tokens: np.ndarray, scope: bytes, wanted: np.ndarray | None = None
    ) -> tuple[Segments, np.ndarray, np.ndarray]:
        """Return the segments of a prompt with enough `wanted` tokens (`Segmenter.cut`), and their
        best candidates.

        The candidates are (segment, stored segment) pairs that pass all thresholds: int64 [n] each.
        """
        options, table, root = self.options, self._table, self.blocks.lookup_scope(scope)
        segments = self.segmenter.cut(tokens, root, wanted)
        keys = band_keys(segments.signatures, *self._bands, root)
        rows, ids = table.find(keys.ravel())
        pairs = np.unique(rows // self._bands[0] << 32 | ids)
        rows, ids = pairs >> 32, pairs & 0xFFFFFFFF
        likeness = similarity(table.signature[ids], compact(segments.signatures)[rows])
        lengths = segments.stops[rows] - segments.starts[rows]
        passed = (likeness >= options.tau) & (
            np.abs(lengths - table.length[ids]) <= options.tolerance_tokens
        )
        if options.context_tau:
            passed &= similarity(table.context[ids], segments.contexts[rows]) >= options.context_tau

        rows, ids, likeness = rows[passed], ids[passed], likeness[passed]
        order = np.lexsort((ids, -likeness, rows))
        rows, ids = rows[order], ids[order]
        best = occurrence(rows) < options.candidates
        return segments, rows[best], ids[best]

    def _regions(self, tokens: np.ndarray, unclaimed: np.ndarray, scope: bytes) -> list["_Region"]:
        """Join neighbouring proposals of one source with about the same shift to regions, longest
        first."""
        segments, rows, ids = self._candidates(tokens, scope, unclaimed)
        table = self._table
        pairs = np.stack(
            (
                table.source[ids],
                segments.starts[rows],
                segments.stops[rows],
                table.start[ids],
                table.entry[ids],
            )
        )
        regions: list[_Region] = []
        last: dict[tuple[int, int], _Region] = {}  # by source and rough shift
        for source, start, stop, source_start, entry in pairs[
            :, np.lexsort((pairs[3], pairs[1]))
        ].T.tolist():
            shift, coarse = source_start - start, 2 * self.options.tolerance_tokens + 1
            near = [last.get((source, shift // coarse + step)) for step in (0, -1, 1)]
            joined = next(
                (r for r in near if r is not None and start <= r.stop + self.options.window_tokens),
                None,
            )
            if joined is None:
                joined = _Region(start, stop, source_start, entry, scope)
                regions.append(joined)
            joined.stop = max(joined.stop, stop)
            last[source, shift // coarse] = joined

        return sorted(regions, key=lambda region: (region.start - region.stop, region.start))

    def _graft(
        self,
        tokens: np.ndarray,
        region: "_Region",
        unclaimed: np.ndarray,
        max_depth: int,
        from_start: bool,
    ) -> list[Match]:
        """Align a region, and one more window on either side, with its source. Claim and return the
        identical runs."""
        options, size, entries = self.options, self.blocks.block_size, self.blocks.entries
        around = options.window_tokens
        first, stop = max(region.start - around, 0), min(region.stop + around, len(tokens))
        if unclaimed[first:stop].sum() < options.min_run_tokens:
            return []

        margin = options.window_tokens + options.tolerance_tokens
        after = -(-(region.stop - region.start + margin + size) // size)
        ids = self.blocks.around(region.entry, -(-margin // size), after, region.scope, max_depth)
        if not len(ids):
            return []

        origin = int(entries.source_start[ids[0]])
        blocks = LCSseq.editops(
            tokens[first:stop].tolist(), entries.tokens[ids].ravel().tolist()
        ).as_matching_blocks()
        matches = []
        for here, there, length in ((first + block.a, block.b, block.size) for block in blocks):
            for start, end in _stretches(unclaimed[here : here + length]):
                source_start = there + start  # relative to origin
                if end - start < options.min_run_tokens or (from_start and origin + source_start):
                    continue
                covering = ids[source_start // size : -(-(there + end) // size)]
                matches.append(
                    self.blocks.as_match(here + start, end - start, origin + source_start, covering)
                )
                unclaimed[here + start : here + end] = False

        return matches


@dataclass
class _Region:
    """Tokens [start, stop) of a prompt that resemble a source from source_start on, in the block of
    `entry`."""

    start: int
    stop: int
    source_start: int
    entry: int
    scope: bytes


def _stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    """Runs [start, stop) in which a bool vector is set."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
