"""Index of the page contents that prompts can graft from."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvgraft.core.matches import MAX_DEPTH, Match, MatchQuery
from kvgraft.core.options import MATCH
from kvgraft.core.pages import Pages
from kvgraft.core.provenance import BlockProvenance
from kvgraft.core.readings import Readings
from kvgraft.core.report import PrefillReport
from kvgraft.core.segment_index import SegmentIndex
from kvgraft.core.segmentation import Similarity
from kvgraft.core.table import IsWhole


class ReuseIndex:
    """Finds known text for prompts, and registers blocks that requests have computed.

    Args:
        max_depth: greatest depth of KV that is grafted from: 0 is exact content only, d + 1 was
            computed over grafts of depth d. MAX_DEPTH is no limit.
        require_clean_context: graft only text that stood at the beginning of its source.
        similarity, anchors: settings of near-duplicates, see `SegmentIndex`.

    Attributes:
        is_whole: function that tests which pages have the KV of all heads; None if all pages do.
    """

    def __init__(
        self,
        pool: Pages,
        max_depth: int = MAX_DEPTH,
        require_clean_context: bool = False,
        similarity: Similarity | None = None,
        anchors: Iterable[Sequence[int]] = (),
    ) -> None:
        self.pool = pool
        self.cuts = similarity, list(anchors)
        self.is_whole: IsWhole | None = None
        self.clear()
        self.max_depth = max_depth
        self.require_clean_context = require_clean_context

    def __len__(self) -> int:
        """Registered blocks, live and stale."""
        return len(self.segments.blocks)

    @property
    def num_too_deep(self) -> int:
        """Tokens of the last prompt that are known only at a depth beyond `max_depth`."""
        return self.segments.blocks.num_too_deep

    @property
    def knows_similar(self) -> bool:
        """Return whether the index finds near-duplicates."""
        return self.segments.similar is not None

    def query(
        self,
        tokens: np.ndarray,
        scopes: tuple[bytes, ...],
        free: np.ndarray,
        *,
        similar: bool,
        whole: bool = True,
    ) -> MatchQuery:
        """Return the query for a prompt under the limits of this index.

        Args:
            tokens, scopes, free, similar: see `MatchQuery`.
            whole: use only text whose KV all heads hold.
        """
        return MatchQuery(
            tokens,
            scopes,
            free,
            self.max_depth,
            self.require_clean_context,
            similar,
            self.is_whole if whole else None,
        )

    def match(self, query: MatchQuery, report: PrefillReport | None = None) -> list[Match]:
        """Return the matches that can be grafted.

        Args:
            report: gets the number of tokens that are known only at a depth beyond `max_depth`.
        """
        found = self.segments.index_for(query).match(query)
        if report is not None:
            report.too_deep_tokens = self.num_too_deep
        return found

    def label(
        self, hits: Mapping[int, int], matches: Sequence[Match]
    ) -> tuple[list[Match], list[Match]]:
        """Return the cached blocks of a prompt (block -> page) as matches, and its matches, both
        with `Match.reading`."""
        if not matches:
            return [], []
        blocks, pages = np.array(sorted(hits.items()), np.int64).reshape(-1, 2).T
        versions, size = self.pool.versions_of(pages.tolist()), self.pool.block_size
        cached = self.readings.hits(blocks, pages, versions, size)
        labelled = self.readings.label([*cached, *matches])
        return labelled[: len(cached)], labelled[len(cached) :]

    def clear(self) -> None:
        """Forget everything."""
        self.segments = SegmentIndex(self.pool.block_size, self.pool.is_live, *self.cuts)
        self.readings = Readings()

    def take_lost(self) -> int:
        """Return the number of blocks that prompts would have grafted if they had not been
        reclaimed, since the last call."""
        lost, self.segments.blocks.num_lost = self.segments.blocks.num_lost, 0
        return lost

    def register(
        self,
        provenance: BlockProvenance,
        tokens: np.ndarray,
        pages: np.ndarray,
        depths: np.ndarray,
        *,
        unlimited: bool = False,
    ) -> None:
        """Register the blocks of a request that were not registered before.

        Args:
            tokens: tokens of all its n full blocks, int64 [n * block_size].
            pages: their pages, int64 [n].
            depths: int [n], see `BlockProvenance.depths`. Blocks beyond `max_depth` are known, but
                no prompt grafts from them.
            unlimited: register blocks even if enough others hold the content, since pinned pages
                outlive those.
        """
        first, stop, size = provenance.num_registered, len(pages), self.pool.block_size
        if first >= stop:
            return

        new, depths = pages[first:], depths[first:stop]
        versions, usable = self.pool.versions_of(new.tolist()), depths <= self.max_depth
        self.pool.keep(new[usable].tolist())
        ids = self.segments.insert(
            tokens[first * size :],
            new,
            versions,
            source=provenance.source,
            source_start=first * size,
            scope=provenance.scope,
            usable=usable,
            depth=depths,
            after=provenance.last_entry,
            unlimited=unlimited,
            is_whole=self.is_whole,
        )
        usable &= ids >= 0
        provenance.approximate_pages.update(new[usable & (depths > 0)].tolist())
        provenance.last_entry = int(ids[-1])
        provenance.num_entries += int(usable.sum())
        self.readings.note(provenance.source, provenance.spans, new, versions, first, size)
        if self.readings.is_full:
            entries = self.segments.blocks.entries
            self.readings.keep(entries.source[entries.held()])
        provenance.num_registered = stop

    def register_exact(
        self, tokens: np.ndarray, pages: Sequence[int], source: int, source_start: int, scope: bytes
    ) -> list[bool]:
        """Register exact blocks from elsewhere as graft sources: consecutive blocks of one source,
        in these pages.

        Returns:
            For each block whether it was registered; False if enough others hold its content.
        """
        where, versions = np.asarray(pages, np.int64), self.pool.versions_of(pages)
        ids = self.segments.insert(
            tokens,
            where,
            versions,
            source=source,
            source_start=source_start,
            scope=scope,
            is_whole=self.is_whole,
        )
        found: list[bool] = (ids >= 0).tolist()
        return found


def wants_similar(match: object, *, offered: bool, how: str) -> bool:
    """Return whether a request gets near-duplicates.

    Args:
        match: setting of the request: `exact`, `similar`, or None for the default of the host.
        offered: whether the host finds near-duplicates.
        how: how to enable them, for the message.

    Raises:
        ValueError: the setting does not exist, or is not offered.
    """
    if match is not None:
        MATCH.check("match", match)
    if match == "similar" and not offered:
        raise ValueError(f"match 'similar': only identical text is known here, {how}")
    return offered and match != "exact"
