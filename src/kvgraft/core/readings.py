"""Texts that were read in one prompt: only their KV distinguishes similar ones
(docs/results/alike.md).

Text is computed once and grafted into prompts with other text, behind which new text is computed.
That new text was then read together with all of the grafts, although this prompt computed only the
new text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvgraft.core.matches import Match

# a source, positions [start, stop) in it, and where the first of them stands in the reader
Span = tuple[int, int, int, int]
# Number of sources from which on those without KV are forgotten. The newest half of this number is
# kept, since their requests may still register blocks.
LEAST_SOURCES = 1 << 10
# Share of a match that must have been read together with another match.
LEAST_SHARE = 0.5


class Readings:
    """Spans of other sources that each source was read behind."""

    def __init__(self) -> None:
        self._behind: dict[int, np.ndarray] = {}  # source -> spans int64 [n, 3]
        # For each page: its version, the source that its text was read in, and its place there.
        self._held = np.full((0, 3), -1, np.int64)
        self._limit = LEAST_SOURCES

    def __len__(self) -> int:
        """Sources that were read behind others."""
        return len(self._behind)

    def note(
        self,
        source: int,
        spans: Iterable[Span],
        pages: np.ndarray,
        versions: np.ndarray,
        first: int,
        block_size: int,
    ) -> None:
        """Note the pages int64 [n] of a source in these versions, from its block `first` on.

        Pages that others have computed are its prefix. Pages that hold copies keep the place that
        they were copied from. For spans see `add`.
        """
        if len(pages) and len(self._held) <= pages.max():
            more = np.full((2 * int(pages.max()) + 2 - len(self._held), 3), -1, np.int64)
            self._held = np.vstack([self._held, more])

        blocks, spans = first + np.arange(len(pages)), list(spans)
        if not first:
            self.add(source, (*spans, *spans_of(self.hits(blocks, pages, versions, block_size))))

        origins = np.stack([versions, np.full(len(pages), source), blocks * block_size], 1)
        for other, start, stop, place in spans:
            # blocks of which at least half is copied
            edges = np.rint(np.array([place, place + stop - start]) / block_size).astype(int)
            low, high = (edges - first).clip(0).tolist()
            origins[low:high, 1] = other
            origins[low:high, 2] = blocks[low:high] * block_size + start - place

        is_new = self._held[pages, 0] != versions
        self._held[pages[is_new]] = origins[is_new]

    def hits(
        self, blocks: np.ndarray, pages: np.ndarray, versions: np.ndarray, block_size: int
    ) -> list[Match]:
        """Return the cached blocks int64 [n] of a prompt as matches with the text that was read.

        Args:
            blocks: numbers of the blocks in the prompt, ascending.
            pages, versions: their pages, and the versions of these. Pages that were never noted are
                left out.
        """
        is_known = np.zeros(len(pages), bool)
        inside = pages < len(self._held)
        is_known[inside] = self._held[pages[inside], 0] == versions[inside]
        blocks, pages = blocks[is_known], pages[is_known]
        if not len(blocks):
            return []

        places = np.stack([blocks * block_size, *self._held[pages, 1:].T])
        joined = (np.diff(places) == [[block_size], [0], [block_size]]).all(0)
        firsts = np.flatnonzero(np.append(True, ~joined))
        lengths = block_size * np.diff(firsts, append=len(blocks))
        return [
            Match(start, length, source_start, run, 0, source)
            for (start, source, source_start), length, run in zip(
                places[:, firsts].T.tolist(),
                lengths.tolist(),
                np.split(pages, firsts[1:]),
                strict=True,
            )
        ]

    def add(self, source: int, spans: Iterable[Span]) -> None:
        """Note that a source was read behind these spans of others."""
        rows = sorted({span[:3] for span in spans})
        self._behind.pop(source, None)
        if rows:
            self._behind[source] = np.array(rows, np.int64)

    @property
    def is_full(self) -> bool:
        """Return whether it is time to forget sources: twice as many as the last time kept."""
        return len(self._behind) > self._limit

    def keep(self, sources: np.ndarray) -> None:
        """Forget all sources but these, int64 [n], those whose text is in a noted page, and the
        newest."""
        known = np.fromiter(self._behind, np.int64, len(self._behind))[: -(LEAST_SOURCES // 2)]
        kept = np.isin(known, sources) | np.isin(known, self._held[:, 1])
        for source in known[~kept].tolist():
            del self._behind[source]
        self._limit = max(LEAST_SOURCES, 2 * len(self._behind))

    def label(self, matches: Sequence[Match]) -> list[Match]:
        """Return the matches, in this order, with equal `reading` if all of them were read
        together."""
        sources, of = np.unique([match.source for match in matches], return_inverse=True)
        if len(sources) < 2:
            return list(matches)

        together = self._together(matches, sources, of)
        groups: list[tuple[int, np.ndarray]] = []  # a reading, and which matches have it
        labelled = []
        for number, match in enumerate(matches):
            found = next((group for group in groups if together[number][group[1]].all()), None)
            if found is None:
                groups.append(found := (match.source, np.zeros(len(matches), bool)))
            found[1][number] = True
            labelled.append(replace(match, reading=found[0]))

        return labelled

    def _together(
        self, matches: Sequence[Match], sources: np.ndarray, of: np.ndarray
    ) -> np.ndarray:
        """Return which matches have been read together, bool [n, n].

        These are matches of one source, and pairs in which one source was read behind the other
        match.
        """
        starts = np.array([match.source_start for match in matches], np.int64)
        lengths = np.array([match.length for match in matches], np.int64)
        spans = [self._of(source) for source in sources.tolist()]
        readers = np.repeat(np.arange(len(sources)), [len(rows) for rows in spans])
        read, first, stop = np.concatenate(spans).T

        order = np.argsort(of, kind="stable")  # matches by source
        by_source = sources[of[order]]
        begins, ends = (np.searchsorted(by_source, read, side) for side in ("left", "right"))
        pairs = np.repeat(np.arange(len(read)), ends - begins)  # a span and a match of its source
        places = np.arange(len(pairs)) - np.repeat((ends - begins).cumsum() - ends, ends - begins)
        match = order[places]
        within = np.minimum(stop[pairs], starts[match] + lengths[match])
        within -= np.maximum(first[pairs], starts[match])
        whole = within >= LEAST_SHARE * lengths[match]

        behind = np.zeros((len(sources), len(matches)), bool)
        behind[readers[pairs[whole]], match[whole]] = True
        met: np.ndarray = behind[of]
        return met | met.T | (of[:, None] == of)

    def _of(self, source: int) -> np.ndarray:
        return self._behind.get(source, np.zeros((0, 3), np.int64))


def spans_of(matches: Iterable[Match]) -> list[Span]:
    """Return the spans of the sources of matches."""
    return [
        (match.source, match.source_start, match.source_start + match.length, match.start)
        for match in matches
    ]
