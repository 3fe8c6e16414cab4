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

Span = tuple[int, int, int]  # a source, and the positions [start, stop) in it
WHOLE = 1 << 31  # a position behind every token
# Number of sources that are remembered.
CAPACITY = 1 << 15
# Share of a match that must have been read together with another match.
LEAST_SHARE = 0.5


class Readings:
    """Spans of other sources that each source was read behind."""

    def __init__(self) -> None:
        self._behind: dict[int, np.ndarray] = {}  # source -> spans int64 [n, 3]
        # For each page: its version, and the source that computed it.
        self._held = np.full((0, 2), -1, np.int64)

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

        Pages that others have computed are its prefix. For spans see `add`.
        """
        if len(pages) and len(self._held) <= pages.max():
            more = np.full((2 * int(pages.max()) + 2 - len(self._held), 2), -1, np.int64)
            self._held = np.vstack([self._held, more])

        is_known = self._held[pages, 0] == versions
        self._held[pages[~is_known]] = np.stack(
            [versions[~is_known], np.full((~is_known).sum(), source)], 1
        )
        if not first:
            places, others = np.flatnonzero(is_known), self._held[pages[is_known], 1]
            cuts = np.flatnonzero(
                (np.diff(places, prepend=-2) != 1) | (np.diff(others, prepend=-2) != 0)
            )
            prefix = [
                (int(run[0]), int(at[0]) * block_size, (int(at[-1]) + 1) * block_size)
                for run, at in zip(
                    np.split(others, cuts)[1:], np.split(places, cuts)[1:], strict=True
                )
            ]
            self.add(source, (*spans, *prefix))

    def add(self, source: int, spans: Iterable[Span]) -> None:
        """Note that a source was read behind these spans of others.

        A span that is a whole source includes all spans that this source was read behind.
        """
        rows = np.array(list(spans), np.int64).reshape(-1, 3)
        whole = rows[rows[:, 2] == WHOLE, 0].tolist()
        self._behind[source] = np.unique(
            np.vstack([rows, *(self._of(other) for other in whole)]), axis=0
        )
        while len(self._behind) > CAPACITY:
            del self._behind[next(iter(self._behind))]

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
        (match.source, match.source_start, match.source_start + match.length) for match in matches
    ]
